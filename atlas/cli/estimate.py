"""`atlas estimate`: what a build would take."""

from __future__ import annotations

from pathlib import Path

import click

from atlas.cli.asked import json_option, print_answer
from atlas.cli.build import spec_of, spec_options

__all__ = ["estimate"]


@click.command()
@spec_options
@click.option("--workers", type=click.IntRange(min=1), help="Threads; default, the number of cores.")
@json_option
def estimate(
    spec: Path | None,
    model: str | None,
    dictionaries: tuple[str, ...],
    tokenizer: str | None,
    keep: str | None,
    seed: int | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """What `atlas build` would take with the same arguments: features, pairs, edges, bytes, memory, time.

    From configuration and headers alone. Pairs are exact, edges by a rule that is stated, time by a matrix
    product measured now.
    """
    from atlas.estimate import estimate as estimated

    wanted = spec_of(spec, model, dictionaries, tokenizer, keep, seed)
    print_answer(estimated(wanted, workers=workers), as_json)
