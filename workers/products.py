"""Candidates become pairs: exact weights, z, and the sizes that rules compare."""

from __future__ import annotations

import numpy as np

from workers.exact import rounded_dots
from workers.operands import Candidates
from workers.pairs import Pairs
from workers.sides import Readers, Writers

__all__ = ["direct_pairs", "z_scores"]


def direct_pairs(found: Candidates, place: int, writers: Writers, readers: Readers) -> Pairs:
    """The candidates (row = reader, column = writer) with their exact weights.

    place: of the writers in the step's list of sources.
    """
    row, column = found.row, found.column
    weight = rounded_dots(writers.omega, readers.rho, column, row, writers.norms.length, readers.norms.length)
    none = np.full(len(row), -1, np.int16)
    return Pairs(
        source_dictionary=np.full(len(row), place, np.int32),
        source=column,
        target_dictionary=np.zeros(len(row), np.int32),
        target=readers.target[row],
        reading=readers.reading[row],
        layer=none,
        head=none,
        weight=weight,
        z=z_scores(weight, writers.norms.length[column], readers.norms.length[row], readers.rho.shape[1]),
        size=np.abs(weight.astype(np.float64)) * writers.norms.scale[column] * readers.norms.scale[row],
        rank_in=np.zeros(len(row), np.int32),
    )


def z_scores(weight: np.ndarray, written: np.ndarray, read: np.ndarray, width: int) -> np.ndarray:
    """V √d / (|ω||ρ|) float64; 0 where a vector is zero. written, read: |ω| (or |ω^h|) and |ρ| of each
    pair."""
    length = written * read
    return np.divide(weight * np.sqrt(width), length, out=np.zeros(len(weight)), where=length > 0)
