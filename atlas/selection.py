"""A part of an atlas: which nodes, and their rows and edges a piece at a time.

whole graph            every node and edge
around a feature       what a number of hops reaches along the strongest edges of each node
selected by a query    the nodes that a Cypher query returns, and all edges among them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atlas.errors import AtlasError
from atlas.schema import NODES, RELATIONSHIPS

if TYPE_CHECKING:
    from atlas.api import Atlas

__all__ = ["Selection", "edge_rows", "filled", "node_rows", "select"]

ROWS = 100_000  # nodes fetched at once
_STRIDE = {"Feature": 2048, "Token": 2048}  # nodes of many edges: so that a piece of edges stays small


@dataclass(frozen=True)
class Selection:
    """Ids of nodes by label, None for all of the atlas, and the types of relationships among them."""

    nodes: Mapping[str, Sequence[int]] | None
    types: tuple[str, ...]


def select(
    atlas: Atlas,
    *,
    around: str | None = None,
    hops: int = 1,
    top: int = 20,
    query: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    types: Sequence[str] | None = None,
) -> Selection:
    """What `around` or `query` selects, or everything.

    hops, top: around a feature, follow the `top` strongest edges of each type, reading and direction this
    many times (tokens come in at the end, by rank). types: only these relationships. Raises AtlasError.
    """
    chosen = tuple(types or RELATIONSHIPS)
    for type in chosen:
        if type not in RELATIONSHIPS:
            raise AtlasError(f"{type}: no type of relationship; there are {', '.join(RELATIONSHIPS)}")
    if around is not None and query is not None:
        raise AtlasError("around a feature or selected by a query: expected one of them")
    if around is not None:
        return Selection(_neighbourhood(atlas, around, hops, top, chosen), chosen)
    if query is not None:
        return Selection(_returned(atlas, query, parameters), chosen)
    return Selection(None, chosen)


def filled(atlas: Atlas, selection: Selection) -> tuple[list[str], list[str]]:
    """Labels and types that have something to write."""
    counts = atlas.store.counts()
    labels = [
        label for label in NODES if counts[label] and (selection.nodes is None or selection.nodes.get(label))
    ]
    kept = [type for type in RELATIONSHIPS if type in selection.types and counts[type]]
    return labels, kept


def node_rows(atlas: Atlas, label: str, selection: Selection) -> Iterator[list[tuple[Any, ...]]]:
    """Rows of a label's properties, a piece at a time, in the order of ids."""
    columns = ", ".join(f"n.`{column.name}`" for column in NODES[label].columns)
    for condition, parameters in _pieces(atlas, label, selection):
        cypher = f"{condition.format(name='n', label=label)} RETURN {columns} ORDER BY n.id"
        if rows := list(atlas.store.query(cypher, parameters).rows):
            yield rows


def edge_rows(atlas: Atlas, type: str, selection: Selection) -> Iterator[list[tuple[Any, ...]]]:
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
