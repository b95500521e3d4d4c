"""The atlas: schema, stores, loader, command line and Python interface.

Names are imported when first used, so that `atlas.schema` can be read without anything heavy.
"""
