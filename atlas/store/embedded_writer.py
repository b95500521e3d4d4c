"""Fills a new embedded database: tables with the columns that have values, COPY from Parquet, the rest
added empty.

One COPY runs at a time (the engine has one writer). It keeps about one core busy and leaves Python free,
so that the loader maps the next table meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import ladybug
import pyarrow.parquet as pq

from atlas.errors import AtlasError
from atlas.schema import MACROS, NODES, RELATIONSHIPS, add_column, create_table, properties
from atlas.store.engine import open_database

__all__ = ["EmbeddedWriter"]

BYTES_PER_EDGE = 280
"""What COPY holds of an edge in both directions, measured with the columns of VIA_HEAD."""

FEWEST_ROWS = 100_000
"""Rows of one COPY at least, however little memory there is."""


class EmbeddedWriter:
    """A database being built in a folder that no reader sees yet.

    `memory` bounds the engine's buffers, in bytes. A table whose rows do not fit is copied in several
    parts, which is slower: every part after the first rewrites what is there.
    """

    def __init__(self, path: Path, memory: int) -> None:
        try:
            self._database = open_database(path, memory)
        except RuntimeError as error:
            raise _explained(error, path) from error
        self._path = path
        self._connection = ladybug.Connection(self._database)
        self._made: set[str] = set()
        self._interrupted = self._failed = False
        self.rows_at_once = max(FEWEST_ROWS, int(0.8 * memory / BYTES_PER_EDGE))

    def copy(self, label_or_type: str, files: Sequence[Path]) -> None:
        """Fills a table from Parquet files, which have its columns in any number but the same ones."""
        columns = [name for name in pq.read_schema(files[0]).names if name not in ("from", "to")]
        self._create(label_or_type, columns)
        listed = f"({', '.join(columns)})" if columns else ""
        for file in files:
            self._execute(f"COPY {label_or_type}{listed} FROM {_quoted(file)}")
        self._add_missing(label_or_type, columns)

    def finish(self, expected: dict[str, int]) -> None:
        """Makes the tables that got no rows, compares the number of rows of each, and closes the database."""
        for name in (*NODES, *RELATIONSHIPS):
            if name not in self._made:
                self._create(name, None)
        for statement in MACROS:
            self._execute(statement)
        for name, rows in expected.items():
            pattern = f"(n:{name})" if name in NODES else f"()-[n:{name}]->()"
            ((found,),) = self._execute(f"MATCH {pattern} RETURN count(*)").get_all()
            if found != rows:
                raise AtlasError(
                    f"the database holds {found} rows of {name} after loading {rows}; nothing was changed"
                )
        self._execute("CHECKPOINT")
        self.close()

    def close(self) -> None:
        self._connection.close()
        self._database.close()

    def interrupt(self) -> None:
        """Stops the statement that runs in another thread, and lets no other one begin."""
        self._interrupted = True
        self._connection.interrupt()

    def give_up(self, *, disk_full: bool) -> None:
        """Ends it without a result, when no statement runs any more.

        The engine writes when it closes, and where it cannot, it ends the process. So after a failure it is
        never closed: its objects live on, without files, until the process ends.
        """
        if not (disk_full or self._failed):
            self.close()
            return
        for thing in (self._database, self._connection):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        for file in self._path.parent.glob(f"{self._path.name}*"):
            os.truncate(file, 0)  # it stays open, so that removing it would not free its room

    def _create(self, name: str, columns: Sequence[str] | None) -> None:
        # Node tables before the relationships between them
        if name in RELATIONSHIPS:
            ends = RELATIONSHIPS[name]
            for label in (ends.source, ends.target):
                if label not in self._made:
                    self._create(label, None)
        self._execute(create_table(name, columns))
        self._made.add(name)

    def _add_missing(self, name: str, columns: Sequence[str]) -> None:
        for column in properties(name):
            if column.name not in columns:
                self._execute(add_column(name, column))

    def _execute(self, statement: str) -> ladybug.QueryResult:
        if self._interrupted or self._failed:  # after a failed write the engine waits for itself for ever
            raise AtlasError("the load was given up; nothing was changed")
        try:
            answer = self._connection.execute(statement)
        except RuntimeError as error:
            self._failed = not self._interrupted
            raise _explained(error, self._path) from error
        if isinstance(answer, list):
            raise TypeError(f"one statement expected: {statement}")
        return answer


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _explained(error: RuntimeError, path: Path) -> Exception:
    """The engine's error as the one that it means."""
    line = str(error).strip().split("\n", 1)[0]
    if "Cannot write to file" in line:  # the reason beside it is not to be trusted after a short write
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    if "buffer pool is full" in line:
        return AtlasError("the load needs more memory than it was given; nothing was changed. Give it more")
    return AtlasError(f"the database refused a table; nothing was changed ({line})")
