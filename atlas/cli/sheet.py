"""`atlas sheet`: the blind comparison of two dictionaries by a person."""

from __future__ import annotations

from pathlib import Path

import click

from atlas.cli.asked import json_option, print_answer
from atlas.cli.evaluate import layers_of

__all__ = ["sheet"]


@click.group()
def sheet() -> None:
    """Judge features of two dictionaries without knowing whose they are, then count."""


@sheet.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", required=True, metavar="PLACE", help="A model: directory, GGUF file, or hub name.")
@click.option("--dictionaries", multiple=True, required=True, metavar="PLACE", help="Twice: the two sets.")
@click.option("--text", required=True, metavar="PLACE", help="A corpus, as for atlas evaluate.")
@click.option("--tokenizer", metavar="PLACE", help="The tokenizer, if it is not the model's own.")
@click.option("--features", type=click.IntRange(min=1), default=50, show_default=True, help="Of each set.")
@click.option("--layers", metavar="LIST", help="As 8 or 5,8,12. Default: those that both have.")
@click.option("--contexts", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--length", type=click.IntRange(min=2), help="Tokens of a context. Default: 128.")
@click.option("--pad", type=click.IntRange(min=0), help="The id of padding in a matrix of token ids.")
@click.option("--part", type=click.Choice(["held-out", "train", "all"]), default="held-out")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--force", is_flag=True, help="Write over a sheet that is there, verdicts and all.")
@json_option
def make(
    folder: Path,
    model: str,
    dictionaries: tuple[str, ...],
    text: str,
    tokenizer: str | None,
    features: int,
    layers: str | None,
    contexts: int,
    length: int | None,
    pad: int | None,
    part: str,
    seed: int,
    force: bool,
    as_json: bool,
) -> None:
    """Write FOLDER/sheet.html to look at, sheet.csv to fill in, and key.json to leave closed.

    \b
    atlas sheet make blind --model smollm2.gguf --dictionaries tc --dictionaries sae --text corpus.jsonl
    """
    from atlas.cli.build import spec_of
    from atlas.cli.progress import counting
    from atlas.evaluating import contexts_of, held_out_share, opened_sets
    from atlas.sheet import make_sheet

    wanted = spec_of(None, model, dictionaries, tokenizer, None, None)
    with counting("looking for contexts") as progress:
        opened, sets = opened_sets(wanted, layers_of(layers))
        share = held_out_share(sets, part, None)
        chosen = contexts_of(opened, text, contexts, length, part, share, seed, pad)
        answer = make_sheet(
            opened, sets, chosen, folder, features=features, seed=seed, overwrite=force, progress=progress
        )
    print_answer(answer, as_json)


@sheet.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--csv", "filled", type=click.Path(path_type=Path), help="The filled sheet, if not FOLDER's.")
@click.option("--key", type=click.Path(path_type=Path), help="The key, if it is not FOLDER's.")
@json_option
def score(folder: Path, filled: Path | None, key: Path | None, as_json: bool) -> None:
    """Count FOLDER's verdicts by dictionary, with an exact test of their difference."""
    from atlas.sheet import score_sheet

    print_answer(score_sheet(folder, filled, key), as_json)
