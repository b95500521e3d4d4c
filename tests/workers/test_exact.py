"""A stored weight is the exact product, rounded once: checked against rationals."""

from fractions import Fraction

import numpy as np
import pytest

from workers.exact import (
    dots,
    round_to_float32,
    rounded_dots,
    rounded_head_products,
    summation_error,
)


def exact_dot(a: np.ndarray, b: np.ndarray) -> Fraction:
    return sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)), Fraction(0))


def nearest(value: Fraction) -> np.float32:
    """By looking at every float32 near it."""
    start = np.float32(float(value))
    near = [start, np.nextafter(start, np.float32(9e9)), np.nextafter(start, np.float32(-9e9))]
    best = min(abs(Fraction(float(f)) - value) for f in near)
    tied = [f for f in near if abs(Fraction(float(f)) - value) == best]
    return tied[0] if len(tied) == 1 else next(f for f in tied if not int(f.view(np.uint32)) & 1)


@pytest.fixture
def factors() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 40, 200)) * np.exp(3 * rng.standard_normal((2, 40, 200)))
    b[3] = -a[5] @ np.diag(1 + 1e-9 * rng.standard_normal(200))  # large terms that all but cancel
    b[3, ::2] *= -1
    return a, b


def test_rounded_dots_are_the_exact_products(factors: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = factors
    i, j = (x.ravel().astype(np.int32) for x in np.indices((40, 40)))
    got = rounded_dots(a, b, i, j, np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    for n in range(len(i)):
        assert got[n] == nearest(exact_dot(a[i[n]], b[j[n]]))


@pytest.mark.parametrize("beyond", [0.0, 2.0**-60, -(2.0**-60), 2.0**-300, -(2.0**-300)])
def test_what_float64_cannot_decide_is_decided_exactly(beyond: float) -> None:
    """1 + 2⁻²⁴ lies between two float32s: the last term says which way, or that the tie goes to even."""
    a = np.array([[1.0, 2.0**-24, beyond]])
    b = np.ones((1, 3))
    got = rounded_dots(a, b, np.zeros(1, np.int32), np.zeros(1, np.int32), np.array([1.5]), np.array([2.0]))
    up = np.nextafter(np.float32(1), np.float32(2))
    assert got[0] == (up if beyond > 0 else np.float32(1))


def test_the_order_of_a_float64_sum_shows_where_the_exact_value_does_not() -> None:
    """Terms in another order move the float64 sum, and the rounded weight stays."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 500, 576))
    turn = rng.permutation(576)
    i = np.arange(500, dtype=np.int32)
    assert (
        dots(a, b, i, i) != dots(np.ascontiguousarray(a[:, turn]), np.ascontiguousarray(b[:, turn]), i, i)
    ).any()
    norms = [np.linalg.norm(x, axis=1) for x in (a, b)]
    first = rounded_dots(a, b, i, i, *norms)
    again = rounded_dots(np.ascontiguousarray(a[:, turn]), np.ascontiguousarray(b[:, turn]), i, i, *norms)
    assert np.array_equal(first, again)


def test_the_bound_on_a_sum_holds(factors: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = factors
    i, j = (x.ravel().astype(np.int32) for x in np.indices((40, 40)))
    for n, value in enumerate(dots(a, b, i, j)):
        off = abs(Fraction(float(value)) - exact_dot(a[i[n]], b[j[n]]))
        assert off <= Fraction(
            summation_error(200) * float(np.linalg.norm(a[i[n]]) * np.linalg.norm(b[j[n]]))
        )


def test_head_products_are_exact_even_from_a_crude_value() -> None:
    """The value handed in may be as poor as its bound says: the weight is still the exact one."""
    rng = np.random.default_rng(1)
    s, w_v, w_o, rho = (rng.standard_normal(shape) for shape in ((6, 20), (20, 4), (4, 20), (5, 20)))
    i, j = (x.ravel().astype(np.int32) for x in np.indices((6, 5)))
    value = (s @ w_v @ w_o @ rho.T)[i, j]
    crude = value * (1 + 1e-7)
    got = rounded_head_products(lambda n: s[n], w_v, w_o, rho, i, j, crude, 2e-7 * np.abs(value))
    for n in range(len(i)):
        p = [exact_dot(s[i[n]], w_v[:, c]) for c in range(4)]
        q = [exact_dot(w_o[c], rho[j[n]]) for c in range(4)]
        assert got[n] == nearest(sum((x * y for x, y in zip(p, q, strict=True)), Fraction(0)))


def test_rounding_goes_to_the_even_neighbour_on_a_tie() -> None:
    step = Fraction(1, 2**23)
    assert round_to_float32(1 + step / 2, 1.0) == np.float32(1)
    assert round_to_float32(1 + 3 * step / 2, 1 + 1.5 * float(step)) == np.float32(1 + 2 * float(step))
