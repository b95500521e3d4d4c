"""`atlas dictionary inspect`: what a dictionary's files are, and whether they fit a model."""

from __future__ import annotations

import click

from atlas.cli.asked import json_option, print_answer

__all__ = ["dictionary"]


@click.group()
def dictionary() -> None:
    """Look at a dictionary's files before building on them."""


@dictionary.command()
@click.argument("path")
@click.option("--format", metavar="NAME", help="The files' format, where it is not to be recognised.")
@click.option("--reads", metavar="HOOK", help="Where it reads, if its files do not say: mlp.in, resid_post …")
@click.option("--writes", metavar="HOOK", help="Where it writes, if its files do not say: mlp.hook_out …")
@click.option(
    "--layer", type=click.IntRange(min=0), help="The layer of a single dictionary, if it does not say."
)
@click.option("--model", metavar="PATH", help="Check that it fits this model.")
@click.option(
    "--weights/--headers",
    default=None,
    help="Read the weights, or headers alone. Default: weights up to 2 GB.",
)
@json_option
def inspect(
    path: str,
    format: str | None,
    reads: str | None,
    writes: str | None,
    layer: int | None,
    model: str | None,
    weights: bool | None,
    as_json: bool,
) -> None:
    """What the dictionaries at PATH are: format, sites, sizes, activation, types, norms.

    PATH is the folder or file of one dictionary, a folder above one for each layer, or a hub name. Nothing in
    it is executed.
    """
    from atlas.inspection import inspect as inspected
    from ingest.dictionaries import Declared

    said = Declared(reads=reads, writes=writes, layer=layer)
    print_answer(inspected(path, format=format, declared=said, model=model, weights=weights), as_json)
