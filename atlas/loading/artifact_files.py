"""Reading the Parquet files of finished steps, checked: right columns, nothing missing, everything finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.schema import ARTIFACT_TABLES, artifact_schema

__all__ = ["ArtifactFile", "artifact_files", "distinct_rows"]


@dataclass(frozen=True)
class ArtifactFile:
    """One table of one step's artifact."""

    step: str
    table: str
    path: Path

    @cached_property
    def parquet(self) -> pq.ParquetFile:
        """The open file. Raises `AtlasError` if it is no Parquet file with the columns of its table."""
        try:
            file = pq.ParquetFile(self.path)
        except (pa.ArrowInvalid, OSError) as error:
            why = str(error).split("\n", 1)[0]
            raise AtlasError(f"{self.path}: not readable ({why}); remove its folder, build again") from error
        found = file.schema_arrow
        for expected in artifact_schema(self.table):
            place = found.get_field_index(expected.name)
            if place < 0:
                raise AtlasError(
                    f"{self.path}: the column {expected.name} is missing from table {self.table}"
                )
            if found.field(place).type != expected.type:
                kinds = f"is {found.field(place).type}, expected {expected.type}"
                raise AtlasError(f"{self.path}: column {expected.name} of table {self.table} {kinds}")
        return file

    @property
    def rows(self) -> int:
        return self.parquet.metadata.num_rows

    def row_groups(self) -> Iterator[tuple[int, pa.Table]]:
        """The checked row groups, one at a time, each with the number of its first row."""
        columns = [column.name for column in ARTIFACT_TABLES[self.table].columns]
        first = 0
        for group in range(self.parquet.metadata.num_row_groups):
            rows = self.parquet.read_row_group(group, columns=columns).select(columns)
            self._check(rows, first)
            rows = pa.Table.from_arrays(rows.columns, columns)  # one schema, whatever the file says of nulls
            yield first, rows
            first += len(rows)

    def read(self) -> pa.Table:
        """The whole table, checked."""
        empty = artifact_schema(self.table).empty_table()
        groups = [pa.Table.from_arrays(empty.columns, empty.column_names)]
        groups += [rows for _, rows in self.row_groups()]
        return pa.concat_tables(groups)

    def names(self, column: str) -> set[str]:
        """The distinct values of a column of names."""
        return set(pc.unique(self.parquet.read(columns=[column]).column(0)).cast(pa.string()).to_pylist())

    def refuse(self, column: str, row: int, why: str) -> AtlasError:
        """The error for one bad cell."""
        return AtlasError(f"{self.path}: table {self.table}, column {column}, row {row}: {why}")

    def _check(self, rows: pa.Table, first: int) -> None:
        for column in ARTIFACT_TABLES[self.table].columns:
            values = rows.column(column.name)
            if values.null_count and not column.nullable:
                row = int(np.flatnonzero(pc.is_null(values).to_numpy())[0])
                raise self.refuse(column.name, first + row, "no value")
            if pa.types.is_floating(values.type):
                numbers = pc.fill_null(values, 0).to_numpy()
                if not np.isfinite(numbers).all():
                    row = int(np.flatnonzero(~np.isfinite(numbers))[0])
                    raise self.refuse(column.name, first + row, f"{numbers[row]} is not a finite number")


def artifact_files(folder: AtlasFolder, steps: Sequence[str]) -> dict[str, list[ArtifactFile]]:
    """The final tables of these steps, by table, in the order of the steps.

    Raises `AtlasError` for a step without an artifact folder.
    """
    files: dict[str, list[ArtifactFile]] = {table: [] for table in ARTIFACT_TABLES}
    for step in steps:
        artifact = folder.artifact(step)
        if not artifact.is_dir():
            raise AtlasError(f"{artifact}: the artifact of step {step} is missing; build it again")
        for table, found in files.items():
            path = artifact / f"{table}.parquet"
            if path.exists():
                found.append(ArtifactFile(step, table, path))
    return files


def distinct_rows(rows: pa.Table, identity: Sequence[str], what: str) -> pa.Table:
    """The rows in the order of their identity, each once.

    Two steps may make the same row, one of each of two runs: then the first keeps it (`step` aside, they
    must be equal). Raises `AtlasError` naming both steps if they disagree.
    """
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in identity])
    rows = rows.take(order)
    if len(rows) < 2:
        return rows
    before, after = rows.slice(0, len(rows) - 1), rows.slice(1)
    repeated = np.ones(len(rows) - 1, bool)
    for name in identity:
        repeated &= _equal(before[name], after[name])
    if not repeated.any():
        return rows
    for name in rows.column_names:
        if name == "step":
            continue
        differs = repeated & ~_equal(before[name], after[name])
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            named = ", ".join(f"{key} {before[key][row].as_py()}" for key in identity)
            raise AtlasError(
                f"{what} ({named}) has two values of {name}: {before[name][row].as_py()!r} and "
                f"{after[name][row].as_py()!r}; remove one of the runs, or replace it"
            )
    return rows.filter(pa.array(np.concatenate([[True], ~repeated])))


def _equal(left: pa.ChunkedArray, right: pa.ChunkedArray) -> np.ndarray:
    """Elementwise equality where two nulls are equal."""
    if pa.types.is_dictionary(left.type):
        left, right = left.cast(pa.string()), right.cast(pa.string())
    same = pc.fill_null(pc.equal(left, right), False).to_numpy()
    return same | pc.and_(pc.is_null(left), pc.is_null(right)).to_numpy()
