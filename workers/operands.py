"""What the filter works on: operands in low precision, bounds for every row, the candidates it finds."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numba import njit

__all__ = ["BFLOAT16", "FLOAT32", "Candidates", "Operand", "Precision", "RowBounds", "precision"]


@dataclass(frozen=True)
class Precision:
    """Type of the filter's product and how far it may be off."""

    dtype: torch.dtype
    unit: float

    def margin(self, width: int) -> float:
        """Largest |fl(x) - x| / (|â||b̂|) before the output is rounded; operands come from float64."""
        return 2 * self.unit + self.unit**2 + (width + 4) * 2.0**-23

    @property
    def output(self) -> float:
        """Relative rounding of the returned score."""
        return self.unit * (1 + 2.0**-7)


BFLOAT16 = Precision(torch.bfloat16, 2.0**-8)
FLOAT32 = Precision(torch.float32, 2.0**-24)


@cache
def precision(device: str = "cpu") -> Precision:
    """bfloat16 where the device multiplies it natively, float32 elsewhere."""
    if device != "cpu":
        return BFLOAT16 if torch.cuda.is_bf16_supported(including_emulation=False) else FLOAT32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return BFLOAT16 if native else FLOAT32


@dataclass(frozen=True)
class Candidates:
    """Pairs that may pass: row, column and low-precision score of each, arrays of one length."""

    row: np.ndarray
    column: np.ndarray
    score: np.ndarray

    @classmethod
    def joined(cls, parts: list[Candidates]) -> Candidates:
        """One from many, in order."""
        if not parts:
            return cls(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("row", "column", "score")))

    def __len__(self) -> int:
        return len(self.row)

    def where(self, keep: np.ndarray) -> Candidates:
        """Those that `keep`, a mask or indices, names."""
        return Candidates(self.row[keep], self.column[keep], self.score[keep])


class Operand:
    """One side of the scores: unit vectors, or, for rows, vectors of length `reach` at most 1.

    vectors (N, K) float64 as they enter the score; weight (N,) float64, what a column's score is multiplied
    by under weighted bounds; reach (N,) float64, the vectors' norms.
    """

    def __init__(self, vectors: np.ndarray, weight: np.ndarray | None = None, device: str = "cpu") -> None:
        self.device = device
        self.precision = precision(device)
        self.width = vectors.shape[1]
        self.reach = np.sqrt(np.einsum("nk,nk->n", vectors, vectors)) * (1 + 1e-12)
        self.weight = np.ones(len(vectors)) if weight is None else weight
        self.low = torch.from_numpy(vectors).to(torch.float32).to(device, self.precision.dtype)

    def part(self, first: int, last: int) -> Operand:
        """Some of its vectors, sharing memory."""
        part = copy(self)
        part.reach, part.weight = self.reach[first:last], self.weight[first:last]
        part.low = self.low[first:last]
        return part

    def __len__(self) -> int:
        return len(self.reach)


@dataclass
class RowBounds:
    """What a score must exceed to be a candidate, for every row j.

    floor (R,) and weighted_floor (R,) float64: |x_ij| > floor_j or, with `every`, and |x_ij| w_i >
    weighted_floor_j. heaps (L, R, k) float32: for each top-k rule lower bounds on the row's k largest |x_ij|
    w_i so far, as min-heaps, zero where fewer are known; -1 fills the end of a heap shorter than k. Who
    exceeds the smallest of any is a candidate too. `signed`: heap 0 counts positive scores, heap 1 negative
    ones.
    """

    floor: np.ndarray
    weighted_floor: np.ndarray
    every: bool
    heaps: np.ndarray
    signed: bool = False

    @classmethod
    def of_heaps(cls, rows: int, sizes: tuple[int, ...], signed: bool = False) -> RowBounds:
        """Bounds of top-k rules alone, one heap of each size."""
        heaps = np.full((len(sizes), rows, max(sizes, default=1)), -1, np.float32)
        for leaf, size in enumerate(sizes):
            heaps[leaf, :, :size] = 0
        never = np.full(rows, np.inf)
        return cls(never, never, False, heaps, signed)

    def rows(self, order: np.ndarray) -> RowBounds:
        """The same for chosen rows (a copy)."""
        heaps = np.ascontiguousarray(self.heaps[:, order])
        return RowBounds(self.floor[order], self.weighted_floor[order], self.every, heaps, self.signed)

    def least(self, most: float) -> np.ndarray:
        """(R,) the smallest |x| that may pass against a source of weight `most`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            weighted = self.weighted_floor / most if most > 0 else np.full(len(self.floor), np.inf)
            need = np.maximum(self.floor, weighted) if self.every else np.minimum(self.floor, weighted)
            for heap in self.heaps:
                need = np.minimum(need, heap[:, 0] / most if most > 0 else np.inf)
        return need

    def minima(self) -> RowBounds:
        """The same bounds as they stand now, the heaps reduced to what they ask for (a copy)."""
        return RowBounds(
            self.floor, self.weighted_floor, self.every, self.heaps[:, :, :1].copy(), self.signed
        )

    def remaining(self, found: Candidates, rows: Operand, columns: Operand) -> Candidates:
        """The candidates without those that the bounds, raised since, rule out."""
        kind = rows.precision
        gone = self._outgrown(found, columns.weight, rows.reach, kind.margin(rows.width), kind.output)
        return found.where(~gone) if gone.any() else found

    def _outgrown(
        self, found: Candidates, weight: np.ndarray, reach: np.ndarray, margin: float, output: float
    ) -> np.ndarray:
        return _outgrown(
            found.row, found.column, found.score, weight, reach, margin, output,
            self.floor, self.weighted_floor, self.every, self.heaps, self.signed,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _outgrown(
    row, column, score, weight, reach, margin, output, floor, weighted_floor, every, heaps, signed
):  # fmt: skip
    """Mask of the candidates that cannot pass the bounds as they stand."""
    gone = np.empty(row.shape[0], np.bool_)
    for n in range(row.shape[0]):
        r = row[n]
        largest = abs(np.float64(score[n])) / (1 - output) + margin * reach[r]
        size = largest * weight[column[n]]
        plain, weighted = largest > floor[r], size > weighted_floor[r]
        keep = (plain and weighted) if every else (plain or weighted)
        for leaf in range(heaps.shape[0]):
            if not signed or (leaf == 1) == (score[n] < 0):
                keep = keep or size * (1 + 1e-6) >= heaps[leaf, r, 0]
        gone[n] = not keep
    return gone
