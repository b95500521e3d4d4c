"""Adjacency arrays beside the database: `csr/<generation>/<TYPE>/`, memory-mapped, by atlas id.

    readings.json                     names of the readings
    edges/{reading,layer,head}.npy    by edge: what identifies an edge beside its ends (those the type has)
    edges/{z,rank_in,rank_out}.npy    by edge (DIRECT and VIA_HEAD)
    out/{indptr,indices,weight,edge}.npy
    in/{indptr,indices,weight,edge}.npy

Edges are numbered in the order (source, target, reading, layer, head). `out/indptr[i] : out/indptr[i +
1]` are the places of the edges that leave the node with id i: `indices` their other ends, `weight` their
float32 weights, `edge` their numbers, which index `edges/`. `in/` is the same by target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atlas.errors import AtlasError

__all__ = ["Adjacency", "EdgeArrays", "open_arrays", "write_arrays"]

OUT, IN = "out", "in"


@dataclass(frozen=True)
class Adjacency:
    """One direction of one relationship type, in compressed rows.

    indptr (n_ids + 1,) int64; indices, edge (n_edges,) int32 or int64; weight (n_edges,) float32.
    """

    indptr: np.ndarray
    indices: np.ndarray
    weight: np.ndarray
    edge: np.ndarray

    def row(self, id: int) -> slice:
        """Places of the edges of one node; empty for an id beyond the last."""
        if not 0 <= id < len(self.indptr) - 1:
            return slice(0, 0)
        return slice(int(self.indptr[id]), int(self.indptr[id + 1]))


@dataclass(frozen=True)
class EdgeArrays:
    """All arrays of one relationship type. `attributes` are by edge number; `reading` counts in
    `readings`.
    """

    type: str
    out: Adjacency
    into: Adjacency
    attributes: dict[str, np.ndarray]
    readings: tuple[str, ...]


def _adjacency(folder: Path, rows: np.ndarray, columns: np.ndarray, weight: np.ndarray, n_ids: int) -> None:
    folder.mkdir()
    counts = np.bincount(rows, minlength=n_ids)
    indptr = np.zeros(n_ids + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    ordered = len(rows) == 0 or bool(np.all(rows[:-1] <= rows[1:]))
    number = np.int32 if len(rows) < 2**31 else np.int64
    edge = np.arange(len(rows), dtype=number) if ordered else np.argsort(rows, kind="stable").astype(number)
    np.save(folder / "indptr.npy", indptr)
    np.save(folder / "indices.npy", columns if ordered else columns[edge])
    np.save(folder / "weight.npy", weight if ordered else weight[edge])
    np.save(folder / "edge.npy", edge)


def write_arrays(
    folder: Path,
    source: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    attributes: dict[str, np.ndarray],
    readings: tuple[str, ...],
    n_ids: int,
) -> None:
    """Writes the arrays of one type from its edges, already in the order of their numbers.

    source, target (n_edges,) int32 ids below `n_ids`; weight (n_edges,) float32; attributes (n_edges,) each.
    """
    (folder / "edges").mkdir(parents=True)
    for name, values in attributes.items():
        np.save(folder / "edges" / f"{name}.npy", values)
    (folder / "readings.json").write_text(json.dumps(readings))
    _adjacency(folder / OUT, source, target, weight, n_ids)
    _adjacency(folder / IN, target, source, weight, n_ids)


def open_arrays(folder: Path, type: str) -> EdgeArrays:
    """Maps the arrays of one type into memory. Raises `AtlasError` if the generation has none."""
    own = folder / type

    def mapped(path: Path) -> np.ndarray:
        return np.load(path, mmap_mode="r")

    def direction(name: str) -> Adjacency:
        return Adjacency(
            *(mapped(own / name / f"{part}.npy") for part in ("indptr", "indices", "weight", "edge"))
        )

    try:
        readings = tuple(json.loads((own / "readings.json").read_text()))
        attributes = {path.stem: mapped(path) for path in sorted((own / "edges").glob("*.npy"))}
        return EdgeArrays(type, direction(OUT), direction(IN), attributes, readings)
    except FileNotFoundError as error:
        raise AtlasError(f"{folder}: no adjacency arrays of {type}") from error
