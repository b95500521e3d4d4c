"""`atlas picture`: a feature's neighbourhood, or a heat map of the whole atlas, as an SVG file."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from atlas.cli.asked import atlas_option, opened
from atlas.cli.lookups import type_option

__all__ = ["picture"]

EDGES = click.IntRange(0, 200)


@click.command()
@click.argument("key", required=False)
@click.option("--map", "whole", is_flag=True, help="Edges by pairs of layers and by heads, instead of KEY.")
@click.option("--out", type=click.Path(path_type=Path), help="The file. Without it: to stdout.")
@click.option("--up", type=EDGES, default=10, show_default=True, help="Edges into it, at most.")
@click.option("--down", type=EDGES, default=10, show_default=True, help="Edges out of it, at most.")
@click.option("--by", type=click.Choice(["weight", "z"]), default="weight", show_default=True,
              help="The strongest by its size; the width of an edge shows it.")  # fmt: skip
@type_option
@atlas_option
def picture(
    key: str | None,
    whole: bool,
    out: Path | None,
    up: int,
    down: int,
    by: str,
    types: tuple[str, ...],
    where: str | None,
) -> None:
    """Draw the neighbourhood of the feature KEY: its tokens, its strongest neighbours by layer.

    \b
    atlas picture 'n24[381]' --out colour.svg
    atlas picture 'n24[381]' --up 20 --down 0 --type DIRECT --by z > near.svg
    atlas picture --map --out map.svg
    """
    if whole == (key is not None):
        raise click.UsageError("expected a feature's KEY or --map" + (", not both" if whole else ""))
    with opened(where) as atlas:
        if key is None:
            drawn = atlas.picture()
        else:
            drawn = atlas.feature(key).picture(up, down, by=by, types=types or ("DIRECT", "VIA_HEAD"))
    if out is None:
        sys.stdout.write(drawn.svg)
        return
    drawn.save(out)
    click.echo(f"wrote {out}: {drawn.title}, {drawn.edges:,} edges")
