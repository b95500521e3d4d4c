"""What a selection left out, and what it would have kept of nothing: the figures beside the edges.

Every block (one source dictionary, or one head, and one target dictionary) is surveyed on a seeded sample of
its sources against all its targets: the sum and the histogram of |V|, the spread of z, and the *floor*, the
pairs that the same bounds keep when the writing vectors are turned by one random rotation, so that lengths
stay and directions mean nothing. Counts and sums are scaled to the whole block; `sampled` says on how many
pairs they rest, and equals `pairs` where the block was small enough to be read whole.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from workers.operands import RowBounds

__all__ = ["Survey", "chosen", "rotation"]

SOURCES, SOURCES_THROUGH_HEAD = 64, 16  # sampled of each block


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
        bounds: RowBounds | None,
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
        passing = (
            lost.size if bounds is None else int(_passing(np.abs(lost), turned[1] * scale, bounds).sum())
        )
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


def _passing(size: np.ndarray, weight: np.ndarray, bounds: RowBounds) -> np.ndarray:
    plain = size > bounds.floor
    weighted = size * weight[:, None] > bounds.weighted_floor
    keep = plain & weighted if bounds.every else plain | weighted
    for heap in bounds.heaps:
        keep |= (size * weight[:, None] > heap[:, 0]) & (heap[:, 0] > 0)
    return keep
