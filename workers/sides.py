"""The two sides of a weight: writing vectors and reading vectors of one dictionary, with their lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ingest.dictionaries import Declared
from workers.operands import Operand
from workers.selection import Norms

__all__ = ["DictionaryEntry", "Readers", "Writers", "divided", "lengths"]


@dataclass(frozen=True)
class DictionaryEntry:
    """One dictionary in a step's parameters: its hash, how its files are read, its layer, and what the user
    said of it."""

    hash: str
    format: str
    layer: int
    reads: str | None = None
    writes: str | None = None
    layer_declared: bool = False

    @classmethod
    def of(cls, hash: str, format: str, layer: int, declared: Declared) -> DictionaryEntry:
        """The entry of a dictionary of an opened set."""
        return cls(hash, format, layer, declared.reads, declared.writes, declared.layer is not None)

    @property
    def declared(self) -> Declared:
        """What files do not say of themselves, to open them with again."""
        return Declared(self.reads, self.writes, self.layer if self.layer_declared else None)

    @property
    def source(self) -> str:
        """Under which name the plan's sources have its files."""
        return f"dictionary:{self.hash}"

    def as_json(self) -> dict[str, Any]:
        """For a step's parameters; `DictionaryEntry(**…)` reads it back. Only what was declared is named: the
        parameters name the step's artifact."""
        return {key: value for key, value in asdict(self).items() if value is not None and value is not False}


def divided(vectors: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Rows over their lengths; rows of length zero stay zero."""
    return vectors / np.where(length > 0, length, 1)[:, None]


def lengths(vectors: np.ndarray) -> np.ndarray:
    """The rows' Euclidean norms."""
    return np.sqrt(np.einsum("nd,nd->n", vectors, vectors))


@dataclass(frozen=True)
class Writers:
    """The writing vectors of one dictionary, as a reader above them sees them. omega (F, d) float64."""

    entry: DictionaryEntry
    omega: np.ndarray
    norms: Norms
    device: str = "cpu"

    @cached_property
    def operand(self) -> Operand:
        """For the filter."""
        return Operand(self.omega, self.norms.length, self.norms.weight, self.device)


@dataclass(frozen=True)
class Readers:
    """The reading vectors of one dictionary, one reading below the other: row = place of the reading × F +
    number.

    rho (R, d) float64; target (R,), reading (R,): which feature, and its reading as a place in READINGS.
    """

    entry: DictionaryEntry
    rho: np.ndarray
    norms: Norms
    target: np.ndarray
    reading: np.ndarray
    cut: int
    device: str = "cpu"

    @cached_property
    def operand(self) -> Operand:
        """For the filter."""
        return Operand(self.rho, self.norms.length, self.norms.weight, self.device)
