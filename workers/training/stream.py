"""The stream of activations that dictionaries are trained on: harvested once, mixed in a buffer of bounded
size, read several times.

The buffer holds two halves, each from its own contexts. A round replaces the older half, mixes both and gives
batches in an order that the seed and the round alone decide. So round r depends on the contexts of halves r
and r + 1 and on nothing before them: a run that is resumed harvests those two again and goes on as if it had
never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingest.contexts import Contexts
from ingest.dictionaries.types import At, Read
from ingest.models.capture import Point, capture
from ingest.models.residual import ResidualModel

__all__ = ["Harvest", "Rows", "Source", "Stream", "sources_of", "steps_of"]

Source = tuple[int, Read] | Point  # what is read, or what is written


@dataclass(frozen=True, eq=False)
class Rows:
    """One row for each token: what stands at each source, (n, width) float32."""

    values: Mapping[Source, Tensor]
    count: int


@dataclass(frozen=True, eq=False)
class Harvest:
    """Which contexts of a model are run, and what is kept of them.

    Tokens that a context does not score (its first, a pad) are left out, and so are those whose value at one
    of `sources` is further than `extreme` times the median from the median of its kind: a handful of massive
    activations would own the squared error.
    """

    model: ResidualModel
    contexts: Contexts
    sources: tuple[Source, ...]
    batch: int = 32  # contexts in one forward
    autocast: bool = False
    extreme: float = 20.0

    def rows(self, lo: int, hi: int, each: Callable[[int], None] | None = None) -> Rows:
        """Contexts lo … hi-1 (beyond the last one the first ones again). `each` is told of the tokens run."""
        parts: dict[Source, list[Tensor]] = {source: [] for source in self.sources}
        order = np.arange(lo, hi) % len(self.contexts)
        inputs = [source for source in self.sources if len(source) == 2]
        outputs = [source for source in self.sources if len(source) == 3]
        for at in range(0, len(order), self.batch):
            ids = self.contexts.tokens[order[at : at + self.batch]].astype(np.int64)
            scored = torch.from_numpy(self.contexts.scored(ids))
            found = capture(self.model, torch.from_numpy(ids), inputs, outputs, autocast=self.autocast)
            for source in self.sources:
                value = found.inputs[source] if len(source) == 2 else found.outputs[source]
                parts[source].append(value[scored])
            if each:
                each(ids.size)
        values = {source: torch.cat(part) for source, part in parts.items()}
        kept = torch.ones(len(next(iter(values.values()))), dtype=torch.bool)
        for value in values.values():
            size = (value - value.mean(0)).norm(dim=-1)
            kept &= size <= self.extreme * size.median()
        if not bool(kept.all()):
            values = {source: value[kept] for source, value in values.items()}
        return Rows(values, int(kept.sum()))


class Stream:
    """Rounds of batches over two halves of `half` contexts each."""

    def __init__(self, harvest: Harvest, half: int, seed: int) -> None:
        self.harvest, self.half, self._seed = harvest, half, seed
        self._halves: dict[int, Rows] = {}

    def prepare(self, round: int, each: Callable[[int], None] | None = None) -> None:
        """Harvests what round `round` needs and is not there."""
        wanted = (round, round + 1)
        self._halves = {number: rows for number, rows in self._halves.items() if number in wanted}
        for number in wanted:
            if number not in self._halves:
                lo = number * self.half
                self._halves[number] = self.harvest.rows(lo, lo + self.half, each)

    def some(self) -> Rows:
        """A half: of a run that begins the first, from which scales and starting points are taken; of one
        that is resumed whichever is there, as a checkpoint has both."""
        return next(iter(self._halves.values()), None) or self.harvest.rows(0, self.half)

    def batches(self, round: int, size: int, reuse: float) -> Iterator[list[tuple[int, Tensor]]]:
        """For each batch of about `size` rows, which rows of which half. A round has `reuse` × half a buffer
        of rows: each row is met `reuse` times in the two rounds that it stays for."""
        counts = [self._halves[number].count for number in (round, round + 1)]
        total = sum(counts)
        generator = torch.Generator().manual_seed((self._seed << 20) + round)
        steps = steps_of(total / 2, size, reuse)
        order = torch.cat(
            [torch.randperm(total, generator=generator) for _ in range(-(-steps * size // total))]
        )
        for step in range(steps):
            rows = order[step * size : (step + 1) * size].sort().values
            cut = int((rows < counts[0]).sum())
            yield [(round, rows[:cut]), (round + 1, rows[cut:] - counts[0])]

    def take(self, source: Source, rows: Sequence[tuple[int, Tensor]]) -> Tensor:
        """(n, width): a batch's rows at one source."""
        return torch.cat([self._halves[number].values[source][which] for number, which in rows])


def steps_of(half: float, size: int, reuse: float) -> int:
    """Batches of `size` rows in a round, of halves of so many rows."""
    return max(1, int(reuse * half / size))


def sources_of(layer: int, read: Read, write: tuple[str, At] | None) -> tuple[Source, Source]:
    """(what is read, what is to be given back) of a dictionary; an autoencoder, without `write`, gives back
    what it reads."""
    return (layer, read), (layer, read) if write is None else (layer, *write)
