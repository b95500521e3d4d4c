"""The one error for an atlas, a store or a query that cannot be served as asked."""

from ingest.errors import printable

__all__ = ["AtlasError", "DiskFull"]


class AtlasError(Exception):
    """One line for the user: what is wrong with the atlas or the query, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class DiskFull(AtlasError):
    """There is no room left for what was to be written."""
