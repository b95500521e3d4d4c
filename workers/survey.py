"""What a selection left out, and what it would have kept of nothing: the figures beside the edges.

Every block (one source dictionary, or one head, and one target dictionary) is surveyed on a seeded sample of
its sources against all its targets: the sum and the histogram of |V|, the spread of z, and the *floor*, the
pairs that the same thresholds keep when the writing vectors are turned by one random rotation, so that
lengths stay and directions mean nothing (of a top k, the pairs that would outrank its k-th member). Counts
and sums are scaled to the whole block; `sampled` says on how many pairs they rest, and equals `pairs` where
the block was small enough to be read whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ingest.rules import Absolute, All_, Any_, Rule, Top, Z
from workers.selection import tops

__all__ = ["Survey", "chosen", "rotation"]

SOURCES, SOURCES_THROUGH_HEAD = 64, 48  # sampled of each block


@lru_cache(maxsize=2)
def rotation(width: int, seed: int) -> np.ndarray:
    """A random orthogonal matrix (width, width), uniform over rotations and reflections."""
    gaussian = np.random.default_rng([seed, width]).standard_normal((width, width))
    q, r = np.linalg.qr(gaussian)
    return q * np.sign(np.diagonal(r))


def chosen(seed: int, size: int, most: int) -> np.ndarray:
    """A sample of `most` sources out of `size`, sorted; all of them where there are no more."""
    if size <= most:
        return np.arange(size)
    return np.sort(np.random.default_rng([seed, size]).choice(size, most, replace=False))


class Survey:
    """Collects the figures of a step's blocks: `rows`, as JSON holds them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        block: dict[str, Any],
        size: int,
        written: tuple[np.ndarray, np.ndarray],
        turned: tuple[np.ndarray, np.ndarray],
        read: np.ndarray,
        read_length: np.ndarray,
        scale: np.ndarray,
        free: np.ndarray,
        rule: Rule,
        least: Mapping[Top, np.ndarray],
        width: int,
    ) -> None:
        """Adds one block.

        block: what names it; size: its number of sources. written, turned: (unit vectors (S, K), lengths
        (S,)) of the sampled sources, as they are and rotated; read (R, K): the reading vectors over their
        lengths; scale (S,): free scales; bounds: what the rule asks of a cosine, None where it keeps
        everything; width: d, for z.
        """
        x, lost = (_cosines(unit, read) for unit, _ in (written, turned))
        weight = np.abs(x) * written[1][:, None] * read_length
        share = size / max(len(x), 1)
        sizes, lost_sizes = (
            np.abs(cosine) * (length * scale)[:, None] * (read_length * free)
            for cosine, (_, length) in ((x, written), (lost, turned))
        )
        own = _least_per_source(rule, sizes)
        passing = int(_passing(rule, np.abs(lost) * np.sqrt(width), lost_sizes, {**least, **own}).sum())
        counts = np.bincount(np.frexp(weight[weight > 0])[1] + 64, minlength=1)
        self.rows.append(
            {
                **block,
                "pairs": size * len(read),
                "sampled": x.size,
                "total": float(weight.sum(dtype=np.float64) * share),
                "histogram": {str(b - 64): float(counts[b] * share) for b in np.nonzero(counts)[0]},
                "z_sd": float(np.sqrt(np.mean(np.square(x, dtype=np.float64)) * width)) if x.size else 0.0,
                "floor": passing * share,
            }
        )


def _cosines(unit: np.ndarray, read: np.ndarray) -> np.ndarray:
    return (torch.from_numpy(unit).float() @ torch.from_numpy(read).float().T).numpy()  # (S, R)


def _passing(rule: Rule, z: np.ndarray, sizes: np.ndarray, least: Mapping[Top, np.ndarray]) -> np.ndarray:
    """Mask (S, R) of the pairs that the rule would keep among the block's own."""
    match rule:
        case Any_(rules=rules):
            return np.logical_or.reduce([_passing(inner, z, sizes, least) for inner in rules])
        case All_(rules=rules):
            return np.logical_and.reduce([_passing(inner, z, sizes, least) for inner in rules])
        case Absolute(tau=tau):
            return sizes > tau
        case Z(z=threshold):
            return z > threshold
        case Top():
            return (sizes > least[rule]) & (sizes > 0)
    return np.ones(z.shape, bool)


def _least_per_source(rule: Rule, sizes: np.ndarray) -> dict[Top, np.ndarray]:
    """(S, 1) what the k-th member of a top k per source has within this block."""
    found = {}
    for top in tops(rule, "source"):
        beyond = sizes.shape[1] - top.k
        column = np.partition(sizes, beyond, axis=1)[:, beyond] if beyond >= 0 else np.zeros(len(sizes))
        found[top] = column[:, None]
    return found
