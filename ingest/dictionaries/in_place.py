"""Dictionaries put in place of what they describe, as replacements for `ingest.models.capture.logits_with`.

Each point that dictionaries write gets the sum of what they write there. A transcoder takes the place of its
MLP; an autoencoder of the very value that it reads; a cross-layer transcoder of each MLP that any of its
layers writes. All of it is live: several dictionaries see each other's results.

Dictionaries of TransformerLens' folded model (`centred`) know a stream and outputs whose mean over components
is taken off, as a LayerNorm does anyway: it is taken off what they are given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.types import Dictionary, Read, Space
from ingest.models.capture import Point, Replacement, point_read

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InPlace", "in_place", "input_of", "reads_what_it_writes"]


@dataclass(frozen=True, eq=False)
class InPlace:
    """What `logits_with` needs."""

    replace: Mapping[Point, Replacement]
    reads: tuple[tuple[int, Read], ...]
    reads_of: Mapping[Point, tuple[tuple[int, Read], ...]]  # what each point needs of `reads`

    def at(self, points: Collection[Point]) -> InPlace:
        """The same at these points alone."""
        needed = {point: self.reads_of[point] for point in points}
        reads = tuple(dict.fromkeys(read for some in needed.values() for read in some))
        return InPlace({point: self.replace[point] for point in points}, reads, needed)


def reads_what_it_writes(dictionary: Dictionary) -> Point | None:
    """The point that an autoencoder reads and writes; None for a transcoder."""
    for write in dictionary.writes:
        point = point_read(dictionary.layer, dictionary.read, write.at)
        if point is not None and point[:2] == (write.layer, write.site):
            return write.layer, write.site, write.at
    return None


def input_of(
    dictionary: Dictionary,
    inputs: Mapping[tuple[int, Read], Tensor],
    outputs: Mapping[Point, Tensor],
    centred: bool = False,
) -> Tensor:
    """What the dictionary reads, of what `capture` found."""
    own = reads_what_it_writes(dictionary)
    x = inputs[dictionary.layer, dictionary.read] if own is None else outputs[own]
    return _given(dictionary, x, centred)


def _given(dictionary: Dictionary, x: Tensor, centred: bool) -> Tensor:
    if centred and dictionary.read.space in (Space.RAW, Space.BRANCH_OUTPUT):
        return x - x.mean(-1, keepdim=True)
    return x


def in_place(dictionaries: Sequence[Dictionary], centred: bool = False) -> InPlace:
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
    return InPlace(
        {point: _Sum(tuple(found), centred) for point, found in parts.items()},
        tuple(reads),
        {
            point: tuple(
                (part.dictionary.layer, part.dictionary.read) for part in found if not part.from_original
            )
            for point, found in parts.items()
        },
    )


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
    centred: bool

    def __call__(self, original: Tensor, inputs: Mapping[tuple[int, Read], Tensor]) -> Tensor:
        total: Tensor | None = None
        for part in self.parts:
            one = part.dictionary
            x = original if part.from_original else inputs[one.layer, one.read]
            x = _given(one, x, self.centred)
            (out,) = decode(one, part.activations.of(x, inputs), x)
            total = out if total is None else total + out
        assert total is not None  # a point has at least one part
        return total
