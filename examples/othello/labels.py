"""Names for features by the rules of the game: of each the predicate that it tells best, by F1.

A feature is taken for a detector: it says yes where its activation is above t · its maximum. With TP, FP and
FN counted over positions of games,

    precision = TP/(TP + FP),   recall = TP/(TP + FN),   F1 = 2 TP/(2 TP + FP + FN)

t is 0 (active at all), or the one of `FRACTIONS` whose best F1 is higher by `CLEARLY` or more. Predicate
and t are chosen on one sample of games, the figures are of another. `chance` is the F1 of a detector that
says yes as often, at random: 2pq/(p + q) for a predicate true of the share p of positions and a feature that
says yes on q. A name is only what has an F1 of `NAMED` and `BEYOND_CHANCE` times chance's.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from examples.othello.game import Games
from examples.othello.predicates import NAMES, kind_of, positions, truth
from ingest.dictionaries import Dictionary
from ingest.dictionaries.encode import encode
from ingest.dictionaries.in_place import input_of, reads_what_it_writes
from ingest.dictionaries.types import Read
from ingest.models import ResidualModel
from ingest.models.capture import Point, capture

__all__ = [
    "CLEARLY",
    "COLUMNS",
    "FRACTIONS",
    "Counts",
    "Label",
    "chosen",
    "count",
    "labelled",
    "write_labels",
]

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # of a feature's maximum
CLEARLY = 0.05
NAMED, BEYOND_CHANCE = 0.3, 1.5  # the F1 of a name: at least, and so many times chance's
READ = 59  # tokens
GAMES_AT_ONCE = 64
COLUMNS = (
    "key", "label", "layer", "feature", "kind", "predicate", "f1", "precision", "recall", "active",
    "chance", "above", "chosen_f1",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Counts:
    """Of one dictionary over some games; level l: above FRACTIONS[l] of a feature's maximum."""

    both: NDArray[np.int64]  # (levels, F, P) positions where the feature says yes and the predicate holds
    fires: NDArray[np.int64]  # (levels, F)
    holds: NDArray[np.int64]  # (P,)
    positions: int

    def f1(self) -> NDArray[np.float64]:
        """(levels, F, P); 0 where a feature never says yes."""
        total = self.fires[..., None] + self.holds
        return 2 * self.both / np.maximum(total, 1)


@dataclass(frozen=True)
class Label:
    """What a feature tells, and how well, on games that did not choose it."""

    feature: int
    predicate: str
    f1: float
    precision: float
    recall: float
    active: float  # share of the positions on which it says yes
    chance: float
    above: float  # of its maximum; 0: wherever it is active
    chosen_f1: float  # on the games that chose

    @property
    def kind(self) -> str:
        """The predicate's first word."""
        return kind_of(self.predicate)

    @property
    def tells(self) -> bool:
        """Whether the predicate is a name for the feature at all."""
        return self.f1 >= NAMED and self.f1 >= BEYOND_CHANCE * self.chance

    @property
    def text(self) -> str:
        """`theirs d3 (F1 0.92)`; nothing where no predicate tells what the feature is."""
        return f"{self.predicate} (F1 {self.f1:.2f})" if self.tells else ""


def labelled(
    model: ResidualModel, dictionaries: Sequence[Dictionary], choose: Games, report: Games
) -> list[list[Label]]:
    """For each dictionary the labels of its features that fire on both samples, in order."""
    tops = maxima(model, dictionaries, choose)
    chose = count(model, dictionaries, choose, tops)
    told = count(model, dictionaries, report, tops)
    return [list(_labels(one, other)) for one, other in zip(chose, told, strict=True)]


