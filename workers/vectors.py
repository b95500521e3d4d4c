"""What the weight steps compute with: the vectors of a model's dictionaries, found once.

Steps name dictionaries by entries in their parameters; the files are where the plan's sources say. Tensors
that several steps want are kept by the executor's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ingest.dictionaries import Dictionary, open_set
from ingest.models import ResidualModel, open_model, reading_vectors, writing_vectors
from workers.pairs import READINGS
from workers.selection import Norms
from workers.sides import DictionaryEntry, Readers, Writers, lengths
from workers.steps import Context, Step

__all__ = ["Vectors"]


class Vectors:
    """Gives a step the vectors of its model's dictionaries."""

    def __init__(self, step: Step, inputs: Mapping[str, Path], context: Context) -> None:
        self._inputs, self._context = inputs, context
        digest = step.inputs["model"].removeprefix("model:")
        self.model: ResidualModel = context.cached(
            ("model", digest), lambda: open_model(inputs["model"], check=False), memory=1 << 30
        )

    def dictionary(self, entry: DictionaryEntry) -> Dictionary:
        """The dictionary itself, read anew."""
        where = None if entry.format == "neurons" else self._inputs[entry.source]
        found = open_set(
            where,
            name=entry.hash[:12],
            model=self.model,
            format=entry.format,
            layers=[entry.layer],
            declared=entry.declared,
        )
        return found.load(entry.layer)

    def writers(self, entry: DictionaryEntry, cut: int | None = None) -> Writers:
        """ω of every feature, for a reader at `cut`."""

        def make() -> Writers:
            dictionary = self.dictionary(entry)
            omega = np.ascontiguousarray(writing_vectors(self.model, dictionary, cut).numpy())
            length = lengths(omega)
            free = (1 / np.where(length > 0, length, 1)) if dictionary.rescalable else np.ones(len(length))
            return Writers(entry, omega, Norms(length, free), self._context.device)

        several = entry.format.endswith("cross-layer")
        key = ("writers", entry.hash, cut if several else None, self._context.device)
        return self._context.cached(key, make, memory=10 * 4096 * self.model.facts.d_model)

    def readers(self, entry: DictionaryEntry) -> Readers:
        """ρ of every feature and reading."""

        def make() -> Readers:
            dictionary = self.dictionary(entry)
            names = dictionary.readings
            rho = np.concatenate([reading_vectors(self.model, dictionary, name).numpy() for name in names])
            written = self.writers(entry).norms
            free = (
                np.where(written.length > 0, written.length, 1)
                if dictionary.rescalable
                else np.ones(dictionary.size)
            )
            return Readers(
                entry,
                rho,
                Norms(lengths(rho), np.tile(free, len(names))),
                np.tile(np.arange(dictionary.size, dtype=np.int32), len(names)),
                np.repeat(np.array([READINGS.index(name) for name in names], np.int8), dictionary.size),
                self.model.cut(dictionary.read.site, dictionary.layer),
                self._context.device,
            )

        return self._context.cached(
            ("readers", entry.hash, self._context.device), make, memory=20 * 4096 * self.model.facts.d_model
        )
