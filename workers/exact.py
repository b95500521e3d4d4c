"""Products rounded once: a stored weight is the exact value of its product, rounded to float32.

A float64 sum depends on the order of its terms, so on tiles, threads and processor, in its last bits; rounded
to float32 that shows rarely (in none of 3·10⁷ random pairs), but nothing forbids it. Here a float64 value
comes with a bound on its error, and those whose float32 rounding the bound leaves open (3 in 10,000 random
pairs) are computed again: in double-double arithmetic (about 104 bits) and, where even that stands on a
midpoint, in rationals. What comes out is a function of the factors alone.

    V_ij   = ω_i · ρ_j                                  `rounded_dots`
    V^h_ij = ((s_i W_V) W_O) · ρ_j,  s_i = ω_i C ⊙ γ1    `rounded_head_products`

Bounds: a sum of n products in any order, fused or not, is off by at most n 2⁻⁵³ Σ|a_k b_k| (1 + 2⁻⁴⁰), and
Σ|a_k b_k| ≤ |a||b| (Higham, Accuracy and Stability of Numerical Algorithms, §3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from workers.compiled import compiled

__all__ = ["UNIT", "dots", "round_to_float32", "rounded_dots", "rounded_head_products", "summation_error"]

UNIT = 2.0**-53


def summation_error(terms: int) -> float:
    """Largest relative error (against |a||b|) of a float64 dot product of `terms` terms, in any order."""
    return terms * UNIT * (1 + 2.0**-30)


# Double-double arithmetic (Dekker 1971). No fastmath: the compiler must keep the order written here.
@compiled()
def _two_product(a, b):
    p = a * b
    c = 134217729.0 * a  # 2^27 + 1 splits a double in two halves of 26 bits
    a_high = c - (c - a)
    a_low = a - a_high
    c = 134217729.0 * b
    b_high = c - (c - b)
    b_low = b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


@compiled()
def _add(high, low, x, x_low):
    total = high + x
    v = total - high
    error = (high - (total - v)) + (x - v)
    error += low + x_low
    out = total + error
    return out, error - (out - total)


@compiled()
def _dot_double_double(x, y):
    high, low = 0.0, 0.0
    for k in range(x.shape[0]):
        p, e = _two_product(x[k], y[k])
        high, low = _add(high, low, p, e)
    return high, low


@compiled()
def _head_product_double_double(s, w_v_columns, w_o, rho):
    """Σ_c (s · w_v_columns[c]) (w_o[c] · rho)."""
    high, low = 0.0, 0.0
    for c in range(w_o.shape[0]):
        p, p_low = _dot_double_double(s, w_v_columns[c])
        q, q_low = _dot_double_double(w_o[c], rho)
        product, error = _two_product(p, q)
        high, low = _add(high, low, product, error + (p * q_low + p_low * q))
    return high, low


def round_to_float32(value: Fraction, near: float) -> np.float32:
    """The float32 nearest to an exact rational, ties to even. `near` is within one float32 step of it."""
    centre = np.float32(near)
    around = [np.nextafter(centre, np.float32(-np.inf)), centre, np.nextafter(centre, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1))


def _length(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).sum()))


def _fractions(x: np.ndarray) -> list[Fraction]:
    return [Fraction(float(value)) for value in x]


def _fraction_dot(x: list[Fraction], y: list[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


@compiled()
def _settled(value, error):
    """float32 of each value, and where its error leaves the rounding open."""
    weight = np.empty(value.shape[0], np.float32)
    count = 0
    open_ = np.empty(value.shape[0], np.int64)
    for n in range(value.shape[0]):
        weight[n] = np.float32(value[n])
        if np.float32(value[n] - error[n]) != np.float32(value[n] + error[n]):
            open_[count] = n
            count += 1
    return weight, open_[:count].copy()


@compiled(fastmath={"reassoc", "contract", "nsz"})
def dots(a, b, i, j):
    """a[i[n]] · b[j[n]] for every n, float64 (n,). The order of the sum is the compiler's choice."""
    out = np.empty(i.shape[0], np.float64)
    for n in range(i.shape[0]):
        x = a[i[n]]
        y = b[j[n]]
        total = 0.0
        for k in range(x.shape[0]):
            total += x[k] * y[k]
        out[n] = total
    return out


def rounded_dots(
    a: np.ndarray, b: np.ndarray, i: np.ndarray, j: np.ndarray, a_norm: np.ndarray, b_norm: np.ndarray
) -> np.ndarray:
    """The exact a[i]·b[j], rounded once to float32 (n,). a (N, K), b (M, K) float64, norms their rows'."""
    width = a.shape[1]
    error = summation_error(width + 8) * a_norm[i] * b_norm[j]
    weight, open_ = _settled(dots(a, b, i, j), error)
    for n in open_:
        x, y = a[i[n]], b[j[n]]
        high, low = _dot_double_double(x, y)
        settled = _round_double_double(high, low, (width + 8) * 2.0**-100 * a_norm[i[n]] * b_norm[j[n]])
        if settled is None:
            settled = round_to_float32(_fraction_dot(_fractions(x), _fractions(y)), high)
        weight[n] = settled
    return weight


def _round_double_double(high: float, low: float, error: float) -> np.float32 | None:
    """float32 of high + low, or None where `error` leaves its rounding open."""
    below = round_to_float32(Fraction(high) + Fraction(low) - Fraction(error), high)
    above = round_to_float32(Fraction(high) + Fraction(low) + Fraction(error), high)
    return below if below == above else None


def rounded_head_products(
    s_row: Callable[[int], np.ndarray],
    w_v: np.ndarray,
    w_o: np.ndarray,
    rho: np.ndarray,
    i: np.ndarray,
    j: np.ndarray,
    value: np.ndarray,
    error: np.ndarray,
) -> np.ndarray:
    """The exact ((s_i W_V) W_O)·ρ[j] of every pair (i[n], j[n]), each rounded once to float32 (n,).

    s_row: i -> s_i (d,); w_v (d, d_head), w_o (d_head, d), rho (M, d), all float64. value (n,): the products
    by any float64 route; error (n,): a bound on how far off those are.
    """
    weight, open_ = _settled(value, error)
    w_v_columns = np.ascontiguousarray(w_v.T)
    scale = (2 * len(w_v) + len(w_o) + 16) * 2.0**-100 * _length(w_v) * _length(w_o)
    for n in open_:
        x, y = s_row(int(i[n])), rho[j[n]]
        high, low = _head_product_double_double(x, w_v_columns, w_o, y)
        settled = _round_double_double(high, low, scale * _length(x) * _length(y))
        if settled is None:
            left, right = _fractions(x), _fractions(y)
            p = [_fraction_dot(left, _fractions(column)) for column in w_v_columns]
            q = [_fraction_dot(_fractions(row), right) for row in w_o]
            settled = round_to_float32(_fraction_dot(p, q), high)
        weight[n] = settled
    return weight
