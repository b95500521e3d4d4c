"""Edge rows of one relationship type, from the artifacts: ends as ids, sorted, distinct, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atlas.errors import AtlasError
from atlas.loading.artifact_files import ArtifactFile
from atlas.loading.nodes import Block, NodeRows
from atlas.schema import ARTIFACT_TABLES, RELATIONSHIPS, edge_identity, properties

__all__ = ["EdgeRows", "edge_rows"]

_STORED = {
    "source": np.int32,
    "target": np.int32,
    "reading": np.int8,
    "layer": np.int16,
    "head": np.int16,
    "weight": np.float32,
    "z": np.float32,
    "rank": np.int32,
    "rank_in": np.int32,
    "rank_out": np.int32,
    "step": np.int32,
}
"""Types in which columns are held while they are sorted: 40 bytes an edge in all."""


@dataclass(frozen=True)
class EdgeRows:
    """The edges of one type in the order of their identity, each once.

    `columns` has `source` and `target` (ids), `reading` (a place in `readings`), and the artifact's values.
    """

    type: str
    columns: Mapping[str, np.ndarray]
    readings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.columns["source"])

    def property_names(self) -> list[str]:
        """The properties that have values, in the order of the database's columns."""
        return [column.name for column in properties(self.type) if column.name in self.columns]

    def write(self, path: Path, rows: slice, row_group: int = 500_000) -> None:
        """Writes some of the rows as the Parquet table that the database copies: from, to, properties."""
        with pq.ParquetWriter(path, self._schema(), compression="none", use_dictionary=["reading"]) as writer:
            for start in range(rows.start, rows.stop, row_group):
                writer.write_table(self._table(slice(start, min(start + row_group, rows.stop))))

    def _schema(self) -> pa.Schema:
        kinds = {column.name: column.kind for column in properties(self.type)}
        fields = [("from", pa.int64()), ("to", pa.int64())]
        fields += [(name, kinds[name].database_arrow_type()) for name in self.property_names()]
        return pa.schema(fields)

    def _table(self, rows: slice) -> pa.Table:
        schema = self._schema()
        values = {"from": self.columns["source"], "to": self.columns["target"], **self.columns}
        arrays = []
        for field in schema:
            own = pa.array(values[field.name][rows])
            if field.name == "reading":
                own = pa.array(self.readings, pa.string()).take(own)
            arrays.append(own.cast(field.type))  # float32 to double is exact
        return pa.Table.from_arrays(arrays, schema=schema)


def edge_rows(type: str, files: list[ArtifactFile], nodes: NodeRows) -> EdgeRows:
    """The edges of all files of one type.

    Raises `AtlasError` naming file, column and row for an end that does not exist, and for an edge that
    occurs twice (in one file) or with two values (in two).
    """
    stored = ["source", "target", *(n for n in _artifact_values(type)), "step"]
    n_rows = sum(file.rows for file in files)
    columns = {name: np.empty(n_rows, _STORED[name]) for name in stored}
    readings = sorted(set().union(*(file.names("reading") for file in files))) if "reading" in stored else []
    start = 0
    for file in files:
        for first, rows in file.row_groups():
            place = slice(start, start + len(rows))
            for name, values in _mapped(file, rows, first, nodes, readings):
                columns[name][place] = values
            columns["step"][place] = nodes.steps[file.step]
            start += len(rows)
    columns = _sorted(type, columns, files, nodes)
    return EdgeRows(type, columns, tuple(readings))


def _artifact_values(type: str) -> list[str]:
    """The artifact's columns that are properties of the edge."""
    own = {column.name for column in RELATIONSHIPS[type].columns}
    return [column.name for column in ARTIFACT_TABLES[type].columns if column.name in own]


def _mapped(
    file: ArtifactFile, rows: pa.Table, first: int, nodes: NodeRows, readings: list[str]
) -> Iterator[tuple[str, np.ndarray]]:
    ends = RELATIONSHIPS[file.table]
    for end, label in (("source", ends.source), ("target", ends.target)):
        if label == "Token":
            yield end, _ids(file, rows, first, "model", "token", nodes.tokens)
        else:
            yield end, _ids(file, rows, first, f"{end}_dictionary", end, nodes.features)
    for name in _artifact_values(file.table):
        if name == "reading":
            yield name, _codes(rows[name], {reading: code for code, reading in enumerate(readings)})
        else:
            yield name, rows[name].to_numpy()
    if "head" in rows.column_names:
        _check_heads(file, rows, first, nodes)


