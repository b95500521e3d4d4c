"""What the filter works on: operands in low precision, bounds for every row, the candidates it finds."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from workers.compiled import compiled

__all__ = ["BFLOAT16", "FLOAT32", "Candidates", "Operand", "Precision", "RowBounds", "precision"]


@dataclass(frozen=True)
class Precision:
    """Type of the filter's product, and its relative rounding unit."""

    dtype: torch.dtype
    unit: float

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


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _round_rows(vectors, length, low, bits):
    """Divides rows by their lengths and rounds them: (|row / length|, |low - row / length|), float64 (N,).

    low: (N, K) float32, of which the upper half of each number is bfloat16 where bits is 16.
    """
    reach, rounding = np.empty(len(vectors)), np.empty(len(vectors))
    codes = low.view(np.uint32)
    for n in range(vectors.shape[0]):
        inverse = 1 / length[n] if length[n] > 0 else 0.0
        for k in range(vectors.shape[1]):
            low[n, k] = np.float32(vectors[n, k] * inverse)
        if bits == 16:  # to the nearest, ties to even
            for k in range(vectors.shape[1]):
                code = codes[n, k]
                codes[n, k] = (
                    code + np.uint32(0x7FFF) + ((code >> np.uint32(16)) & np.uint32(1))
                ) & np.uint32(0xFFFF0000)
        size, off = 0.0, 0.0
        for k in range(vectors.shape[1]):
            exact = vectors[n, k] * inverse
            size += exact * exact
            off += (low[n, k] - exact) ** 2
        reach[n], rounding[n] = np.sqrt(size), np.sqrt(off)
    return reach, rounding


class Operand:
    """One side of the scores: vectors (N, K) float64 over their lengths (N,), so of norm 1, or, where the
    lengths are another space's, of norm `reach` ≤ 1.

    weight (N,): what a column's score is multiplied by under weighted bounds. rounding (N,): how far each
    rounded vector is from the exact one, found when it was rounded; both norms with room for their own
    rounding.
    """

    def __init__(
        self, vectors: np.ndarray, length: np.ndarray, weight: np.ndarray | None = None, device: str = "cpu"
    ) -> None:
        self.device = device
        self.precision = precision(device)
        self.width = vectors.shape[1]
        low = np.empty(vectors.shape, np.float32)
        bits = 8 * self.precision.dtype.itemsize
        self.reach, self.rounding = (x * (1 + 1e-9) for x in _round_rows(vectors, length, low, bits))
        self.weight = np.ones(len(vectors)) if weight is None else weight
        self.low = torch.from_numpy(low).to(device, self.precision.dtype)

    def part(self, first: int, last: int) -> Operand:
        """Some of its vectors, sharing memory."""
        part = copy(self)
        part.reach, part.weight = self.reach[first:last], self.weight[first:last]
        part.rounding, part.low = self.rounding[first:last], self.low[first:last]
        return part

    def slack(self, columns: Operand) -> np.ndarray:
        """(R,) how far a low-precision product with any column may be off, before it is rounded itself.

        |ã·b̃ - a·b| ≤ |ã - a||b| + |a||b̃ - b| + |ã - a||b̃ - b|, and K 2⁻²³|ã||b̃| for K terms summed in
        float32.
        """
        worst = float(columns.rounding.max(initial=0))
        summing = (self.width + 4) * 2.0**-23 * (1 + worst)
        return self.reach * (worst + summing) + self.rounding * (1 + worst + summing)

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
        gone = self.outgrown(found, columns.weight, rows.slack(columns), rows.precision.output)
        return found.where(~gone) if gone.any() else found

    def outgrown(self, found: Candidates, weight: np.ndarray, slack: np.ndarray, output: float) -> np.ndarray:
        """Mask of the candidates that the bounds rule out. weight, slack: of the columns and the rows."""
        return _outgrown(
            found.row, found.column, found.score, weight, slack, output,
            self.floor, self.weighted_floor, self.every, self.heaps, self.signed,
        )  # fmt: skip


@compiled()
def _outgrown(
    row, column, score, weight, slack, output, floor, weighted_floor, every, heaps, signed
):  # fmt: skip
    """Mask of the candidates that cannot pass the bounds as they stand."""
    gone = np.empty(row.shape[0], np.bool_)
    for n in range(row.shape[0]):
        r = row[n]
        largest = abs(np.float64(score[n])) / (1 - output) + slack[r]
        size = largest * weight[column[n]]
        plain, weighted = largest > floor[r], size > weighted_floor[r]
        keep = (plain and weighted) if every else (plain or weighted)
        for leaf in range(heaps.shape[0]):
            if not signed or (leaf == 1) == (score[n] < 0):
                keep = keep or size * (1 + 1e-6) >= heaps[leaf, r, 0]
        gone[n] = not keep
    return gone
