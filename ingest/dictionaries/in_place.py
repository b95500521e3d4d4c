"""Dictionaries put in place of what they describe, as replacements for `ingest.models.capture.logits_with`.

Each point that dictionaries write gets the sum of what they write there. A transcoder takes the place of its
MLP; an autoencoder of the very value that it reads; a cross-layer transcoder of each MLP that any of its
layers writes. All of it is live: several dictionaries see each other's results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.types import Dictionary, Read
from ingest.models.capture import Point, Replacement, point_read

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InPlace", "in_place", "read_key", "reads_what_it_writes"]


@dataclass(frozen=True, eq=False)
class InPlace:
    """What `logits_with` needs."""

    replace: Mapping[Point, Replacement]
    reads: tuple[tuple[int, Read], ...]


def reads_what_it_writes(dictionary: Dictionary) -> Point | None:
    """The point that an autoencoder reads and writes; None for a transcoder."""
    for write in dictionary.writes:
        point = point_read(dictionary.layer, dictionary.read, write.at)
        if point is not None and point[:2] == (write.layer, write.site):
            return write.layer, write.site, write.at
    return None


def read_key(dictionary: Dictionary) -> tuple[int, Read] | Point:
    """What to capture to get the dictionary's input: a point for an autoencoder, else (layer, read)."""
    return reads_what_it_writes(dictionary) or (dictionary.layer, dictionary.read)


def in_place(dictionaries: Sequence[Dictionary]) -> InPlace:
    """Replacements for every point that the dictionaries write."""
    parts: dict[Point, list[_Part]] = {}
    reads: dict[tuple[int, Read], None] = {}
    for dictionary in dictionaries:
        own = reads_what_it_writes(dictionary)
        if own is None:
            reads[dictionary.layer, dictionary.read] = None
        shared = _Activations(dictionary, len(dictionary.writes) > 1)
        for index, write in enumerate(dictionary.writes):
            alone = dataclasses.replace(
                dictionary, writes=(write,), W_skip=dictionary.W_skip if index == 0 else None
            )
            point = (write.layer, write.site, write.at)
            parts.setdefault(point, []).append(_Part(alone, own == point, shared))
    return InPlace({point: _Sum(tuple(found)) for point, found in parts.items()}, tuple(reads))


class _Activations:
    """A dictionary's activations, computed once a pass where several writes need them."""

    def __init__(self, dictionary: Dictionary, keep: bool) -> None:
        self._dictionary, self._keep = dictionary, keep
        self._last: tuple[object, Tensor] | None = None

    def of(self, x: Tensor, run: object) -> Tensor:
        if not self._keep:
            return encode(self._dictionary, x)
        if self._last is None or self._last[0] is not run:
            self._last = (run, encode(self._dictionary, x))
        return self._last[1]


@dataclass(frozen=True, eq=False)
class _Part:
    dictionary: Dictionary  # with the one write
    from_original: bool
    activations: _Activations


@dataclass(frozen=True, eq=False)
class _Sum:
    parts: tuple[_Part, ...]

    def __call__(self, original: Tensor, inputs: Mapping[tuple[int, Read], Tensor]) -> Tensor:
        total: Tensor | None = None
        for part in self.parts:
            one = part.dictionary
            x = original if part.from_original else inputs[one.layer, one.read]
            (out,) = decode(one, part.activations.of(x, inputs), x)
            total = out if total is None else total + out
        assert total is not None  # a point has at least one part
        return total
