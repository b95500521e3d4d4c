"""Paths between tokens and features, as answers: ends by name, every edge with its reading and head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atlas.answers import Answer, Table, visible
from atlas.errors import AtlasError
from atlas.lookups import FEATURE_TYPES, VIA, keys_of_features, labels_of_features, promoted_by_feature

if TYPE_CHECKING:
    from atlas.api import Atlas
    from queries.paths import End, Path, WeightGraph

__all__ = ["paths_answer"]

NOTE = (
    "Products are input-invariant: norm scales, attention patterns and activations are left out. A path says"
    " what could flow between its ends, not what caused anything on a prompt. The search is exact over the"
    " edges kept."
)
COLUMNS = ("path", "product", "via", "reading", "weight", "to", "promotes", "label")


def paths_answer(
    atlas: Atlas, source: str, target: str, k: int, hops: tuple[int, int], types: Sequence[str]
) -> Answer:
    """The k strongest paths as one row for each edge. Raises AtlasError for unknown ends, types and hops."""
    from queries.paths import WeightGraph, strongest_paths

    for type in types:
        if type not in FEATURE_TYPES:
            raise AtlasError(
                f"{type}: no type of edge between features; expected {' or '.join(FEATURE_TYPES)}"
            )
    if not 0 <= hops[0] <= hops[1]:
        raise AtlasError(f"hops {hops[0]} to {hops[1]}: expected the fewest first, 0 or more")
    starts, ends = _ends(atlas, source, "EMBEDS"), _ends(atlas, target, "PROMOTES")
    graph = WeightGraph(atlas.store.arrays, types)
    found = strongest_paths(graph, starts, ends, range(hops[0], hops[1] + 1))
    paths = list(itertools.islice(found, k))
    title = f"strongest paths {_shown(source, starts)} → {_shown(target, ends)}"
    facts = {"found": len(paths), "hops": f"{hops[0]} to {hops[1]}"}
    return Answer(title, facts, {"paths": _table(atlas, graph, paths)}, (NOTE,))


def _ends(atlas: Atlas, text: str, type: str) -> list[End]:
    from queries.paths import End

    kind, nodes = atlas.ends(text)
    if kind == "feature":
        return [End(id) for id, _ in nodes]
    pattern = (
        "(t:Token)-[r:EMBEDS]->(f:Feature)" if type == "EMBEDS" else "(f:Feature)-[r:PROMOTES]->(t:Token)"
    )
    reading = "r.reading" if type == "EMBEDS" else "''"
    ends: list[End] = []
    for id, token in nodes:
        rows = atlas.store.query(
            f"MATCH {pattern} WHERE t.id = $id RETURN f.id AS id, r.weight AS weight, {reading} AS reading"
            " ORDER BY id, reading",
            {"id": id},
        ).rows
        ends += [End(node, weight, token, reading or None) for node, weight, reading in rows]
    return ends


def _shown(text: str, ends: Sequence[End]) -> str:
    tokens = dict.fromkeys(end.token for end in ends if end.token is not None)
    return ", ".join(map(visible, tokens)) or text


def _table(atlas: Atlas, graph: WeightGraph, paths: Sequence[Path]) -> Table:
    nodes = {end.node for path in paths for end in (path.start, path.end)}
    nodes |= {edge.target for path in paths for edge in path.edges}
    keys = keys_of_features(atlas.store, nodes)
    said = promoted_by_feature(atlas.store, nodes)
    labels = labels_of_features(atlas.store, nodes)
    rows: list[tuple[Any, ...]] = []
    for number, path in enumerate(paths, start=1):
        start = path.start
        if start.token is not None:
            rows.append((number, path.product, "from", None, None, visible(start.token), [], None))
        via, weight = ("from", None) if start.token is None else ("EMBEDS", start.weight)
        to = keys[start.node], said.get(start.node, []), labels.get(start.node)
        rows.append((number, path.product, via, start.reading, weight, *to))
        for edge in path.edges:
            reading, head = graph.through(edge)
            via = edge.type if head is None else f"L{head[0]:02d}.H{head[1]:02d}"
            to = keys[edge.target], said.get(edge.target, []), labels.get(edge.target)
            rows.append((number, path.product, via, reading, edge.weight, *to))
        if path.end.token is not None:
            rows.append(
                (number, path.product, "PROMOTES", None, path.end.weight, visible(path.end.token), [], None)
            )
    return Table.of("", COLUMNS, rows, notes=(VIA,) if rows else (), below={"label": "to"})
