"""The passes of an evaluation: sets in memory, contexts in batches, every changed run of the model, and sums
for each context.

What a set of dictionaries changes, and what zeros or means in the same places do, are runs of one kind; one
that changes nothing below a layer begins there. Only sums by context are kept, so memory does not grow with
the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ingest.contexts import Contexts
from ingest.dictionaries import At, Dictionary, DictionarySet
from ingest.dictionaries.encode import encode
from ingest.dictionaries.in_place import InPlace, in_place, input_of
from ingest.errors import InputError
from ingest.models import Facts, ResidualModel
from ingest.models.capture import Captured, Point, capture

__all__ = ["Feed", "Loaded", "Sums", "Variant", "means_of", "original", "variants_of"]

Run = tuple[str, tuple[Point, ...]]  # "zero", "mean" or a set's label; where


class Loaded:
    """A set's dictionaries in memory."""

    def __init__(self, facts: Facts, source: DictionarySet) -> None:
        self.source = source
        self.label = f"set {source.name}"  # no set's is "zero"
        self.centred = source.layout.folded and facts.norm.centred
        plain = not facts.norm_after and facts.branch_multiplier == 1.0
        self.dictionaries: dict[int, Dictionary] = {}
        for layer in source.layers:
            self.dictionaries[layer] = source.load(layer)
        self.in_place = in_place(list(self.dictionaries.values()), self.centred)
        # Where nothing stands behind a branch, its output is what joins: one name for both.
        self.own_name = {_named(point, plain): point for point in self.in_place.replace}
        self.points = tuple(sorted(self.own_name))

    def put(self, points: Iterable[Point]) -> InPlace:
        return self.in_place.at([self.own_name[point] for point in points])


def _named(point: Point, plain: bool) -> Point:
    layer, site, at = point
    return layer, site, at if site in ("attn", "mlp") and not plain else At.MODULE


@dataclass(frozen=True, eq=False)
class Variant:
    """One changed run of the model: dictionaries, zeros or means at some points."""

    points: tuple[Point, ...]
    put: Callable[[Mapping[Point, Tensor]], InPlace]  # given the means
    start: int  # the layer it can begin at


def variants_of(loaded: Sequence[Loaded], points: Sequence[Point]) -> dict[Run, Variant]:
    """Every run that the figures need."""
    groups = {(point,) for point in points} | {one.points for one in loaded}
    found: dict[Run, Variant] = {}
    for group in sorted(groups):
        lowest = min(point[0] for point in group)
        found["zero", group] = Variant(group, _filled(group, zero=True), lowest)
        found["mean", group] = Variant(group, _filled(group, zero=False), lowest)
    for one in loaded:
        for group in sorted({(point,) for point in one.points} | {one.points}):
            put = one.put(group)
            lowest = min([*(point[0] for point in group), *(layer for layer, _ in put.reads)])
            found[one.label, group] = Variant(group, lambda _, put=put: put, lowest)  # type: ignore[misc]
    return found


def _filled(group: tuple[Point, ...], zero: bool) -> Callable[[Mapping[Point, Tensor]], InPlace]:
    def with_means(means: Mapping[Point, Tensor]) -> InPlace:
        def fill(point: Point) -> Callable[[Tensor, Any], Tensor]:
            if zero:
                return lambda own, _: torch.zeros_like(own)
            return lambda own, _: means[point].to(own).expand_as(own)

        return InPlace({point: fill(point) for point in group}, (), dict.fromkeys(group, ()))

    return with_means


