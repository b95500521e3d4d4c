"""Transcoders against autoencoders of the same MLPs of one Othello-GPT, at several L0.

    python -m examples.othello.pareto --seed 1

Trains both alike (dictionaries.yaml, with fewer rows) at every k, measures them on held-out games, and writes
pareto.json and pareto.svg beside the model's card, which `make` then shows. The dictionaries are not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atlas.pareto import pareto
from atlas.training import run_training
from examples.othello.card import card
from examples.othello.games import write_games
from examples.othello.make import GAMES, GAMES_SEED, HERE, training_spec
from examples.othello.measure import MODEL, held_out, measured
from ingest.dictionaries import open_set
from ingest.models import open_model
from workers.evaluation import Evaluation, LayerFigures

KS, LAYERS = (8, 16, 32), (1, 4)
KINDS = {"sae": "autoencoder", "tc": "transcoder", "skip": "skip-transcoder"}
TOKENS, REUSE, BUFFER, RATE = 500_000, 2, 100_000, 3e-3
GAMES_MEASURED = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--to", type=Path, help="default: examples/othello/models/seed-SEED")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    to = options.to or HERE / "models" / f"seed-{options.seed}"
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        found, met = compare(to, options.seed, Path(folder), options.threads)
    record = {"games": GAMES_MEASURED, "rows_met": met, "rows": [row for one in found for row in _rows(one)]}
    (to / "pareto.json").write_text(json.dumps(record, indent=1, default=float) + "\n", encoding="utf-8")
    every = dataclasses.replace(found[0], sets=tuple(figures for one in found for figures in one.sets))
    pareto(every).save(to / "pareto.svg")
    if (to / "figures.json").exists():
        (to / "README.md").write_text(card(to), encoding="utf-8")


def compare(to: Path, seed: int, work: Path, threads: int) -> tuple[list[Evaluation], int]:
    """All trained in one run; for each k every kind measured. And the rows met by each."""
    write_games(work / "games.npy", GAMES, GAMES_SEED + seed)
    entries = {f"{kind}_{k}": _entry(kind, k) for k in KS for kind in KINDS}
    spec = training_spec(
        to, work / "games.npy", seed, tokens=TOKENS, reuse=REUSE, buffer=BUFFER, dictionaries=entries
    )
    trained = run_training(spec, work / "sets", threads=threads)
    model, games = open_model(to, name=MODEL), held_out(GAMES_MEASURED)
    found = []
    for k in KS:
        sets = [
            open_set(work / "sets" / f"{kind}_{k}", name=f"{name}, k {k}", model=model)
            for kind, name in KINDS.items()
        ]
        found.append(measured(model, sets, games))
    return found, trained.met


def _entry(kind: str, k: int) -> dict[str, Any]:
    entry = {"latents": 1024, "gate": {"topk": k}, "rate": RATE, "layers": list(LAYERS)}
    place = {"reads": "mlp.out"} if kind == "sae" else {"reads": "mlp.in", "writes": "mlp.out"}
    return entry | place | {"precision": "float16", "skip": kind == "skip"}


def _rows(found: Evaluation) -> Iterator[dict[str, Any]]:
    """Each kind at each layer; differences to the autoencoder, the first, are paired by game."""
    paired = {
        (one.second, one.layer): one.estimate for one in found.differences if one.quantity == "recovered"
    }
    for layer in LAYERS:
        for one in found.sets:
            kind, _, k = one.name.partition(", k ")
            row = {"layer": layer, "k": int(k), "kind": kind}
            row |= _point(next(figures for figures in one.layers if figures.layer == layer))
            if (one.name, layer) in paired:
                difference = paired[one.name, layer]
                row |= {"difference": difference.value, "difference_se": difference.se}
            yield row


def _point(one: LayerFigures) -> dict[str, Any]:
    return {
        "l0": None if one.l0 is None else one.l0.value,
        "fvu": one.fvu.value,
        "recovered": one.recovered.value,
        "added": one.added.value,
        "dead": one.dead,
    }


if __name__ == "__main__":
    main()
