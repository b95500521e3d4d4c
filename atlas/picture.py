"""A feature's neighbourhood as a picture: what it reads and promotes, its strongest neighbours by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlas import lookups
from atlas.answers import Table, brief, visible
from atlas.errors import AtlasError
from atlas.fan import Card, Edge, Neighbour, Sheet, Side, Tokens
from atlas.lookups import FEATURE_TYPES
from atlas.svg import Picture

if TYPE_CHECKING:
    from atlas.api import Atlas, Feature

__all__ = ["neighbourhood"]


def neighbourhood(
    atlas: Atlas,
    feature: Feature,
    up: int = 10,
    down: int = 10,
    by: str = "weight",
    types: Sequence[str] = FEATURE_TYPES,
) -> Picture:
    """The feature with its tokens and its strongest edges.

    up, down: edges into it and out of it, at most; of two types each gets half, and what the other leaves
    (weights through a head are on another scale than direct ones). by: "weight" or "z": what is strongest,
    and what the width of an edge shows. Raises AtlasError.
    """
    if min(up, down) < 0:
        raise AtlasError(f"{min(up, down)}: expected a number of edges to draw")
    upstream = _side(atlas, feature, "up", up, by, types)
    downstream = _side(atlas, feature, "down", down, by, types)
    sheet = Sheet(_card(feature), _layers(atlas, feature), upstream, downstream, by)
    return Picture(
        sheet.draw(), f"the neighbourhood of {feature.key}", len(upstream.edges) + len(downstream.edges)
    )


def _layers(atlas: Atlas, feature: Feature) -> int:
    """Layers on the axis: as far as its model has dictionaries."""
    return 1 + max(d.layer for d in atlas.dictionaries if d.model == feature.properties["model"])


def _side(atlas: Atlas, feature: Feature, direction: str, most: int, by: str, types: Sequence[str]) -> Side:
    chosen: list[tuple[str, dict]] = []
    totals = {}
    found = {
        type: lookups.neighbours(
            atlas.store, feature.properties, direction, types=[type], by=by, limit=max(1, most)
        ).records()
        for type in dict.fromkeys(types)
    }
    for type, count in _shares({type: len(rows) for type, rows in found.items()}, most).items():
        chosen += [(type, row) for row in found[type][:count]]
        end = "a" if direction == "down" else "b"
        match = f"MATCH (a:Feature)-[:{type}]->(b:Feature) WHERE {end}.id = $id"
        counted = atlas.store.query(f"{match} RETURN count(*)", {"id": feature.id})
        totals[type] = counted.rows[0][0]
    edges: dict[str, list[Edge]] = {}
    promotes: dict[str, tuple[str, ...]] = {}
    labels: dict[str, str | None] = {}
    for type, row in chosen:
        values = (row[name] for name in ("via", "reading", "weight", "z", "rank_in", "rank_out"))
        edges.setdefault(row["feature"], []).append(Edge(type, *values))
        promotes[row["feature"]] = tuple(map(visible, row["promotes"]))
        labels[row["feature"]] = row["label"]
    known = {d.key: d for d in atlas.dictionaries}
    neighbours = []
    for key, own in edges.items():
        place, _, n = key.rpartition("/")
        dictionary = known[place]
        name = f"{dictionary.alias}{dictionary.layer}[{n}]" if dictionary.alias else key.partition("/")[2]
        own.sort(key=lambda edge: -abs(getattr(edge, by)))
        neighbours.append(Neighbour(key, name, dictionary.layer, promotes[key], tuple(own), labels[key]))
    return Side(tuple(neighbours), totals)


def _shares(found: dict[str, int], most: int) -> dict[str, int]:
    """How many of each to take: alike, and what one leaves the others get.

    >>> _shares({"DIRECT": 9, "VIA_HEAD": 2}, 10)
    {'DIRECT': 8, 'VIA_HEAD': 2}
    """
    taken = dict.fromkeys(found, 0)
    while sum(taken.values()) < most and any(taken[type] < found[type] for type in found):
        type = min((t for t in found if taken[t] < found[t]), key=lambda t: taken[t])
        taken[type] += 1
    return taken


def _card(feature: Feature) -> Card:
    tables = feature.embeds(10)
    each = (5, 3) if len(tables) > 1 else (8, 5)
    reads = {reading: _signs(table, *each) for reading, table in tables.items()}
    norms = [
        f"|{said}| {value:.3g}"
        for name, said in (("write_norm", "writing vector"), ("read_norm", "reading vector"),
                           ("read_norm_up", "up reading vector"))
        if (value := feature.properties.get(name)) is not None
    ]  # fmt: skip
    title = f"{feature.short}   {feature.key}" if feature.short else feature.key
    said = "   ".join([*([brief(feature.label)] if feature.label else []), feature.kind, *norms])
    promotes = _signs(feature.promotes(10), *((10, 8) if len(tables) > 1 else each))
    return Card(feature.key, title, said, feature.layer, reads, promotes)


def _signs(table: Table, highest: int, lowest: int) -> Tokens:
    high = [(visible(row[1]), row[2]) for row in table.rows if row[1] is not None][:highest]
    low = [(visible(row[3]), row[4]) for row in table.rows if row[3] is not None][:lowest]
    gap: Tokens = [None] if high and low else []
    return [*high, *gap, *low]
