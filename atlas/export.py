"""An atlas, or a part of it, as files for other programs: Parquet, CSV, GraphML.

    whole graph            every node and edge
    around a feature       what a number of hops reaches along the strongest edges of each node
    selected by a query    the nodes that a Cypher query returns, and all edges among them

Parquet and CSV are a folder of one file for each label and type; GraphML is one file. Everything is written
piece by piece under a temporary name, which takes its place when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.answers import Answer, Table
from atlas.errors import AtlasError
from atlas.folder import disk_errors
from atlas.schema import NODES, RELATIONSHIPS, Column

if TYPE_CHECKING:
    import pyarrow as pa

    from atlas.api import Atlas

__all__ = ["FORMATS", "export"]

FORMATS = ("parquet", "csv", "graphml")
ROWS = 100_000  # fetched at once
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Selection:
    """The nodes to write, by label; None for all of the atlas."""

    nodes: Mapping[str, Sequence[int]] | None

    def count(self) -> int:
        return sum(map(len, (self.nodes or {}).values()))


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

    format: by default what the suffix of `out` says. hops, top: around a feature, follow the `top` strongest
    edges of each type, reading and direction this many times (tokens come in at the end, by rank). types:
    only these relationships. Raises AtlasError; then `out` is as it was.
    """
    format = _format(out, format)
    chosen = tuple(types or (type for type in RELATIONSHIPS if type != "USED" or format != "graphml"))
    for type in chosen:
        if type not in RELATIONSHIPS:
            raise AtlasError(f"{type}: no type of relationship; there are {', '.join(RELATIONSHIPS)}")
    if around is not None and query is not None:
        raise AtlasError("around a feature or selected by a query: expected one of them")
    if around is not None:
        selection = Selection(_neighbourhood(atlas, around, hops, top, chosen))
    elif query is not None:
        selection = Selection(_returned(atlas, query, parameters))
    else:
        selection = Selection(None)
    with _replacing(out, folder=format != "graphml", overwrite=overwrite) as target:
        if format == "graphml":
            counts = _write_graphml(atlas, target, selection, chosen, progress)
        else:
            counts = _write_tables(atlas, target, selection, chosen, format, progress)
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


def _neighbourhood(atlas: Atlas, key: str, hops: int, top: int, types: Sequence[str]) -> dict[str, list[int]]:
    """The features that `hops` steps reach over each node's strongest edges, and their strongest tokens."""
    start = atlas.feature(key).id
    features, border = {start}, [start]
    for _ in range(hops):
        found: set[int] = set()
        for type in ("DIRECT", "VIA_HEAD"):
            if type not in types:
                continue
            for pattern, rank in ((f"(f:Feature)-[r:{type}]->(o:Feature)", "rank_out"),
                                  (f"(o:Feature)-[r:{type}]->(f:Feature)", "rank_in")):  # fmt: skip
                found.update(
                    atlas.store.query(
                        f"MATCH {pattern} WHERE f.id IN $ids AND r.{rank} <= $top RETURN DISTINCT o.id AS id",
                        {"ids": border, "top": top},
                    ).column("id")
                )
        border = sorted(found - features)
        features |= found
        if not border:
            break
    tokens: set[int] = set()
    for type, pattern in (
        ("EMBEDS", "(t:Token)-[r:EMBEDS]->(f:Feature)"),
        ("PROMOTES", "(f:Feature)-[r:PROMOTES]->(t:Token)"),
    ):
        if type in types:
            tokens.update(
                atlas.store.query(
                    f"MATCH {pattern} WHERE f.id IN $ids AND r.rank <= $top RETURN DISTINCT t.id AS id",
                    {"ids": sorted(features), "top": top},
                ).column("id")
            )
    return {"Feature": sorted(features), "Token": sorted(tokens)}


def _returned(atlas: Atlas, query: str, parameters: Mapping[str, Any] | None) -> dict[str, list[int]]:
    """The nodes in a query's rows, wherever they stand (in lists and paths too)."""
    found: dict[str, set[int]] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Mapping):
            if "_label" in value:
                found.setdefault(value["_label"], set()).add(value["id"])
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    for row in atlas.store.query(query, parameters).rows:
        collect(row)
    if not found:
        raise AtlasError(
            "the query returns no node; return the nodes to export, as in MATCH (f:Feature) … RETURN f"
        )
    return {label: sorted(ids) for label, ids in found.items()}


