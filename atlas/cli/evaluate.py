"""`atlas evaluate`: how well dictionaries describe a model, on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from atlas.cli.asked import json_option, print_answer, print_json

if TYPE_CHECKING:
    from ingest.dictionaries import Layers

__all__ = ["evaluate", "layers_of"]


@click.command()
@click.argument("spec", required=False, type=click.Path(path_type=Path))
@click.option("--model", metavar="PLACE", help="A model: directory, GGUF file, or hub name.")
@click.option("--dictionaries", multiple=True, metavar="PLACE",
              help="A set: directory, hub name, or the word neurons. Several are compared.")  # fmt: skip
@click.option("--tokenizer", metavar="PLACE", help="The tokenizer, if it is not the model's own.")
@click.option("--text", required=True, metavar="PLACE",
              help="A corpus: text, .jsonl(.gz), .parquet, a folder; or a matrix of token ids.")  # fmt: skip
@click.option("--field", metavar="NAME", help="Where a document's text stands. Default: text.")
@click.option("--contexts", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--length", type=click.IntRange(min=2), help="Tokens of a context. Default: 128.")
@click.option("--layers", metavar="LIST", help="As 5,8,12 or 0-11. Default: those that every set has.")
@click.option("--part", type=click.Choice(["held-out", "train", "all"]), default="held-out",
              show_default=True, help="Of the documents, by their hashes.")  # fmt: skip
@click.option("--share", type=click.FloatRange(0, 1, max_open=True),
              help="Of the documents held out. Default: as the sets were trained, or 0.1.")  # fmt: skip
@click.option("--pad", type=click.IntRange(min=0), help="The id of padding in a matrix of token ids.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sample.")
@click.option("--bf16", is_flag=True, help="The model's matrix products in bfloat16: faster, a little off.")
@click.option("--to", "out", type=click.Path(path_type=Path), help="Draw L0 against the figures: FILE.svg.")
@json_option
def evaluate(
    spec: Path | None,
    model: str | None,
    dictionaries: tuple[str, ...],
    tokenizer: str | None,
    text: str,
    field: str | None,
    contexts: int,
    length: int | None,
    layers: str | None,
    part: str,
    share: float | None,
    pad: int | None,
    seed: int,
    bf16: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure the dictionaries of SPEC, or --dictionaries on --model: L0, variance unexplained, cross-entropy
    with each layer and all of them in place, dead features.

    Several sets see the same contexts; the second and later ones are compared with the first, paired by
    context. Documents that a set was trained on are left out by hash.

    \b
    atlas evaluate --model smollm2.gguf --dictionaries transcoders --text corpus.jsonl
    atlas evaluate --model othello --dictionaries tc --dictionaries sae --text games.npy --to it.svg
    """
    from atlas.cli.build import spec_of
    from atlas.cli.progress import counting
    from atlas.evaluating import answer_of
    from atlas.evaluating import evaluate as measured

    wanted = spec_of(spec, model, dictionaries, tokenizer, None, None)
    with counting("evaluating") as progress:
        found = measured(
            wanted,
            text,
            contexts=contexts,
            length=length,
            layers=layers_of(layers),
            part=part,
            share=share,
            seed=seed,
            pad=pad,
            field=field,
            bf16=bf16,
            progress=progress,
        )
    if out is not None:
        from atlas.pareto import pareto

        pareto(found).save(out)
        click.echo(f"wrote {out}", err=True)
    if as_json:
        print_json(found.as_json())
    else:
        print_answer(answer_of(found), False)


def layers_of(text: str | None) -> Layers:
    """5,8,12 or 0-3,7 as numbers; "all" for nothing. Raises a usage error.

    >>> layers_of("0-2,7"), layers_of(None)
    ([0, 1, 2, 7], 'all')
    """
    if text is None or text == "all":
        return "all"
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise click.UsageError(f"--layers {text}: expected numbers, as 5,8,12 or 0-11")
        found.extend(range(int(low), int(high or low) + 1))
    return found
