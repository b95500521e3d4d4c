"""Sparse codes and what is computed with them, row by row: the k of thousands that are not zero.

A code of n vectors is three arrays, as in a CSR matrix: row i has the latents `latent[start[i]:start[i+1]]`
with the activations `value[…]`. A dense step over F latents multiplies n × d × F six times (encode, decode,
and two gradients of each); with k latents active only the encoding needs all of it:

    out_i   = Σ_j a_ij d_j                       decode
    da_ij   = g_i · d_j                          g_i = ∂L/∂out_i
    ∂L/∂d_j = Σ_i a_ij g_i                       backward
    ∂L/∂e_j = Σ_i da_ij x_i,  ∂L/∂b_j = Σ_i da_ij
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workers.compiled import compiled
from workers.heap import push

__all__ = ["Code", "above", "backward", "decode", "exact_values", "through_decoder", "top_k"]


class Code(NamedTuple):
    """Activations of n vectors."""

    start: np.ndarray  # (n + 1,) int64
    latent: np.ndarray  # (nnz,) int32, ascending in each row
    value: np.ndarray  # (nnz,) float32

    @property
    def rows(self) -> int:
        """n."""
        return len(self.start) - 1

    @property
    def l0(self) -> float:
        """Mean number of entries in a row."""
        return len(self.latent) / max(self.rows, 1)


def top_k(pre: np.ndarray, k: int) -> Code:
    """Of each row of pre-activations (n, F) float32 the k largest, those above 0 of them; ties to the smaller
    latent."""
    latent = np.empty((len(pre), k), np.int32)
    value = np.empty((len(pre), k), np.float32)
    counts = np.empty(len(pre), np.int64)
    _top_k(pre, latent, value, counts)
    return _packed(latent, value, counts)


def above(pre: np.ndarray, floor: np.ndarray) -> Code:
    """The entries of pre (n, F) above their latent's floor (F,), strictly; their values are pre's."""
    counts = np.empty(len(pre), np.int64)
    _count_above(pre, floor, counts)
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    latent, value = np.empty(start[-1], np.int32), np.empty(start[-1], np.float32)
    _take_above(pre, floor, start, latent, value)
    return Code(start, latent, value)


def exact_values(code: Code, x: np.ndarray, W_enc: np.ndarray, b_enc: np.ndarray) -> Code:
    """The same latents with x_i · e_j + b_j in float32: after a choice made in bfloat16."""
    value = np.empty_like(code.value)
    _products(code.start, code.latent, x, W_enc, value)
    return code._replace(value=value + b_enc[code.latent])


def decode(code: Code, W_dec: np.ndarray) -> np.ndarray:
    """(n, d) float32: Σ_j a_ij d_j."""
    out = np.zeros((code.rows, W_dec.shape[1]), np.float32)
    _decode(code.start, code.latent, code.value, W_dec, out)
    return out


def through_decoder(code: Code, g: np.ndarray, W_dec: np.ndarray) -> np.ndarray:
    """(nnz,) float32: ∂L/∂a = g_i · d_j for g = ∂L/∂out (n, d)."""
    da = np.empty(len(code.latent), np.float32)
    _products(code.start, code.latent, g, W_dec, da)
    return da


def backward(code: Code, weight: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    """(F, d) float32: Σ_i weight_ij rows_i for each latent j; a gradient of W_dec (weight a, rows g) or of
    W_enc (weight da, rows x)."""
    gradient = np.zeros((size, rows.shape[1]), np.float32)
    _scatter(code.start, code.latent, weight, rows, gradient)
    return gradient


def _packed(latent: np.ndarray, value: np.ndarray, counts: np.ndarray) -> Code:
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    kept = np.arange(latent.shape[1]) < counts[:, None]
    return Code(start, latent[kept], value[kept])


# --- kernels ------------------------------------------------------------------------------------------------


@compiled()
def _top_k(pre, latent, value, counts):
    n, size = pre.shape
    k = latent.shape[1]
    groups = min(max(k, size // 16), size)
    best = np.empty(groups, np.float32)
    heap = np.empty(k, np.float32)
    near = np.empty(size, np.int32)
    high = np.empty(size, np.float32)
    for i in range(n):
        row = pre[i]
        # k of the groups' largest are k different entries: none under the k-th of them need be looked at.
        best[:] = row[:groups]
        lo = groups
        while lo + groups <= size:
            for j in range(groups):
                best[j] = max(best[j], row[lo + j])
            lo += groups
        for j in range(size - lo):
            best[j] = max(best[j], row[lo + j])
        bound = _kth(best, groups, heap)
        found = 0
        for j in range(size):
            if row[j] >= bound and row[j] > 0:
                near[found] = j
                found += 1
        if found > k:
            for j in range(found):
                high[j] = row[near[j]]
            bound = _kth(high, found, heap)
            over = 0
            for j in range(found):
                over += row[near[j]] > bound
            ties = k - over  # of those that equal the k-th, the first
            kept = 0
            for j in range(found):
                p = row[near[j]]
                if p > bound or (p == bound and ties > 0):
                    ties -= p == bound
                    near[kept] = near[j]
                    kept += 1
            found = kept
        for j in range(found):
            latent[i, j] = near[j]
            value[i, j] = row[near[j]]
        counts[i] = found


@compiled()
def _kth(values, count, heap):
    """The len(heap)-th largest of the first `count` values, or 0 where fewer are above it."""
    heap[:] = 0
    for j in range(count):
        push(heap, values[j])
    return heap[0]


@compiled()
def _count_above(pre, floor, counts):
    for i in range(len(pre)):
        count = 0
        for j in range(len(floor)):
            count += pre[i, j] > floor[j]
        counts[i] = count


@compiled()
def _take_above(pre, floor, start, latent, value):
    for i in range(len(pre)):
        at = start[i]
        for j in range(len(floor)):
            if pre[i, j] > floor[j]:
                latent[at] = j
                value[at] = pre[i, j]
                at += 1


@compiled(fastmath={"reassoc", "contract"})
def _products(start, latent, rows, table, out):
    d = rows.shape[1]
    for i in range(len(start) - 1):
        x = rows[i]
        for at in range(start[i], start[i + 1]):
            y = table[latent[at]]
            total = np.float32(0.0)
            for c in range(d):
                total += x[c] * y[c]
            out[at] = total


@compiled(fastmath={"contract"})
def _decode(start, latent, value, table, out):
    d = table.shape[1]
    for i in range(len(start) - 1):
        total = out[i]
        for at in range(start[i], start[i + 1]):
            a, y = value[at], table[latent[at]]
            for c in range(d):
                total[c] += a * y[c]


@compiled(fastmath={"contract"})
def _scatter(start, latent, weight, rows, gradient):
    d = rows.shape[1]
    for i in range(len(start) - 1):
        x = rows[i]
        for at in range(start[i], start[i + 1]):
            w, total = weight[at], gradient[latent[at]]
            for c in range(d):
                total[c] += w * x[c]
