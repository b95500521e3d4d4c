"""Reads models, feature dictionaries and specs into plain tensors and tables. Knows no other room."""
