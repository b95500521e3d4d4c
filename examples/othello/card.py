"""The model card of one Othello-GPT: README.md from figures.json, training.json and pareto.json beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.othello.predicates import KINDS

__all__ = ["card"]

SITES = {
    "transcoders": "transcoders of the MLPs",
    "mlp_out": "autoencoders of the MLPs' outputs",
    "attn_out": "autoencoders of attention's outputs",
    "embed": "autoencoder of the embedding (square and position)",
}


def card(folder: Path) -> str:
    """The card of a model's folder."""
    figures = _read(folder / "figures.json")
    trained = _read(folder / "training.json")
    return "\n".join([*_model(figures, trained), *_dictionaries(folder, figures), *_pareto(folder),
                      *_labels(figures), *_files()]) + "\n"  # fmt: skip


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _model(figures: dict[str, Any], trained: dict[str, Any]) -> Iterator[str]:
    model = figures["model"]
    yield f"# Othello-GPT, seed {figures['seed']}, with dictionaries"
    yield ""
    yield (
        "A GPT-2 of 6 layers, 8 heads and width 128 (GELU, learned positions, 61 tokens: 60 squares and a"
        " pad) that predicts the next move of uniformly random legal Othello games. Trained by"
        f" `examples/othello/train_model.py` on {trained['games']:,} games in {trained['steps']:,} steps with"
        f" Muon, towards the uniform distribution over the legal moves{_besides(trained)}. All weights are"
        " float16; every figure below is measured on the files by `examples/othello/make.py`, which writes"
        " this card, and `tests/examples` measures a sample again."
    )
    yield ""
    yield (
        f"On {model['games']:,} held-out games ({model['positions']:,} positions from which the game goes on,"
        f" seed {model['held_out_seed']}):"
    )
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| likeliest move is legal | {_pm(model['legal_top1'], model['legal_top1_se'])} |"
    yield f"| probability on legal moves | {_pm(model['legal_mass'], model['legal_mass_se'])} |"
    yield f"| cross-entropy of the moves played | {_pm(model['ce'], model['ce_se'])} nats |"
    yield ""
    yield "±: standard error over games."


def _besides(trained: dict[str, Any]) -> str:
    """What some part of the training asked for beside that distribution."""
    parts = [part for part in trained.get("parts", ()) if "--legal" in part["schedule"]]
    steps = sum(part["steps"] for part in parts)
    return f" (the last {steps:,} steps: and towards legal moves as such, `--legal`)" if parts else ""


