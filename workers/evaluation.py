"""How well dictionaries describe a model (methods: Training and evaluating dictionaries).

For what is described, y (n, d), and what a dictionary puts in its place, ŷ, over the evaluation tokens:

    FVU        Σ |y - ŷ|² / Σ |y - ȳ|²,  ȳ the mean over these tokens
    L0         mean number of latents that fire on a token;  dead: those that fire on none of the tokens
    CE         nats per token of the model with ŷ in place of y, everything above it live
    added      CE - CE_original
    recovered  (CE_zero - CE) / (CE_zero - CE_original),  CE_zero with 0 in place of y;  CE_mean with ȳ

each layer by itself, and all of a set's at once. Of two sets the differences are paired by context. Positions
that are not scored (the token put in front, padding) keep the model's own values and count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ingest.contexts import Contexts
from ingest.dictionaries import DictionarySet
from ingest.errors import InputError
from ingest.models import ResidualModel
from ingest.models.capture import Point, logits_with
from workers.evaluation_passes import Feed, Loaded, Sums, means_of, original, variants_of
from workers.measures import Estimate, Ratio, difference

__all__ = ["Difference", "Evaluation", "LayerFigures", "SetFigures", "Together", "evaluate"]

BATCH_TOKENS = 1024
QUANTITIES = ("fvu", "l0", "ce", "recovered")


@dataclass(frozen=True)
class LayerFigures:
    """One layer of a set: what its dictionary reads and what is written there."""

    layer: int
    site: str
    at: str
    size: int | None  # latents; None where no dictionary reads this layer
    dead: int | None
    dead_share: float | None
    l0: Estimate | None
    fvu: Estimate
    ce: Estimate
    added: Estimate
    ce_zero: Estimate
    ce_mean: Estimate
    recovered: Estimate


@dataclass(frozen=True)
class Together:
    """All layers of a set in place at once; zero and mean: in all of them at once."""

    layers: int
    l0: Estimate  # mean over the layers
    ce: Estimate
    added: Estimate
    ce_zero: Estimate
    ce_mean: Estimate
    recovered: Estimate


@dataclass(frozen=True)
class SetFigures:
    """One set of dictionaries."""

    name: str
    kind: str
    format: str
    source: str | None
    layers: tuple[LayerFigures, ...]
    together: Together


@dataclass(frozen=True)
class Difference:
    """`second` less `first`, paired by context."""

    first: str
    second: str
    layer: int | None  # None: all at once
    site: str | None
    quantity: str  # fvu, l0, ce or recovered
    estimate: Estimate


@dataclass(frozen=True)
class Evaluation:
    """Figures of sets on one model and the same tokens."""

    model: str
    contexts: int
    length: int
    tokens: int  # scored: what FVU, L0 and dead latents are over
    predicted: int  # what cross-entropies are over
    part: str
    share: float
    seed: int
    bf16: bool
    ce: Estimate  # of the model itself
    sets: tuple[SetFigures, ...]
    differences: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def evaluate(
    model: ResidualModel,
    sets: Sequence[DictionarySet],
    contexts: Contexts,
    *,
    autocast: bool = False,
    batch: int | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> Evaluation:
    """Every layer of every set, and each set at once; all sets on the same contexts, in one go over them.

    autocast: the model's matrix products in bfloat16. batch: contexts at once. progress(done, total, unit).
    The sets' dictionaries are in memory together. Raises InputError for contexts that the model cannot take,
    two sets of one name, and what the model has no place for.
    """
    if len({one.name for one in sets}) < len(sets):
        raise InputError(f"sets {', '.join(one.name for one in sets)}: expected a name of its own for each")
    feed = Feed(model.facts, contexts, batch or max(1, BATCH_TOKENS // contexts.length), autocast)
    loaded = [Loaded(model.facts, one) for one in sets]
    points = sorted({point for one in loaded for point in one.points})
    variants = variants_of(loaded, points)
    done, total = 0.0, float(feed.n_batches * (2 + len(variants)))

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, "")

    means = means_of(model, feed, points, step)
    sums = Sums(len(contexts), loaded, points, variants)
    for rows, tokens, scored in feed:
        seen = original(model, feed, tokens, loaded, points, variants)
        step()
        assert seen.logits is not None
        sums.addoriginal(rows, seen, tokens, scored, means)
        sums.nats["model"][rows] = feed.nats(rows, seen.logits)
        for name, variant in variants.items():
            put = variant.put(means)
            logits = logits_with(
                model, tokens, put.replace, put.reads, scored, autocast, seen.starts.get(variant.start)
            )
            sums.nats[name][rows] = feed.nats(rows, logits)
            step()
    return _figures(model, sets, contexts, feed, sums)


# --- figures ------------------------------------------------------------------------------------------------


def _figures(
    model: ResidualModel, sets: Sequence[DictionarySet], contexts: Contexts, feed: Feed, sums: Sums
) -> Evaluation:
    counts = feed.predicted(slice(None)).sum(-1).astype(float)
    ratios = [_Ratios(one, sums, counts) for one in sums.loaded]
    return Evaluation(
        model=model.name,
        contexts=len(contexts),
        length=contexts.length,
        tokens=int(sums.tokens.sum()),
        predicted=int(counts.sum()),
        part=contexts.part,
        share=contexts.share,
        seed=contexts.seed,
        bf16=feed.autocast,
        ce=Ratio(sums.nats["model"], counts).estimate,
        sets=tuple(one.figures() for one in ratios),
        differences=tuple(found for one in ratios[1:] for found in _differences(ratios[0], one)),
    )


class _Ratios:
    """A set's figures as ratios, so that they can be compared."""

    def __init__(self, loaded: Loaded, sums: Sums, counts: np.ndarray) -> None:
        self.loaded, self.sums, self.counts = loaded, sums, counts
        self.name = loaded.source.name

    def at(self, points: tuple[Point, ...]) -> dict[str, Ratio]:
        """Of the points of one layer, or of all: ce, added, ce_zero, ce_mean, recovered."""
        nats = self.sums.nats
        own, zero, mean = nats[self.loaded.label, points], nats["zero", points], nats["mean", points]
        return {
            "ce": Ratio(own, self.counts),
            "added": Ratio(own - nats["model"], self.counts),
            "ce_zero": Ratio(zero, self.counts),
            "ce_mean": Ratio(mean, self.counts),
            "recovered": Ratio(zero - own, zero - nats["model"]),
        }

    def fvu(self, point: Point) -> Ratio:
        return Ratio(self.sums.errors[self.name, point], self.sums.variances[self.name, point])

    def l0(self, layer: int) -> Ratio | None:
        active = self.sums.active.get((self.name, layer))
        return None if active is None else Ratio(active, self.sums.tokens)

    def l0_together(self) -> Ratio:
        layers = self.loaded.dictionaries
        total = sum((self.sums.active[self.name, layer] for layer in layers), np.zeros_like(self.sums.tokens))
        return Ratio(total, self.sums.tokens * len(layers))

    def figures(self) -> SetFigures:
        source = self.loaded.source
        together = {name: one.estimate for name, one in self.at(self.loaded.points).items()}
        return SetFigures(
            name=self.name,
            kind=source.kind,
            format=source.format,
            source=None if source.source is None else str(source.source),
            layers=tuple(self._layer(point) for point in self.loaded.points),
            together=Together(
                layers=len(self.loaded.dictionaries), l0=self.l0_together().estimate, **together
            ),
        )

    def _layer(self, point: Point) -> LayerFigures:
        layer, site, at = point
        l0, fired = self.l0(layer), self.sums.fired.get((self.name, layer))
        dead = None if fired is None else int((~fired).sum())
        return LayerFigures(
            layer=layer,
            site=site,
            at=str(at),
            size=None if fired is None else len(fired),
            dead=dead,
            dead_share=None if fired is None or dead is None else dead / len(fired),
            l0=None if l0 is None else l0.estimate,
            fvu=self.fvu(point).estimate,
            **{name: one.estimate for name, one in self.at((point,)).items()},
        )


def _differences(first: _Ratios, second: _Ratios) -> Iterable[Difference]:
    """At points that both write; all at once where those are all of both."""
    for point in first.loaded.points:
        if point in second.loaded.points:
            pair: list[dict[str, Ratio | None]] = [
                {"fvu": one.fvu(point), "l0": one.l0(point[0]), **one.at((point,))} for one in (first, second)
            ]
            yield from _pairs(first.name, second.name, point[0], point[1], *pair)
    if first.loaded.points == second.loaded.points:
        pair = [{"l0": one.l0_together(), **one.at(one.loaded.points)} for one in (first, second)]
        yield from _pairs(first.name, second.name, None, None, *pair)


def _pairs(
    first: str,
    second: str,
    layer: int | None,
    site: str | None,
    a: Mapping[str, Ratio | None],
    b: Mapping[str, Ratio | None],
) -> Iterable[Difference]:
    for quantity in QUANTITIES:
        one, other = a.get(quantity), b.get(quantity)
        if one is not None and other is not None:
            yield Difference(first, second, layer, site, quantity, difference(other, one))
