"""What is shipped of one Othello-GPT, measured: legal moves, dictionaries in place, names of features.

Everything is read back from the files, float16 as they are. The games are those that neither the model nor a
dictionary was trained on: seeds here against `train_model`'s and `make`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.othello.game import MOVES, PAD, Games, random_games
from examples.othello.labels import READ, Label, labelled
from examples.othello.predicates import KINDS
from examples.othello.train_model import HELD_OUT_SEED
from ingest.contexts import Contexts
from ingest.dictionaries import DictionarySet, open_set
from ingest.dictionaries.layout import NOTHING, Declared
from ingest.models import ResidualModel
from ingest.models.capture import capture
from workers.evaluation import Evaluation, LayerFigures, Together, evaluate
from workers.measures import Estimate, Ratio

__all__ = ["MODEL", "SETS", "LegalMoves", "contexts_of", "dictionary_rows", "label_figures", "legal_moves",
           "open_sets", "shipped_labels"]  # fmt: skip

MODEL = "othello"  # in keys of features
CHOOSE_SEED, REPORT_SEED = 2_000_000, 3_000_000  # of games that choose labels, and that they are measured on
# Set -> (folder, what its files cannot say). The embedding's files name the stream before block 0.
SETS: dict[str, tuple[str, Declared]] = {
    "transcoders": ("transcoders", NOTHING),
    "mlp_out": ("saes/mlp_out", NOTHING),
    "attn_out": ("saes/attn_out", NOTHING),
    "embed": ("saes/embed", NOTHING),
}


@dataclass(frozen=True)
class LegalMoves:
    """How well a model knows the rules, over positions from which a game goes on."""

    games: int
    positions: int
    top1: Estimate  # how often the likeliest token is legal, with its error over games
    mass: Estimate  # mean probability of all legal ones


def held_out(games: int) -> Games:
    """The games of `HELD_OUT_SEED`: a longer sample begins with a shorter one."""
    return random_games(games, HELD_OUT_SEED)


def legal_moves(model: ResidualModel, games: Games) -> LegalMoves:
    """On the first 59 moves of games."""
    legal = torch.from_numpy(games.legal_tokens()[:, :READ])
    top, mass, count = [], [], []
    for lo in range(0, len(games.tokens), 64):
        tokens = torch.from_numpy(games.tokens[lo : lo + 64, :READ])
        logits = capture(model, tokens, logits=True).logits
        assert logits is not None  # asked for
        allowed = legal[lo : lo + 64]
        on = allowed.any(-1)
        best = allowed.gather(-1, logits.argmax(-1, keepdim=True))[..., 0]
        top.append((best & on).sum(-1).double())
        mass.append(((logits.double().softmax(-1) * allowed).sum(-1) * on).sum(-1))
        count.append(on.sum(-1).double())
    counts = torch.cat(count).numpy()
    return LegalMoves(
        len(games.tokens),
        int(counts.sum()),
        Ratio(torch.cat(top).numpy(), counts).estimate,
        Ratio(torch.cat(mass).numpy(), counts).estimate,
    )


def open_sets(folder: Path, model: ResidualModel, names: Sequence[str] = tuple(SETS)) -> list[DictionarySet]:
    """The sets shipped beside a model."""
    return [
        open_set(folder / SETS[name][0], name=name, model=model, declared=SETS[name][1]) for name in names
    ]


def contexts_of(games: Games) -> Contexts:
    """Games as contexts, the last move to be predicted only."""
    names = tuple(f"game {number}" for number in range(len(games.tokens)))
    return Contexts(
        tokens=games.tokens.astype(np.int32),
        document=np.arange(len(games.tokens), dtype=np.int32),
        documents=names,
        first_scored=0,
        pad=PAD,
        seed=HELD_OUT_SEED,
    )


def measured(
    model: ResidualModel,
    sets: Sequence[DictionarySet],
    games: Games,
    progress: Callable[[float, float, str], None] | None = None,
) -> Evaluation:
    """`workers.evaluation` on games."""
    assert games.tokens.shape[1] == MOVES
    return evaluate(model, sets, contexts_of(games), batch=64, progress=progress)


def dictionary_rows(found: Evaluation) -> Iterator[dict[str, Any]]:
    """Plain figures of each dictionary alone, and of each set at once (layer null)."""
    for one in found.sets:
        for layer in one.layers:
            yield {"set": one.name, "kind": one.kind, "layer": layer.layer, **_figures(layer)} | {
                "latents": layer.size,
                "dead": layer.dead,
                "fvu": layer.fvu.value,
                "fvu_se": layer.fvu.se,
            }
        if len(one.layers) > 1:
            yield {"set": one.name, "kind": one.kind, "layer": None, **_figures(one.together)}


def _figures(of: LayerFigures | Together) -> dict[str, float | None]:
    ce, zero, mean, added = of.ce.value, of.ce_zero.value, of.ce_mean.value, of.added.value
    assert None not in (ce, zero, mean, added)
    original = ce - added  # type: ignore[operator]
    return {
        "l0": None if of.l0 is None else of.l0.value,
        "ce": ce,
        "added": added,
        "added_se": of.added.se,
        "ce_zero": zero,
        "ce_mean": mean,
        "recovered": of.recovered.value,
        "recovered_se": of.recovered.se,
        "recovered_from_mean": (mean - ce) / (mean - original),  # type: ignore[operator]
    }


def shipped_labels(
    model: ResidualModel, sets: Sequence[DictionarySet], choose: int, report: int
) -> dict[str, dict[int, list[Label]]]:
    """By set and layer; `choose` and `report` games."""
    places = [(one.name, layer, one.load(layer)) for one in sets for layer in one.layers]
    found = labelled(
        model,
        [dictionary for _, _, dictionary in places],
        random_games(choose, CHOOSE_SEED),
        random_games(report, REPORT_SEED),
    )
    labels: dict[str, dict[int, list[Label]]] = {one.name: {} for one in sets}
    for (name, layer, _), some in zip(places, found, strict=True):
        labels[name][layer] = some
    return labels


def label_figures(labels: Sequence[Label]) -> dict[str, Any]:
    """The distribution of F1 over the features of a dictionary, and over kinds of predicates."""
    f1 = np.array([one.f1 for one in labels])
    kinds = {kind: [one.f1 for one in labels if one.kind == kind] for kind in KINDS}
    return {
        "live": len(labels),
        "named": sum(one.tells for one in labels),
        "quartiles": [float(value) for value in np.quantile(f1, (0.25, 0.5, 0.75))],
        "at_least": {f"{level:g}": int((f1 >= level).sum()) for level in (0.5, 0.7, 0.9)},
        "chance_median": float(np.median([one.chance for one in labels])),
        "kinds": {
            kind: {"features": len(some), "median": float(np.median(some)), "best": max(some)}
            for kind, some in kinds.items()
            if some
        },
        "with_threshold": sum(one.above > 0 for one in labels),
    }
