"""Sparse codes against whole matrices in float64: what is chosen, and every product through it."""

import numpy as np
import pytest

from workers.training.codes import Code, above, backward, decode, exact_values, through_decoder, top_k


def dense(code: Code, size: int) -> np.ndarray:
    found = np.zeros((code.rows, size), np.float64)
    rows = np.repeat(np.arange(code.rows), np.diff(code.start))
    found[rows, code.latent] = code.value
    return found


def by_sorting(pre: np.ndarray, k: int) -> np.ndarray:
    chosen = np.zeros_like(pre, np.float64)
    for row, out in zip(pre, chosen, strict=True):
        best = np.argsort(-row, kind="stable")[:k]  # ties: the smaller latent
        out[best] = np.maximum(row[best], 0)
    return chosen


@pytest.mark.parametrize("size, k", [(1, 1), (7, 3), (48, 48), (64, 5), (1000, 32), (2305, 32)])
def test_the_k_largest_of_each_row_are_chosen(size, k):
    rng = np.random.default_rng(size)
    pre = rng.standard_normal((200, size)).astype(np.float32)
    code = top_k(pre, k)
    assert np.array_equal(dense(code, size), by_sorting(pre, k))
    assert all(
        (np.diff(code.latent[lo:hi]) > 0).all() for lo, hi in zip(code.start, code.start[1:], strict=False)
    )


def test_of_equal_ones_the_smaller_latents_stay_and_nothing_at_or_under_zero():
    rng = np.random.default_rng(0)
    pre = rng.integers(-2, 3, (300, 90)).astype(np.float32)  # ties everywhere, the border among them
    for k in (1, 4, 20, 90):
        assert np.array_equal(dense(top_k(pre, k), 90), by_sorting(pre, k))
    assert top_k(-np.ones((3, 8), np.float32), 2).l0 == 0


def test_entries_above_their_floor():
    rng = np.random.default_rng(1)
    pre, floor = rng.standard_normal((50, 30)).astype(np.float32), rng.standard_normal(30).astype(np.float32)
    pre[0] = floor  # strictly
    assert np.array_equal(dense(above(pre, floor), 30), np.where(pre > floor, pre, 0))


def test_products_through_a_code_are_those_of_whole_matrices():
    rng = np.random.default_rng(2)
    n, d_in, d_out, size = 60, 17, 23, 40
    x, g = (rng.standard_normal((n, d)).astype(np.float32) for d in (d_in, d_out))
    W_enc, W_dec = (rng.standard_normal((size, d)).astype(np.float32) for d in (d_in, d_out))
    b = rng.standard_normal(size).astype(np.float32)
    code = top_k((x @ W_enc.T + b).astype(np.float32), 6)
    a = dense(code, size)
    near = {"rtol": 1e-5, "atol": 1e-4}
    assert np.allclose(decode(code, W_dec), a @ W_dec, **near)
    on = a != 0
    assert np.allclose(
        dense(code._replace(value=through_decoder(code, g, W_dec)), size), on * (g @ W_dec.T), **near
    )
    assert np.allclose(backward(code, code.value, g, size), a.T @ g, **near)
    rough = code._replace(value=code.value * 1.01)
    assert np.allclose(dense(exact_values(rough, x, W_enc, b), size), on * (x @ W_enc.T + b), **near)
