"""The strongest paths against every path there is, on graphs small enough to list them all."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from atlas.errors import AtlasError
from atlas.store.arrays import write_arrays
from queries.paths import End, WeightGraph, strongest_paths, strongest_paths_of_hops

LAYERS, WIDTH = 5, 4
NODES = LAYERS * WIDTH


def _write(folder: Path, type: str, edges: list[tuple[int, int, int, float]]) -> None:
    edges = sorted(edges)
    source, target, reading, weight = (np.array(column) for column in zip(*edges, strict=True))
    attributes = {"reading": reading.astype(np.int8)}
    if type == "VIA_HEAD":
        attributes |= {"layer": (source // WIDTH + 1).astype(np.int16), "head": (target % 2).astype(np.int16)}
    ends = source.astype(np.int32), target.astype(np.int32)
    write_arrays(folder / type, *ends, weight.astype(np.float32), attributes, ("gate", "up"), NODES)


def _random_graph(
    folder: Path, seed: int, density: float = 0.5
) -> dict[str, list[tuple[int, int, int, float]]]:
    rng = np.random.default_rng(seed)
    graph: dict[str, list[tuple[int, int, int, float]]] = {}
    for type in ("DIRECT", "VIA_HEAD"):
        graph[type] = [
            (a, b, reading, float(np.float32(rng.standard_normal())))
            for a in range(NODES)
            for b in range(NODES)
            for reading in (0, 1)
            if a // WIDTH < b // WIDTH and rng.random() < density
        ]
        _write(folder, type, graph[type])
    return graph


def _all_paths(graph, sources, targets, hops: int) -> list[tuple[float, tuple]]:
    """Every path by following every edge: (product, (start, (type, source, target, reading)…, end))."""
    found = []
    edges = [(type, *edge) for type, own in graph.items() for edge in own]

    def follow(node, product, taken):
        if len(taken) == hops:
            for end in targets:
                if end.node == node and product * end.weight != 0:
                    found.append((product * end.weight, (taken, end)))
            return
        for type, source, target, reading, weight in edges:
            if source == node:
                follow(target, product * weight, (*taken, (type, source, target, reading)))

    for start in sources:
        before = len(found)
        follow(start.node, start.weight, ())
        found[before:] = [(product, (start, *rest)) for product, rest in found[before:]]
    return found


def _as_listed(graph: WeightGraph, path) -> tuple:
    edges = tuple(
        (edge.type, edge.source, edge.target, ("gate", "up").index(graph.through(edge)[0]))
        for edge in path.edges
    )
    return path.start, edges, path.end


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_all_paths_come_in_order_and_none_is_missing(tmp_path, seed, hops):
    listed = _random_graph(tmp_path, seed, density=0.3)
    graph = WeightGraph(tmp_path)
    sources = [
        End(0, 1.5, "a", "gate"),
        End(0, -0.5, "a", "up"),
        End(2, 2.0, "b", "gate"),
        End(9, 0.7, "b", "up"),
    ]
    targets = [End(18, 1.0, "x"), End(19, -3.0, "x"), End(9, 0.1, "y"), End(13, 0.5, "x")]
    expected = _all_paths(listed, sources, targets, hops)
    found = list(strongest_paths_of_hops(graph, sources, targets, hops))
    assert {_as_listed(graph, path) for path in found} == {names for _, names in expected}
    assert len(found) == len(expected)  # parallel edges are paths of their own, and no path comes twice
    products = [path.product for path in found]
    assert np.allclose(sorted(products), sorted(product for product, _ in expected), rtol=1e-12, atol=0)
    sizes = np.abs(products)
    assert np.all(sizes[:-1] >= sizes[1:] * (1 - 1e-12))


def test_the_first_k_of_several_lengths_are_the_k_strongest_of_all(tmp_path):
    listed = _random_graph(tmp_path, 7)
    graph = WeightGraph(tmp_path)
    sources, targets = [End(0), End(1, 2.0)], [End(19), End(18, -1.0)]
    every = [product for hops in (1, 2, 3) for product, _ in _all_paths(listed, sources, targets, hops)]
    found = list(itertools.islice(strongest_paths(graph, sources, targets, (1, 2, 3)), 25))
    best = sorted(map(abs, every), reverse=True)[:25]
    assert np.allclose([abs(path.product) for path in found], best, rtol=1e-12, atol=0)


def test_a_product_keeps_its_sign_and_multiplies_both_ends(tmp_path):
    for type in ("DIRECT", "VIA_HEAD"):
        _write(tmp_path, type, [(0, 4, 0, -2.0), (4, 8, 1, 3.0)])
    (path, *_) = strongest_paths_of_hops(WeightGraph(tmp_path, ["DIRECT"]), [End(0, 0.5)], [End(8, 10.0)], 2)
    assert path.product == 0.5 * -2.0 * 3.0 * 10.0
    assert [(edge.source, edge.target, edge.weight) for edge in path.edges] == [(0, 4, -2.0), (4, 8, 3.0)]


def test_only_the_types_asked_for_are_followed(tmp_path):
    _write(tmp_path, "DIRECT", [(0, 4, 0, 1.0)])
    _write(tmp_path, "VIA_HEAD", [(0, 4, 0, 5.0)])
    (path,) = strongest_paths_of_hops(WeightGraph(tmp_path, ["DIRECT"]), [End(0)], [End(4)], 1)
    assert (path.edges[0].type, path.product) == ("DIRECT", 1.0)
    both = list(strongest_paths_of_hops(WeightGraph(tmp_path), [End(0)], [End(4)], 1))
    assert [path.product for path in both] == [5.0, 1.0]


def test_zero_weights_carry_no_path(tmp_path):
    for type in ("DIRECT", "VIA_HEAD"):
        _write(tmp_path, type, [(0, 4, 0, 0.0), (0, 5, 0, 1.0)])
    graph = WeightGraph(tmp_path, ["DIRECT"])
    assert [p.end.node for p in strongest_paths_of_hops(graph, [End(0)], [End(4), End(5)], 1)] == [5]
    assert not list(strongest_paths_of_hops(graph, [End(0)], [End(4)], 1))
    assert not list(strongest_paths_of_hops(graph, [], [End(4)], 1))
    assert not list(strongest_paths_of_hops(graph, [End(0)], [], 1))


def test_missing_arrays_are_named(tmp_path):
    with pytest.raises(AtlasError, match="DIRECT"):
        WeightGraph(tmp_path)
