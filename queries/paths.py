"""The strongest paths of the weight graph: exact search over its memory-mapped adjacency arrays.

A path of h hops from the sources to the targets is worth the size of its product

    |s(u₀)| · |w(u₀→u₁)| · … · |w(u_{h-1}→u_h)| · |t(u_h)|

where s and t weigh the ends (a token's EMBEDS and PROMOTES weights; 1 for a feature). What can still be
gained from a node is known exactly before any path is enumerated:

    B₀(v) = max |t(v)|,     B_j(u) = max over edges u→v of |w| · B_{j-1}(v)

computed for the nodes that h-j hops reach. A best-first search whose priority is the product so far times B
takes paths out of its heap in their order, so the k strongest cost k·h expansions and nothing is cut off (A*
with a perfect bound; compare Eppstein 1998). Edges lead from a lower write event to a higher one, so no walk
meets a node twice.

Products are input-invariant: norm scales, patterns and activations are left out. A path says what could flow.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np

from atlas.store.arrays import open_arrays

__all__ = ["Edge", "End", "Path", "WeightGraph", "strongest_paths", "strongest_paths_of_hops"]


@dataclass(frozen=True)
class End:
    """Where a path begins or ends: a feature by id, and the token edge that leads to it or away, if any."""

    node: int
    weight: float = 1.0
    token: str | None = None
    reading: str | None = None


@dataclass(frozen=True)
class Edge:
    """One hop: source and target by id, and its row in the type's arrays."""

    type: str
    source: int
    target: int
    weight: float
    row: int


@dataclass(frozen=True)
class Path:
    """A path and the signed product of all its weights, both ends' included."""

    product: float
    start: End
    edges: tuple[Edge, ...]
    end: End


class WeightGraph:
    """The out-edges of every node, by type. Arrays stay on disk until they are read.

    folder: the arrays of one generation. Raises AtlasError where those of a type are missing.
    """

    def __init__(self, folder: FilePath, types: Sequence[str] = ("DIRECT", "VIA_HEAD")) -> None:
        self.types = tuple(types)
        self._arrays = {type: open_arrays(folder, type) for type in types}
        self.nodes = max((len(arrays.out.indptr) - 1 for arrays in self._arrays.values()), default=0)

    def through(self, edge: Edge) -> tuple[str, tuple[int, int] | None]:
        """An edge's reading, and its head as (layer, number) if it passes one."""
        arrays = self._arrays[edge.type]
        number = int(arrays.out.edge[edge.row])
        reading = arrays.readings[int(arrays.attributes["reading"][number])]
        if "head" not in arrays.attributes:
            return reading, None
        return reading, (int(arrays.attributes["layer"][number]), int(arrays.attributes["head"][number]))

    def out(self, type: str, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Edges out of nodes (N,), in their order: counts (N,), and rows, targets, weights, (E,) each."""
        arrays = self._arrays[type].out
        indices, weight = np.asarray(arrays.indices), np.asarray(arrays.weight)
        first = arrays.indptr[nodes].astype(np.int64)
        counts = arrays.indptr[nodes + 1] - first
        begin = np.cumsum(counts) - counts
        rows = np.arange(counts.sum()) + np.repeat(first - begin, counts)
        return counts, rows, indices[rows].astype(np.int64), weight[rows].astype(np.float64)


def strongest_paths(
    graph: WeightGraph, sources: Iterable[End], targets: Iterable[End], hops: Iterable[int]
) -> Iterator[Path]:
    """All paths of any of these numbers of hops, strongest first; ties by hops, then ends and nodes.

    Take as many as wanted: `itertools.islice(strongest_paths(…), k)`.
    """
    sources, targets = list(sources), list(targets)
    streams = [strongest_paths_of_hops(graph, sources, targets, h) for h in sorted(set(hops))]
    return heapq.merge(*streams, key=lambda path: -abs(path.product))


def strongest_paths_of_hops(
    graph: WeightGraph, sources: Sequence[End], targets: Sequence[End], hops: int
) -> Iterator[Path]:
    """All paths of exactly `hops` edges, strongest first; of weight zero none."""
    gain = _gains(graph, sources, targets, hops)  # gain[j]: B_j by id, 0 where nothing is reached
    ends: dict[int, list[End]] = {}
    for end in sorted(targets, key=_order):
        ends.setdefault(end.node, []).append(end)

    count = itertools.count()  # equal priorities come out as they went in, which is an order of ids
    heap: list[tuple[float, int, float, End, tuple[Edge, ...], End | None]] = []

    def push(priority: float, product: float, start: End, edges: tuple[Edge, ...], end: End | None) -> None:
        if priority > 0:
            heapq.heappush(heap, (-priority, next(count), product, start, edges, end))

    for start in sorted(sources, key=_order):
        push(abs(start.weight) * gain[hops][start.node], start.weight, start, (), None)
    while heap:
        _, _, product, start, edges, last = heapq.heappop(heap)
        if last is not None:
            yield Path(product, start, edges, last)
            continue
        node, left = edges[-1].target if edges else start.node, hops - len(edges)
        if left == 0:
            for way_out in ends[node]:
                push(abs(product * way_out.weight), product * way_out.weight, start, edges, way_out)
            continue
        for edge in _edges_out(graph, node, gain[left - 1]):
            step = product * edge.weight
            push(abs(step) * gain[left - 1][edge.target], step, start, (*edges, edge), None)


def _order(end: End) -> tuple[int, str, str, float]:
    return end.node, end.token or "", end.reading or "", end.weight


def _edges_out(graph: WeightGraph, node: int, gain: np.ndarray) -> Iterator[Edge]:
    """The edges out of a node from which something can be gained, by target."""
    found = []
    for type in graph.types:
        _, rows, targets, weights = graph.out(type, np.array([node]))
        useful = gain[targets] > 0
        found += [
            Edge(type, node, target, weight, row)
            for row, target, weight in zip(
                rows[useful].tolist(), targets[useful].tolist(), weights[useful].tolist(), strict=True
            )
        ]
    return iter(sorted(found, key=lambda edge: (edge.target, edge.type, edge.row)))


def _gains(graph: WeightGraph, sources: Sequence[End], targets: Sequence[End], hops: int) -> list[np.ndarray]:
    """B_0 … B_hops, each (ids,), where B_j is filled in for the nodes that exactly hops - j steps reach."""
    reached = [np.unique(np.array([end.node for end in sources], np.int64))]
    for _ in range(hops - 1):
        onward = [graph.out(type, reached[-1])[2] for type in graph.types]
        reached.append(np.unique(np.concatenate(onward)) if onward else reached[-1][:0])
    gain = [np.zeros(graph.nodes)]
    for end in targets:
        gain[0][end.node] = max(gain[0][end.node], abs(end.weight))
    for nodes in reversed(reached[: max(hops, 0)]):
        best = np.zeros(graph.nodes)
        for type in graph.types:
            counts, _, onto, weights = graph.out(type, nodes)
            some = counts > 0
            if some.any():
                first = (np.cumsum(counts) - counts)[some]
                most = np.maximum.reduceat(np.abs(weights) * gain[-1][onto], first)  # (nodes with edges,)
                best[nodes[some]] = np.maximum(best[nodes[some]], most)
        gain.append(best)
    return gain