def _dictionaries(folder: Path, figures: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Dictionaries"
    yield ""
    yield (
        "Each takes the place of what it describes, everything above it live, on the first"
        f" {figures['in_place']['games']:,} of these games ({figures['in_place']['positions']:,} positions)."
        " FVU: share of the variance left unexplained. Added: nats to the model's cross-entropy. Recovered:"
        " (CE zero - CE)/(CE zero - the model's); from mean: the same with the mean in place of zero, the"
        " stricter measure. Dead: features that fired on none of these positions. Not scored: the pad."
    )
    for name, about in SITES.items():
        rows = [row for row in figures["dictionaries"] if row["set"] == name]
        record = _read(folder / ("" if name == "transcoders" else "saes") / name / "training.json")
        gate, k = record["set"]["gate"]
        yield ""
        yield f"### {about[0].upper()}{about[1:]}"
        yield ""
        yield (
            f"{rows[0]['latents']:,} features each, {gate} {k:g}"
            f"{', a linear path beside them' if record['set']['skip'] else ''};"
            f" {record['rows_met']:,} rows met of {record['rows_harvested']:,} harvested."
        )
        yield ""
        yield "| layer | L0 | FVU | added CE | recovered | from mean | CE zero | CE mean | dead |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for row in rows:
            together = row["layer"] is None
            fvu = "" if together else _pm(row["fvu"], row["fvu_se"])
            dead = "" if together else f"{row['dead']} ({row['dead'] / row['latents']:.1%})"
            yield (
                f"| {'all at once' if together else row['layer']} | {row['l0']:.1f} | {fvu}"
                f" | {_pm(row['added'], row['added_se'])} | {_pm(row['recovered'], row['recovered_se'])}"
                f" | {row['recovered_from_mean']:.4f} | {row['ce_zero']:.3f} | {row['ce_mean']:.3f}"
                f" | {dead} |"
            )


def _pareto(folder: Path) -> Iterator[str]:
    if not (folder / "pareto.json").exists():
        return
    found = _read(folder / "pareto.json")
    rows = found["rows"]
    yield ""
    yield "## Transcoders against autoencoders of the same MLP"
    yield ""
    yield (
        f"Trained alike by `examples/othello/pareto.py` ({found['rows_met']:,} rows met each, 1,024 features,"
        f" TopK), measured on {found['games']:,} held-out games. Difference: of the cross-entropy recovered,"
        " to the autoencoder's, paired by game."
    )
    yield ""
    yield "![L0 against FVU and cross-entropy recovered](pareto.svg)"
    yield ""
    yield "| layer | L0 | | FVU | recovered | difference | dead |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        difference = _pm(row.get("difference"), row.get("difference_se"), signed=True)
        yield (
            f"| {row['layer']} | {row['l0']:.1f} | {row['kind']} | {row['fvu']:.4f} | {row['recovered']:.4f}"
            f" | {difference} | {row['dead']} |"
        )
    for kind in ("transcoder", "skip-transcoder"):
        yield ""
        yield _verdict(kind, rows)


def _verdict(kind: str, rows: Sequence[dict[str, Any]]) -> str:
    own = [row for row in rows if row["kind"] == kind]
    saes = {(row["layer"], row["k"]): row for row in rows if row["kind"] == "autoencoder"}
    ahead = [row for row in own if row["difference"] >= 0]
    below = [row for row in own if row["fvu"] <= saes[row["layer"], row["k"]]["fvu"]]
    behind = [row for row in own if row["difference"] < -2 * row["difference_se"]]
    where = ", ".join(f"layer {row['layer']} at k {row['k']}" for row in behind) or "nowhere"
    return (
        f"A {kind} stands at or above the autoencoder by cross-entropy recovered in {len(ahead)} of"
        f" {len(own)} pairs, and below it by more than two standard errors: {where}. Its FVU is at or below"
        f" the autoencoder's in {len(below)} of {len(own)}."
    )


def _labels(figures: dict[str, Any]) -> Iterator[str]:
    labels = figures["labels"]
    yield ""
    yield "## What the features tell, by the rules of the game"
    yield ""
    yield (
        "The label of a feature is the one of 368 predicates (the move made, discs turned by it, mine, theirs"
        " and empty squares, legal moves, as the player to move next sees them) with the best F1, where a"
        " feature says yes when it is active, or above a share of its maximum if that is better by"
        f" {labels['clearly']:g} or more. Chosen on {labels['choose']['games']:,} games, measured on"
        f" {labels['report']['games']:,} others. Chance: F1 of a detector that says yes as often, at random."
        f" Named: F1 at least {labels['named']:g} and {labels['beyond_chance']:g} times chance's; the others"
        " get no name in an atlas."
    )
    yield ""
    yield "| set | layer | live | named | F1 quartiles | ≥ 0.5 | ≥ 0.7 | ≥ 0.9 | by chance | thresholds |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, layers in labels["sets"].items():
        for layer, one in layers.items():
            quartiles = ", ".join(f"{value:.2f}" for value in one["quartiles"])
            above = " | ".join(str(one["at_least"][level]) for level in ("0.5", "0.7", "0.9"))
            yield (
                f"| {name} | {layer} | {one['live']} | {one['named']} | {quartiles} | {above}"
                f" | {one['chance_median']:.2f} | {one['with_threshold']} |"
            )
    yield ""
    yield "Features by the kind of their label, and the median F1 of these:"
    yield ""
    yield f"| set | layer | {' | '.join(KINDS)} |"
    yield "|---|---|" + "---|" * len(KINDS)
    for name, layers in labels["sets"].items():
        for layer, one in layers.items():
            cells = [
                f"{one['kinds'][kind]['features']} ({one['kinds'][kind]['median']:.2f})"
                if kind in one["kinds"]
                else "0"
                for kind in KINDS
            ]
            yield f"| {name} | {layer} | {' | '.join(cells)} |"


def _files() -> Iterator[str]:
    yield ""
    yield "## Files"
    yield ""
    yield (
        "`model.safetensors`, `config.json`, `tokenizer.json` (words are squares): the model, as Hugging Face"
        " reads it. `transcoders`: circuit-tracer's layout with `activation: topk`, one file a layer."
        " `saes`: SAELens' layout, a folder each. `labels`: for `atlas label import`. `figures.json`: what"
        " this card says, as data."
    )
    yield ""
    yield "The figures in place again, by the program (from the root of the repository, SEED for the seed):"
    yield ""
    yield "    python -m examples.othello.games --count 300 --seed 1000000 --length 60 --to games.npy"
    yield "    atlas evaluate --model examples/othello/models/seed-SEED --text games.npy --part all \\"
    yield "        --pad 0 --contexts 300 --length 60 \\"
    yield "        --dictionaries examples/othello/models/seed-SEED/transcoders"


def _pm(value: float | None, error: float | None, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return "" if value is None else f"{value:{sign}.4f} ± {error or 0.0:.4f}"
