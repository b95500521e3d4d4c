"""`atlas dictionary inspect`: what a dictionary's files are, and whether they fit a model."""

from __future__ import annotations

import re
from contextlib import nullcontext

import click

from atlas.cli.asked import json_option, print_answer
from atlas.cli.progress import counting

__all__ = ["dictionary"]


@click.group()
def dictionary() -> None:
    """Look at a dictionary's files before building on them."""


def _layers(context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", value):
        raise click.BadParameter(f"{value!r}: expected numbers of layers, such as 5,8,12")
    return [int(part) for part in value.split(",")]


@dictionary.command()
@click.argument("path")
@click.option("--format", metavar="NAME", help="The files' format, where it is not to be recognised.")
@click.option("--reads", metavar="HOOK", help="Where it reads, if its files do not say: mlp.in, resid_post …")
@click.option("--writes", metavar="HOOK", help="Where it writes, if its files do not say: mlp.hook_out …")
@click.option(
    "--layer", type=click.IntRange(min=0), help="The layer of a single dictionary, if it does not say."
)
@click.option("--layers", metavar="N,N,…", callback=_layers, help="Of a set, these alone.")
@click.option("--model", metavar="PATH", help="Check that it fits this model.")
@click.option(
    "--weights/--headers",
    default=None,
    help="Read the weights, or headers alone. Default: weights up to 2 GB.",
)
@click.option("--text", metavar="PATH", help="Measure on this text how well it describes --model.")
@click.option("--contexts", type=click.IntRange(min=1), help="Of 128 tokens, to measure on. Default: 32.")
@json_option
def inspect(
    path: str,
    format: str | None,
    reads: str | None,
    writes: str | None,
    layer: int | None,
    layers: list[int] | None,
    model: str | None,
    weights: bool | None,
    text: str | None,
    contexts: int | None,
    as_json: bool,
) -> None:
    """What the dictionaries at PATH are: format, sites, sizes, activation, types, norms.

    PATH is the folder or file of one dictionary, a folder above one for each layer, or a hub name. Nothing in
    it is executed.
    """
    from atlas.inspection import CONTEXTS
    from atlas.inspection import inspect as inspected
    from ingest.dictionaries import Declared

    said = Declared(reads=reads, writes=writes, layer=layer)
    with counting("measuring") if text else nullcontext() as progress:
        answer = inspected(
            path,
            format=format,
            layers="all" if layers is None else layers,
            declared=said,
            model=model,
            weights=weights,
            text=text,
            contexts=contexts or CONTEXTS,
            progress=progress,
        )
    print_answer(answer, as_json)
