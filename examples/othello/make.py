"""Makes everything that is shipped of one Othello-GPT: model, dictionaries, labels, figures, card.

    python -m examples.othello.make --seed 1

What is there already is kept: delete `transcoders` and `saes` to train them anew, `model.safetensors` for the
model. Figures, labels and card are written each time, measured on the float16 files. A model takes about two
hours on one thread, its dictionaries a quarter of an hour, the figures a few minutes. The shipped models were
trained in parts, each going on from the one before (`train_model --start`): training.json has the schedules.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from atlas.training import run_training
from examples.othello import train_model
from examples.othello.card import card
from examples.othello.game import SQUARE_OF, square_name
from examples.othello.games import write_games
from examples.othello.labels import BEYOND_CHANCE, CLEARLY, FRACTIONS, NAMED, write_labels
from examples.othello.measure import (
    CHOOSE_SEED,
    MODEL,
    REPORT_SEED,
    SETS,
    dictionary_rows,
    held_out,
    label_figures,
    legal_moves,
    measured,
    open_sets,
    shipped_labels,
)
from ingest.models import open_model
from ingest.training_spec import TrainingSpec, parse_training_spec
from workers.training.run import Progress

HERE = Path(__file__).parent
GAMES, GAMES_SEED = 18_000, 4_000_000  # that dictionaries are trained on; seed N: GAMES_SEED + N
HELD_OUT, IN_PLACE, LABEL_GAMES = 1000, 300, 500  # of legal moves; of dictionaries; of each sample of labels
PARTS = ("transcoders", "saes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--to", type=Path, help="default: examples/othello/models/seed-SEED")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    to = options.to or HERE / "models" / f"seed-{options.seed}"
    torch.set_num_threads(options.threads)
    if not (to / "model.safetensors").exists():
        train_model.train(train_model.arguments(["--seed", str(options.seed), "--to", str(to)]))
    write_beside(to)
    if not all((to / part).exists() for part in PARTS):
        train_dictionaries(to, options.seed, options.threads)
    measure(to, options.seed)


def write_beside(to: Path) -> None:
    """config.json, and a tokenizer whose words are the squares' names."""
    (to / "config.json").write_text(json.dumps(train_model.CONFIG, indent=2) + "\n", encoding="utf-8")
    vocabulary = {"pad": 0} | {square_name(int(SQUARE_OF[token])): token for token in range(1, 61)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "pad"},
    }
    (to / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1) + "\n", encoding="utf-8")


def train_dictionaries(to: Path, seed: int, threads: int) -> None:
    """The sets of dictionaries.yaml, of the model at `to`; a run that was stopped goes on."""
    work = to / "dictionaries.part"
    games = work / "games.npy"
    if not games.exists():
        write_games(games, GAMES, GAMES_SEED + seed)
    spec = training_spec(to, games, seed)
    started = time.process_time()
    trained = run_training(spec, work / "sets", threads=threads, watch=_Told())
    for name, (folder, _) in SETS.items():
        (to / folder).parent.mkdir(exist_ok=True)
        (work / "sets" / name).rename(to / folder)
        file = to / folder / "training.json"
        record = json.loads(file.read_text(encoding="utf-8"))
        record["games"] = {"seed": GAMES_SEED + seed, "count": GAMES}
        record["cpu_minutes_of_all"] = round((time.process_time() - started) / 60, 1)
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for note in trained.notes:
        print(note, file=sys.stderr)
    shutil.rmtree(work)


def training_spec(model: Path, games: Path, seed: int, **changes: Any) -> TrainingSpec:
    """dictionaries.yaml for another model and other games; `changes` of its keys."""
    file = HERE / "dictionaries.yaml"
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    data |= {"model": str(model.resolve()), "corpus": str(games.resolve()), "seed": seed} | changes
    return parse_training_spec(yaml.safe_dump(data), source=str(file))


def measure(to: Path, seed: int) -> None:
    """figures.json, labels/*.csv and README.md from the files at `to`."""
    model = open_model(to, name=MODEL)
    sets = open_sets(to, model)
    games = held_out(HELD_OUT)
    legal = legal_moves(model, games)
    found = measured(model, sets, games.part(0, IN_PLACE))
    labels = shipped_labels(model, sets, LABEL_GAMES, LABEL_GAMES)
    for one in sets:
        keys = {layer: one.key(layer) for layer in one.layers}
        write_labels(to / "labels" / f"{one.name}.csv", keys, labels[one.name])
    figures: dict[str, Any] = {
        "seed": seed,
        "model": {
            "hash": model.hash,
            "held_out_seed": train_model.HELD_OUT_SEED,
            "games": legal.games,
            "positions": legal.positions,
            "legal_top1": legal.top1.value,
            "legal_top1_se": legal.top1.se,
            "legal_mass": legal.mass.value,
            "legal_mass_se": legal.mass.se,
            "ce": found.ce.value,
            "ce_se": found.ce.se,
        },
        "in_place": {"games": found.contexts, "positions": found.tokens},
        "dictionaries": list(dictionary_rows(found)),
        "labels": {
            "choose": {"seed": CHOOSE_SEED, "games": LABEL_GAMES},
            "report": {"seed": REPORT_SEED, "games": LABEL_GAMES},
            "fractions": FRACTIONS,
            "clearly": CLEARLY,
            "named": NAMED,
            "beyond_chance": BEYOND_CHANCE,
            "sets": {
                name: {str(layer): label_figures(some) for layer, some in layers.items()}
                for name, layers in labels.items()
            },
        },
    }
    text = json.dumps(figures, indent=1, default=float)
    (to / "figures.json").write_text(text + "\n", encoding="utf-8")
    (to / "README.md").write_text(card(to), encoding="utf-8")


class _Told:
    """A line a minute."""

    def __init__(self) -> None:
        self._last = time.monotonic() - 50

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._last > 60:
            self._last = time.monotonic()
            some = ", ".join(
                f"{one.job.name} {one.fvu:.3f}/{one.dead(100_000)}" for one in progress.trainees if one.steps
            )
            print(
                f"{progress.doing}, {progress.rows:,} of {progress.total:,} rows,"
                f" {progress.rows_per_second:,.0f} rows/s; FVU/quiet: {some}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
