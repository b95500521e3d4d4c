"""An atlas, or a part of it, as a networkx graph in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas.schema import NODES, RELATIONSHIPS
from atlas.selection import edge_rows, filled, node_rows, select

if TYPE_CHECKING:
    import networkx as nx

    from atlas.api import Atlas

__all__ = ["to_networkx"]


def to_networkx(atlas: Atlas, **options: Any) -> nx.MultiDiGraph:
    """Nodes by their keys with `labels` and their properties, edges with `type` and theirs; absent values are
    left out.

    options: see `atlas.selection.select`. Raises AtlasError for what they name, ImportError without networkx.
    """
    import networkx as nx

    graph = nx.MultiDiGraph()
    key_of: dict[int, str] = {}
    selection = select(atlas, **options)
    labels, types = filled(atlas, selection)
    for label in labels:
        names = [column.name for column in NODES[label].columns]
        for rows in node_rows(atlas, label, selection):
            for row in rows:
                values = {name: value for name, value in zip(names, row, strict=True) if value is not None}
                key_of[values["id"]] = values["key"]
                graph.add_node(values["key"], labels=label, **values)
    for type in types:
        names = [column.name for column in RELATIONSHIPS[type].columns]
        for rows in edge_rows(atlas, type, selection):
            for source, target, *own in rows:
                values = {name: value for name, value in zip(names, own, strict=True) if value is not None}
                graph.add_edge(key_of[source], key_of[target], type=type, **values)
    return graph
