"""Where features fire most: for each feature the contexts with its largest activations, and the activations
around them.

Two goes over the contexts. The first keeps, for every feature, its largest activation in each of the best k
contexts so far (of k different ones, so that one long passage does not fill the list); the second runs the
contexts that are shown again and keeps the chosen features' activations on each of their tokens. Memory grows
with features × k, not with tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingest.contexts import Contexts
from ingest.dictionaries import Dictionary
from ingest.dictionaries.encode import encode
from ingest.dictionaries.in_place import input_of, reads_what_it_writes
from ingest.models import ResidualModel
from ingest.models.capture import capture

__all__ = ["Example", "Peaks", "examples_of", "peaks_of"]

BATCH_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Peaks:
    """The k contexts in which each feature of a dictionary fires most, the strongest first."""

    value: np.ndarray  # (F, k) float32, of |activation|; 0 where fewer contexts hold the feature
    context: np.ndarray  # (F, k) int64
    position: np.ndarray  # (F, k) int64
    contexts: np.ndarray  # (F,) int64: how many contexts hold the feature

    @property
    def live(self) -> np.ndarray:
        """Numbers of the features that fire at all."""
        return np.flatnonzero(self.value[:, 0] > 0)


@dataclass(frozen=True, eq=False)
class Example:
    """One context of one feature."""

    tokens: np.ndarray  # (T,) ids
    activations: np.ndarray  # (T,) float32; 0 where the position is not scored
    peak: int


def peaks_of(
    model: ResidualModel,
    dictionaries: Sequence[Dictionary],
    contexts: Contexts,
    k: int,
    centred: Sequence[bool] | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> list[Peaks]:
    """Of each dictionary; `centred` as for in_place.

    Ties go to the earlier context.
    """
    sizes = [dictionary.size for dictionary in dictionaries]
    value = [torch.zeros(k, size) for size in sizes]
    place = [torch.zeros(2, k, size, dtype=torch.long) for size in sizes]
    held = [torch.zeros(size, dtype=torch.long) for size in sizes]
    step = max(1, BATCH_TOKENS // contexts.length)
    for lo in range(0, len(contexts), step):
        rows = np.arange(lo, min(lo + step, len(contexts)))
        for at, acts in enumerate(_activations(model, dictionaries, contexts, rows, centred)):
            best, position = acts.abs().max(1)  # (B, F)
            held[at] += (best > 0).sum(0)
            number = torch.from_numpy(rows)[:, None].expand_as(position)
            values = torch.cat([value[at], best])
            order = values.sort(dim=0, descending=True, stable=True).indices[:k]
            value[at] = values.gather(0, order)
            here = torch.stack([number, position])
            place[at] = torch.cat([place[at], here], 1).gather(1, order.expand(2, -1, -1))
        if progress:
            progress(int(rows[-1]) + 1, len(contexts), "contexts")
    return [
        Peaks(v.T.numpy(), p[0].T.numpy(), p[1].T.numpy(), n.numpy())
        for v, p, n in zip(value, place, held, strict=True)
    ]


def examples_of(
    model: ResidualModel,
    dictionaries: Sequence[Dictionary],
    contexts: Contexts,
    peaks: Sequence[Peaks],
    chosen: Sequence[Sequence[int]],
    centred: Sequence[bool] | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> dict[tuple[int, int], list[Example]]:
    """(number of the dictionary, feature) -> its examples, the strongest first."""
    wanted: dict[int, list[tuple[int, int, int]]] = {}
    for at, features in enumerate(chosen):
        for feature in features:
            for rank in np.flatnonzero(peaks[at].value[feature] > 0).tolist():
                wanted.setdefault(int(peaks[at].context[feature, rank]), []).append((at, feature, rank))
    rows = np.array(sorted(wanted), dtype=np.int64)
    found: dict[tuple[int, int], dict[int, Example]] = {}
    step = max(1, BATCH_TOKENS // contexts.length)
    for lo in range(0, len(rows), step):
        part = rows[lo : lo + step]
        acts = _activations(model, dictionaries, contexts, part, centred)
        for row, context in enumerate(part.tolist()):
            for at, feature, rank in wanted[context]:
                found.setdefault((at, feature), {})[rank] = Example(
                    tokens=np.array(contexts.tokens[context, : acts[at].shape[1]]),
                    activations=acts[at][row, :, feature].numpy().copy(),
                    peak=int(peaks[at].position[feature, rank]),
                )
        if progress:
            progress(min(lo + step, len(rows)), len(rows), "contexts shown")
    return {key: [ranked[rank] for rank in sorted(ranked)] for key, ranked in found.items()}


def _activations(
    model: ResidualModel,
    dictionaries: Sequence[Dictionary],
    contexts: Contexts,
    rows: np.ndarray,
    centred: Sequence[bool] | None,
) -> list[Tensor]:
    """(B, T, F) of each dictionary, 0 where a position is not scored."""
    ids = np.ascontiguousarray(contexts.tokens[rows]).astype(np.int64)
    outputs = [point for one in dictionaries if (point := reads_what_it_writes(one)) is not None]
    inputs = [(one.layer, one.read) for one in dictionaries if reads_what_it_writes(one) is None]
    width = min(ids.shape[1], model.facts.n_ctx)
    seen = capture(model, torch.from_numpy(ids[:, :width]), inputs, outputs)
    scored = torch.from_numpy(contexts.scored(ids[:, :width]))[..., None]
    flags: Mapping[int, bool] = dict(enumerate(centred or ()))
    return [
        torch.where(scored, encode(one, input_of(one, seen.inputs, seen.outputs, flags.get(at, False))), 0.0)
        for at, one in enumerate(dictionaries)
    ]
