"""An atlas, or a part of it, as files for other programs: Parquet, CSV, GraphML.

Parquet and CSV are a folder of one file for each label and type; GraphML is one file. Everything is written
piece by piece under a temporary name, which takes its place when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.answers import Answer, Table
from atlas.errors import AtlasError
from atlas.folder import disk_errors
from atlas.schema import NODES, RELATIONSHIPS, Column
from atlas.selection import Selection, edge_rows, filled, node_rows, select

if TYPE_CHECKING:
    import pyarrow as pa

    from atlas.api import Atlas

__all__ = ["FORMATS", "export"]

FORMATS = ("parquet", "csv", "graphml")
Progress = Callable[[float, float, str], None]


def export(
    atlas: Atlas,
    out: Path,
    *,
    format: str | None = None,
    around: str | None = None,
    hops: int = 1,
    top: int = 20,
    query: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    types: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total, unit: None,
) -> Answer:
    """Writes the whole atlas, or what `around` or `query` selects.

    format: by default what the suffix of `out` says. around … types: see `atlas.selection.select`. Raises
    AtlasError; then `out` is as it was.
    """
    format = _format(out, format)
    if types is None and format == "graphml":  # a drawing has no use for which run used which step
        types = [type for type in RELATIONSHIPS if type != "USED"]
    selection = select(
        atlas, around=around, hops=hops, top=top, query=query, parameters=parameters, types=types
    )
    with _replacing(out, folder=format != "graphml", overwrite=overwrite) as target:
        if format == "graphml":
            counts = _write_graphml(atlas, target, selection, progress)
        else:
            counts = _write_tables(atlas, target, selection, format, progress)
    rows = [(name, count) for name, count in counts.items()]
    return Answer(
        f"wrote {out}",
        {"out": str(out), "format": format},
        {"written": Table.of("", ("table", "rows"), rows)},
    )


def _format(out: Path, format: str | None) -> str:
    known = format or out.suffix.lstrip(".").lower()
    if known not in FORMATS:
        raise AtlasError(f"{out}: expected a format, {', '.join(FORMATS)} (--format, or a name that ends so)")
    return known


@contextmanager
def _replacing(out: Path, *, folder: bool, overwrite: bool) -> Iterator[Path]:
    """A temporary place beside `out` that becomes `out` when the block ends well."""
    if out.exists() and not overwrite:
        raise AtlasError(f"{out}: exists; choose another name or say --force")
    if out.exists() and out.is_dir() != folder:
        raise AtlasError(f"{out}: is {'a file' if folder else 'a folder'}; choose another name")
    if not out.parent.is_dir():
        raise AtlasError(f"{out.parent}: no such folder")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    with disk_errors(out.parent):
        try:
            if folder:
                temporary.mkdir()
            yield temporary
            if folder and out.exists():
                shutil.rmtree(out)
            temporary.rename(out)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


def _write_tables(
    atlas: Atlas, folder: Path, selection: Selection, format: str, progress: Progress
) -> dict[str, int]:
    import pyarrow as pa

    labels, kept = filled(atlas, selection)
    ids: list[int] = []
    names: list[str] = []
    counts: dict[str, int] = {}
    total = len(labels) + len(kept)
    for label in labels:
        schema = _schema(NODES[label].columns)
        place = [column.name for column in NODES[label].columns].index("id")
        with _table_writer(folder / f"{label}.{format}", schema, format) as write:
            for rows in node_rows(atlas, label, selection):
                write(_batch(rows, schema))
                ids += [row[place] for row in rows]
                names += [row[place + 1] for row in rows]
                counts[label] = counts.get(label, 0) + len(rows)
        progress(len(counts), total, label)
    key_of = dict(zip(ids, names, strict=True))
    for type in kept:
        ends = [pa.field(name, pa.int64(), nullable=False) for name in ("source_id", "target_id")]
        ends += [pa.field(name, pa.string(), nullable=False) for name in ("source", "target")]
        schema = pa.schema([*ends, *_schema(RELATIONSHIPS[type].columns)])
        with _table_writer(folder / f"{type}.{format}", schema, format) as write:
            for rows in edge_rows(atlas, type, selection):
                write(_batch([(a, b, key_of[a], key_of[b], *rest) for a, b, *rest in rows], schema))
                counts[type] = counts.get(type, 0) + len(rows)
                progress(len(counts) - 0.5, total, f"{type}: {counts[type]:,}")
        counts.setdefault(type, 0)
    return counts


def _schema(columns: Sequence[Column]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.kind.database_arrow_type()) for column in columns])


def _batch(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    columns = list(zip(*rows, strict=True))
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


@contextmanager
def _table_writer(path: Path, schema: pa.Schema, format: str) -> Iterator[Callable[[pa.Table], None]]:
    if format == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, schema, compression="zstd") as parquet:
            yield parquet.write_table
    else:
        import pyarrow.csv as csv

        with csv.CSVWriter(path, schema) as writer:
            yield writer.write_table


def _write_graphml(atlas: Atlas, path: Path, selection: Selection, progress: Progress) -> dict[str, int]:
    from atlas.graphml import GraphMLWriter

    labels, kept = filled(atlas, selection)
    if selection.nodes is None:  # nodes without relationships (a model, a step) say nothing in a drawing
        ends = {end for type in kept for end in (RELATIONSHIPS[type].source, RELATIONSHIPS[type].target)}
        labels = [label for label in labels if label in ends]
    key_of: dict[int, str] = {}
    counts: dict[str, int] = {}
    total = len(labels) + len(kept)
    node_columns = {label: NODES[label].columns for label in labels}
    edge_columns = {type: RELATIONSHIPS[type].columns for type in kept}
    with GraphMLWriter(path, node_columns, edge_columns) as writer:
        for label in labels:
            columns = [column.name for column in node_columns[label]]
            for rows in node_rows(atlas, label, selection):
                for row in rows:
                    values = dict(zip(columns, row, strict=True))
                    key_of[values["id"]] = values["key"]
                    writer.node(values["key"], label, values)
                counts[label] = counts.get(label, 0) + len(rows)
            progress(len(counts), total, label)
        for type in kept:
            columns = [column.name for column in edge_columns[type]]
            for rows in edge_rows(atlas, type, selection):
                for source, target, *own in rows:
                    writer.edge(key_of[source], key_of[target], type, dict(zip(columns, own, strict=True)))
                counts[type] = counts.get(type, 0) + len(rows)
                progress(len(counts) - 0.5, total, f"{type}: {counts[type]:,}")
            counts.setdefault(type, 0)
    return counts