def _codes(names: pa.ChunkedArray, values: Mapping[str, int], missing: int = -1) -> np.ndarray:
    """A number for each name, looked up once for each distinct name."""
    parts = []
    for chunk in names.chunks:
        table = np.array([values.get(name, missing) for name in chunk.dictionary.to_pylist()], np.int64)
        codes = chunk.indices.to_numpy()
        parts.append(table[codes] if len(table) else np.empty(0, np.int64))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _ids(
    file: ArtifactFile, rows: pa.Table, first: int, owner: str, number: str, blocks: Mapping[str, Block]
) -> np.ndarray:
    """Ids of one end of the rows. Raises `AtlasError` for the first row whose end does not exist."""
    base = _codes(rows[owner], {hash: block.base for hash, block in blocks.items()})
    size = _codes(rows[owner], {hash: block.size for hash, block in blocks.items()}, missing=0)
    numbers = rows[number].to_numpy()
    bad = (numbers < 0) | (numbers >= size)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        hash = rows[owner][row].as_py()
        if size[row] == 0:
            raise file.refuse(
                owner, first + row, f"{hash} is in no table of the runs, so the edge has no end"
            )
        raise file.refuse(
            number, first + row, f"{numbers[row]}, but {hash} has the numbers 0 to {size[row] - 1}"
        )
    return base + numbers


def _check_heads(file: ArtifactFile, rows: pa.Table, first: int, nodes: NodeRows) -> None:
    n_heads = _codes(rows["model"], {hash: heads for hash, (_, heads) in nodes.heads.items()}, missing=0)
    size = _codes(rows["model"], {hash: block.size for hash, (block, _) in nodes.heads.items()}, missing=0)
    layer, head = rows["layer"].to_numpy(), rows["head"].to_numpy()
    bad = (head < 0) | (head >= n_heads) | (layer < 0) | (layer * np.maximum(n_heads, 1) >= size)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise file.refuse("head", first + row, f"layer {layer[row]} head {head[row]} is no head of the model")
    models = sorted(set(nodes.heads) | {block.model for block in nodes.features.values()})
    number = {hash: code for code, hash in enumerate(models)}
    of_source = _codes(rows["source_dictionary"], {d: number[b.model] for d, b in nodes.features.items()})
    other = _codes(rows["model"], number) != of_source
    if other.any():
        row = int(np.flatnonzero(other)[0])
        raise file.refuse("model", first + row, "the head is of another model than the source")


def _sorted(
    type: str, columns: dict[str, np.ndarray], files: list[ArtifactFile], nodes: NodeRows
) -> dict[str, np.ndarray]:
    identity = edge_identity(type)
    order = _order([columns[name] for name in identity])
    if order is not None:
        for name in columns:
            columns[name] = columns[name][order]
    repeated = np.ones(max(len(columns["source"]) - 1, 0), bool)
    for name in identity:
        repeated &= columns[name][1:] == columns[name][:-1]
    if not repeated.any():
        return columns
    steps = {id: step for step, id in nodes.steps.items()}
    same_step = repeated & (columns["step"][1:] == columns["step"][:-1])
    if same_step.any():
        raise _twice(type, columns, int(np.flatnonzero(same_step)[0]), files, steps, "occurs twice")
    for name in set(columns) - {"step", *identity}:
        differs = repeated & (columns[name][1:] != columns[name][:-1])
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            pair = f"has {name} {columns[name][row]} and {columns[name][row + 1]}"
            raise _twice(
                type, columns, row, files, steps, f"{pair}: two selections of the same edges; replace one run"
            )
    keep = np.concatenate([[True], ~repeated])
    return {name: values[keep] for name, values in columns.items()}


def _order(identity: list[np.ndarray]) -> np.ndarray | None:
    """The order by these columns, the first foremost; None if the rows are in it."""
    if len(identity[0]) == 0:
        return None
    widths = [int(values.max()).bit_length() for values in identity]
    if sum(widths) > 63:
        return np.lexsort(identity[::-1])
    key = np.zeros(len(identity[0]), np.int64)
    for values, width in zip(identity, widths, strict=True):
        key <<= width
        key |= values
    if np.all(key[:-1] <= key[1:]):
        return None
    return np.argsort(key, kind="stable")  # stable: of equal rows the first run's stays


def _twice(
    type: str,
    columns: Mapping[str, np.ndarray],
    row: int,
    files: list[ArtifactFile],
    steps: Mapping[int, str],
    what: str,
) -> AtlasError:
    """The error for two rows of one edge, naming the edge and the files they came from."""
    paths = {file.step: file.path for file in files}
    held = {str(paths[steps[int(columns["step"][at])]]) for at in (row, row + 1)}
    edge = ", ".join(f"{name} {columns[name][row]}" for name in edge_identity(type) if name != "reading")
    return AtlasError(f"{' and '.join(sorted(held))}: the {type} edge ({edge}) {what}")