class Feed:
    """Batches of contexts as the model takes them."""

    def __init__(self, facts: Facts, contexts: Contexts, size: int, autocast: bool) -> None:
        self.contexts, self.size, self.autocast = contexts, size, autocast
        # The last token of a row is only predicted where the model has no position for it.
        self.width = contexts.length - 1 if contexts.length == facts.n_ctx + 1 else contexts.length
        if self.width > facts.n_ctx:
            raise InputError(
                f"contexts of {contexts.length} tokens: {facts.architecture} has {facts.n_ctx} positions;"
                f" give a shorter length"
            )
        self.n_batches = -(-len(contexts) // size)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(slice of rows, tokens (B, T), scored (B, T))."""
        for lo in range(0, len(self.contexts), self.size):
            rows = slice(lo, min(lo + self.size, len(self.contexts)))
            whole = self._whole(rows)[:, : self.width]
            yield rows, torch.from_numpy(whole), torch.from_numpy(self.contexts.scored(whole))

    def _whole(self, rows: slice) -> np.ndarray:
        return np.ascontiguousarray(self.contexts.tokens[rows]).astype(np.int64)

    def predicted(self, rows: slice) -> np.ndarray:
        """(B, T - 1) bool: where a next token is predicted from a position that is scored."""
        whole = self._whole(rows)
        there = self.contexts.scored(whole)[:, :-1]
        return there if self.contexts.pad is None else there & (whole[:, 1:] != self.contexts.pad)

    def nats(self, rows: slice, logits: Tensor) -> np.ndarray:
        """(B,) float64: the sum over a context's predicted tokens of -log p."""
        labels, mask = torch.from_numpy(self._whole(rows)[:, 1:]), torch.from_numpy(self.predicted(rows))
        sums = [
            F.cross_entropy(row[: len(label)], label, reduction="none").double()[kept].sum()
            for row, label, kept in zip(logits, labels, mask, strict=True)
        ]
        return torch.stack(sums).numpy()


def means_of(
    model: ResidualModel, feed: Feed, points: Sequence[Point], step: Callable[[], None]
) -> dict[Point, Tensor]:
    """(d,) float64 of each point over the scored positions."""
    sums: dict[Point, Tensor] = {}
    count = 0
    for _, tokens, scored in feed:
        seen = capture(model, tokens, outputs=points, autocast=feed.autocast)
        count += int(scored.sum())
        for point in points:
            total = seen.outputs[point][scored].double().sum(0)
            sums[point] = total if point not in sums else sums[point] + total
        step()
    if not count:
        raise InputError("no position is scored: every token is padding, or stands in front")
    return {point: total / count for point, total in sums.items()}


def original(
    model: ResidualModel,
    feed: Feed,
    tokens: Tensor,
    loaded: Sequence[Loaded],
    points: Sequence[Point],
    variants: Mapping[Run, Variant],
) -> Captured:
    reads = dict.fromkeys(read for one in loaded for read in one.in_place.reads)
    own = {point for one in loaded for point in one.own_name.values()}
    starts = sorted({variant.start for variant in variants.values()})
    return capture(model, tokens, list(reads), sorted({*points, *own}), feed.autocast, True, starts)


# --- sums over contexts -------------------------------------------------------------------------------------


class Sums:
    """Per context, for every set and layer; filled batch by batch."""

    def __init__(
        self, n: int, loaded: Sequence[Loaded], points: Sequence[Point], variants: Mapping[Run, Variant]
    ) -> None:
        self.loaded = loaded
        self.tokens = np.zeros(n)
        self.nats: dict[Any, np.ndarray] = {name: np.zeros(n) for name in ("model", *variants)}
        self.active = {(one.source.name, layer): np.zeros(n) for one in loaded for layer in one.dictionaries}
        self.fired = {
            (one.source.name, layer): torch.zeros(dictionary.size, dtype=torch.bool)
            for one in loaded
            for layer, dictionary in one.dictionaries.items()
        }
        keys = [(one.source.name, point) for one in loaded for point in one.points]
        self.errors = {key: np.zeros(n) for key in keys}
        self.variances = {key: np.zeros(n) for key in keys}

    def addoriginal(
        self, rows: slice, seen: Captured, tokens: Tensor, scored: Tensor, means: Mapping[Point, Tensor]
    ) -> None:
        """Of the model's own pass: L0, what fired, errors and variances."""
        self.tokens[rows] = scored.sum(-1).numpy()
        for one in self.loaded:
            name = one.source.name
            for layer, dictionary in one.dictionaries.items():
                x = input_of(dictionary, seen.inputs, seen.outputs, one.centred)
                fires = (encode(dictionary, x) != 0) & scored[..., None]
                self.active[name, layer][rows] = fires.sum((-1, -2)).numpy()
                self.fired[name, layer] |= fires.flatten(0, 1).any(0)
            for point in one.points:
                own, mean = one.own_name[point], means[point]
                y = seen.outputs[own]
                out = one.in_place.replace[own](y, seen.inputs)
                if one.centred and own[1] != "attn.z":
                    y, mean = y - y.mean(-1, keepdim=True), mean - mean.mean()
                self.errors[name, point][rows] = _squares(y - out, scored)
                self.variances[name, point][rows] = _squares(y - mean, scored)


def _squares(x: Tensor, scored: Tensor) -> np.ndarray:
    """(B,) float64: Σ |x|² over scored positions."""
    return (x.double().pow(2).sum(-1) * scored).sum(-1).numpy()
