"""Ratios of sums over contexts, and how far another sample of contexts would move them; and an exact test of
counts.

A figure is R = Σ_c t_c / Σ_c b_c over contexts c: t the nats of a context and b its tokens, or errors and
variances. Contexts are drawn one by one, tokens within one are not independent; so the standard error is that
of the ratio over contexts, by linearisation:

    h_c = (t_c - R b_c) / mean(b),    se² = Σ_c h_c² / (n (n - 1))

Two figures on the same contexts differ by R_A - R_B with the h_c subtracted context by context: what both
have in common, an easy or a hard text, cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb, prod

import numpy as np

__all__ = ["Estimate", "Ratio", "difference", "exact_p"]


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error over contexts; None where one context tells none, or the figure is
    0/0."""

    value: float | None
    se: float | None = None


@dataclass(frozen=True, eq=False)
class Ratio:
    """Sums of each context, float64."""

    top: np.ndarray  # (n,)
    bottom: np.ndarray  # (n,)

    @property
    def value(self) -> float | None:
        """Σ top / Σ bottom."""
        total = float(self.bottom.sum())
        return float(self.top.sum()) / total if total != 0 else None

    def influences(self) -> np.ndarray:
        """h_c, which sum to 0."""
        return (self.top - (self.value or 0.0) * self.bottom) / float(self.bottom.mean())

    @property
    def estimate(self) -> Estimate:
        """The ratio and its standard error."""
        if self.value is None:
            return Estimate(None)
        return Estimate(self.value, _error(self.influences()))


def difference(first: Ratio, second: Ratio) -> Estimate:
    """first - second with the paired standard error; both over the same contexts in the same order."""
    if first.value is None or second.value is None:
        return Estimate(None)
    return Estimate(first.value - second.value, _error(first.influences() - second.influences()))


def _error(influences: np.ndarray) -> float | None:
    n = len(influences)
    return float(np.sqrt((influences**2).sum() / (n * (n - 1)))) if n > 1 else None


def exact_p(first: Sequence[int], second: Sequence[int]) -> float:
    """Fisher's exact test of two rows of counts by verdict (Freeman and Halton, for more than two verdicts):
    the chance, with every total given, of a division no likelier than this one.

    >>> round(exact_p([8, 2], [1, 5]), 4), round(exact_p([41, 8, 1], [38, 8, 4]), 4)
    (0.035, 0.4704)
    """
    totals = [a + b for a, b in zip(first, second, strict=True)]
    size, everything = sum(first), comb(sum(totals), sum(first))
    seen = _ways(totals, first)
    unlikely = 0
    for counts in _divisions(totals, size):
        ways = _ways(totals, counts)
        if ways <= seen:
            unlikely += ways
    return unlikely / everything if everything else 1.0


def _ways(totals: Sequence[int], counts: Sequence[int]) -> int:
    return prod(comb(total, count) for total, count in zip(totals, counts, strict=True))


def _divisions(totals: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `size` of the totals to the first row."""
    if not totals:
        if size == 0:
            yield ()
        return
    for count in range(max(0, size - sum(totals[1:])), min(totals[0], size) + 1):
        for rest in _divisions(totals[1:], size - count):
            yield (count, *rest)
