"""What the weight steps compute with: the vectors of a model's dictionaries, found once.

Steps name dictionaries by entries in their parameters; the files are where the plan's sources say. Tensors
that several steps want are kept by the executor's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ingest.dictionaries import Dictionary, DictionarySet, open_set
from ingest.models import ResidualModel, encoder_vectors, open_model, reading_vectors, writing_vectors
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
        return self._set(entry).load(entry.layer)

    def _set(self, entry: DictionaryEntry) -> DictionarySet:
        where = None if entry.format == "neurons" else self._inputs[entry.source]
        return open_set(
            where,
            name=entry.hash[:12],
            model=self.model,
            format=entry.format,
            layers=[entry.layer],
            declared=entry.declared,
        )

    def _writes(self, entry: DictionaryEntry) -> int:
        """In how many layers it writes, by its headers."""
        return self._context.cached(
            ("writes", entry.hash), lambda: len(self._set(entry).layout.writes[entry.layer]), memory=1
        )

    def writers(self, entry: DictionaryEntry, cut: int | None = None) -> Writers:
        """ω of every feature, for a reader at `cut`: of several writes the sum of those before it.

        A latent's free scale is of what it writes in all, whoever reads.
        """

        def make() -> Writers:
            dictionary = self.dictionary(entry)
            omega = np.ascontiguousarray(writing_vectors(self.model, dictionary, cut).numpy())
            length = lengths(omega)
            free = np.ones(len(length))
            if dictionary.rescalable:
                whole = self.writers(entry).norms.length if several else length
                free = 1 / np.where(whole > 0, whole, 1)
            return Writers(entry, omega, Norms(length, free), self._context.device)

        several = cut is not None and self._writes(entry) > 1
        key = ("writers", entry.hash, cut if several else None, self._context.device)
        return self._context.cached(key, make, memory=10 * 4096 * self.model.facts.d_model)

    def readers(self, entry: DictionaryEntry) -> Readers:
        """ρ of every feature and reading; of a dictionary that reads no stream its encoder's rows, at the
        site itself."""

        def make() -> Readers:
            dictionary = self.dictionary(entry)
            names = dictionary.readings
            at_site = dictionary.read.site in ("attn.out", "attn.z", "mlp.out")
            vectors = encoder_vectors if at_site else reading_vectors
            rho = np.concatenate([vectors(self.model, dictionary, name).numpy() for name in names])
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
