"""Computes: weight graph, statistics, circuits. Knows `ingest` and `atlas.schema`, never a store."""