def _nodes(atlas: Atlas, label: str, selection: Selection) -> Iterator[list[tuple[Any, ...]]]:
    """Rows of a label's properties, a piece at a time, in the order of ids."""
    columns = ", ".join(f"n.`{column.name}`" for column in NODES[label].columns)
    for condition, parameters in _pieces(atlas, label, selection):
        cypher = f"{condition.format(name='n', label=label)} RETURN {columns} ORDER BY n.id"
        if rows := list(atlas.store.query(cypher, parameters).rows):
            yield rows


def _pieces(atlas: Atlas, label: str, selection: Selection) -> Iterator[tuple[str, dict[str, Any]]]:
    """MATCH clauses that take a label's nodes a range of ids at a time."""
    if selection.nodes is not None:
        ids = selection.nodes.get(label, ())
        for first in range(0, len(ids), 1000):
            match = "MATCH ({name}:{label}) WHERE {name}.id IN $ids"
            yield match, {"ids": list(ids[first : first + 1000])}
        return
    low, high = atlas.store.query(f"MATCH (n:{label}) RETURN min(n.id), max(n.id)").rows[0]
    for first in range(low or 0, (-1 if high is None else high) + 1, _STRIDE.get(label, ROWS)):
        last = first + _STRIDE.get(label, ROWS)
        yield (
            "MATCH ({name}:{label}) WHERE {name}.id >= $first AND {name}.id < $last",
            {"first": first, "last": last},
        )


_STRIDE = {"Feature": 2048, "Token": 2048}  # nodes of many edges: so that a piece of edges stays small


def _edges(atlas: Atlas, type: str, selection: Selection) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (source id, target id, properties…) of a type, a piece at a time, by source."""
    table = RELATIONSHIPS[type]
    columns = "".join(f", r.`{column.name}`" for column in table.columns)
    allowed = None if selection.nodes is None else set(selection.nodes.get(table.target, ()))
    for condition, parameters in _pieces(atlas, table.source, selection):
        match = condition.format(name="a", label=f"{table.source})-[r:{type}]->(b:{table.target}")
        rows = atlas.store.query(f"{match} RETURN a.id AS source, b.id AS target{columns}", parameters).rows
        kept = sorted(row for row in rows if allowed is None or row[1] in allowed) if len(rows) else []
        if kept:
            yield kept


def _filled(atlas: Atlas, selection: Selection, types: Sequence[str]) -> tuple[list[str], list[str]]:
    """Labels and types that have something to write."""
    counts = atlas.store.counts()
    labels = [
        label for label in NODES if counts[label] and (selection.nodes is None or selection.nodes.get(label))
    ]
    kept = [type for type in RELATIONSHIPS if type in types and counts[type]]
    return labels, kept


def _write_tables(
    atlas: Atlas, folder: Path, selection: Selection, types: Sequence[str], format: str, progress: Progress
) -> dict[str, int]:
    import pyarrow as pa

    labels, kept = _filled(atlas, selection, types)
    ids: list[int] = []
    names: list[str] = []
    counts: dict[str, int] = {}
    total = len(labels) + len(kept)
    for label in labels:
        schema = _schema(NODES[label].columns)
        place = [column.name for column in NODES[label].columns].index("id")
        with _table_writer(folder / f"{label}.{format}", schema, format) as write:
            for rows in _nodes(atlas, label, selection):
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
            for rows in _edges(atlas, type, selection):
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


def _write_graphml(
    atlas: Atlas, path: Path, selection: Selection, types: Sequence[str], progress: Progress
) -> dict[str, int]:
    from atlas.graphml import GraphMLWriter

    labels, kept = _filled(atlas, selection, types)
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
            for rows in _nodes(atlas, label, selection):
                for row in rows:
                    values = dict(zip(columns, row, strict=True))
                    key_of[values["id"]] = values["key"]
                    writer.node(values["key"], label, values)
                counts[label] = counts.get(label, 0) + len(rows)
            progress(len(counts), total, label)
        for type in kept:
            columns = [column.name for column in edge_columns[type]]
            for rows in _edges(atlas, type, selection):
                for source, target, *own in rows:
                    writer.edge(key_of[source], key_of[target], type, dict(zip(columns, own, strict=True)))
                counts[type] = counts.get(type, 0) + len(rows)
                progress(len(counts) - 0.5, total, f"{type}: {counts[type]:,}")
            counts.setdefault(type, 0)
    return counts