def chosen(counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(F,) predicate and (F,) level of each feature; -1 where it never fires."""
    f1 = counts.f1()
    best, predicate = f1.max(-1), f1.argmax(-1)  # (levels, F)
    level = best.argmax(0)
    features = np.arange(best.shape[1])
    level = np.where(best[level, features] >= best[0] + CLEARLY, level, 0)
    return np.where(counts.fires[0] > 0, predicate[level, features], -1), level


def _labels(chose: Counts, told: Counts) -> Iterator[Label]:
    predicate, level = chosen(chose)
    before, after = chose.f1(), told.f1()
    for feature in np.flatnonzero((predicate >= 0) & (told.fires[0] > 0)):
        p, l = int(predicate[feature]), int(level[feature])
        both, fires, holds = told.both[l, feature, p], told.fires[l, feature], told.holds[p]
        active, true = fires / told.positions, holds / told.positions
        yield Label(
            feature=int(feature),
            predicate=NAMES[p],
            f1=float(after[l, feature, p]),
            precision=float(both / max(fires, 1)),
            recall=float(both / max(holds, 1)),
            active=float(active),
            chance=float(2 * active * true / max(active + true, 1e-300)),
            above=FRACTIONS[l],
            chosen_f1=float(before[l, feature, p]),
        )


# --- counting -----------------------------------------------------------------------------------------------


def maxima(
    model: ResidualModel, dictionaries: Sequence[Dictionary], games: Games
) -> list[NDArray[np.float32]]:
    """(F,) each: the largest activation of every feature."""
    tops = [np.zeros(one.size, np.float32) for one in dictionaries]
    for _, tiles in _tiles(model, dictionaries, games):
        for top, tile in zip(tops, tiles, strict=True):
            np.maximum(top, tile.max(0), out=top)
    return tops


def count(
    model: ResidualModel,
    dictionaries: Sequence[Dictionary],
    games: Games,
    tops: Sequence[NDArray[np.float32]],
) -> list[Counts]:
    """Counts of every pair of a feature and a predicate, game by game: only the features that fire at a
    position are worked through there."""
    shape = len(FRACTIONS), len(NAMES)
    both = [np.zeros((shape[0], one.size, shape[1]), np.int32) for one in dictionaries]
    fires = [np.zeros((shape[0], one.size), np.int64) for one in dictionaries]
    holds, total = np.zeros(len(NAMES), np.int64), 0
    for some, tiles in _tiles(model, dictionaries, games):
        told = truth(some, READ)
        holds += told.sum(0)
        total += len(told)
        for number, tile in enumerate(tiles):
            _add(tile, tops[number], np.array(FRACTIONS, np.float32), told, both[number], fires[number])
    # So far each under the highest level it reaches.
    return [
        Counts(
            np.flip(np.flip(one, 0).cumsum(0, dtype=np.int64), 0), np.flip(np.flip(fired, 0).cumsum(0), 0),
            holds, total,
        )
        for one, fired in zip(both, fires, strict=True)
    ]  # fmt: skip


@numba.njit(cache=True)
def _add(activations, tops, fractions, told, both, fires):
    for at in range(len(activations)):
        row = told[at]
        for feature in range(activations.shape[1]):
            value = activations[at, feature]
            if value > 0:
                level = 0
                while level + 1 < len(fractions) and value > fractions[level + 1] * tops[feature]:
                    level += 1
                fires[level, feature] += 1
                into = both[level, feature]
                for p in range(len(row)):
                    into[p] += row[p]


def _tiles(
    model: ResidualModel, dictionaries: Sequence[Dictionary], games: Games
) -> Iterator[tuple[Games, Iterable[NDArray[np.float32]]]]:
    """Some games at a time, and of each dictionary the activations (positions, F) on them."""
    reads: dict[tuple[int, Read], None] = {}
    points: dict[Point, None] = {}
    for one in dictionaries:
        point = reads_what_it_writes(one)
        if point is None:
            reads[one.layer, one.read] = None
        else:
            points[point] = None
    for lo in range(0, len(games.tokens), GAMES_AT_ONCE):
        some = games.part(lo, lo + GAMES_AT_ONCE)
        tokens = torch.from_numpy(some.tokens[:, :READ])
        there = torch.from_numpy(positions(some, READ))
        seen = capture(model, tokens, list(reads), list(points))
        inputs = (input_of(one, seen.inputs, seen.outputs, False)[there] for one in dictionaries)
        yield some, (encode(one, x).numpy() for one, x in zip(dictionaries, inputs, strict=True))


def write_labels(to: Path, keys: Mapping[int, str], labels: Mapping[int, Sequence[Label]]) -> None:
    """A CSV for `atlas label import`: by layer, the dictionary's key and its labels. Features without a name
    have their best predicate and its figures all the same; their label is empty, and no import takes it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for layer, found in sorted(labels.items()):
            for one in found:
                figures = (one.f1, one.precision, one.recall, one.active, one.chance)
                table.writerow([
                    f"{keys[layer]}/{one.feature}", one.text, layer, one.feature, one.kind, one.predicate,
                    *(f"{figure:.4f}" for figure in figures), f"{one.above:g}", f"{one.chosen_f1:.4f}",
                ])  # fmt: skip
