"""From the artifacts of finished steps to the rows of a database: what `atlas/load.py` is made of."""
