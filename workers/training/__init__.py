"""Training dictionaries: activations harvested in a stream, several dictionaries in one pass over text."""
