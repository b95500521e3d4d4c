"""`atlas demo`: builds the demo's atlas, the first time, and walks through it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from atlas.cli.asked import opened, print_answer

__all__ = ["demo"]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo.atlas"), show_default=True,
              help="Where the atlas is, or will be.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Steps at once; default, the number of cores.")
def demo(out: Path, workers: int | None) -> None:
    """Build the demo's atlas of a real language model and look around in it.

    SmolLM2-135M-Instruct with its own 46,080 MLP neurons: every neuron-to-neuron weight above a threshold,
    direct and through each of 270 heads. Minutes the first time; after that it is only looked at.
    """
    if not (out / "CURRENT").exists():
        _build(out, workers)
    from atlas.demonstration import picture_of, tour

    with opened(str(out)) as atlas:
        for part in tour(atlas):
            if isinstance(part, str):
                click.echo(part)
            else:
                print_answer(part, as_json=False)
            click.echo()
        picture = out.with_suffix(".svg")
        picture_of(atlas).save(picture)
    click.echo(f"Its picture: {picture}")
    click.echo()
    click.echo(_next(out))


def _build(out: Path, workers: int | None) -> None:
    from atlas.building import Watch, build, check_place
    from atlas.cli.progress import counting, showing
    from atlas.demonstration import SPEC
    from ingest.spec import parse_spec

    spec = parse_spec(SPEC, source="the demo's spec")
    check_place(out)
    click.echo("Building an atlas of SmolLM2-135M. Ctrl-C is safe: the same command goes on.", err=True)
    built = build(spec, out, workers=workers, watch=Watch(counting=counting, plan=showing))
    print_answer(built.answer(), as_json=False)
    click.echo()


def _next(out: Path) -> str:
    beside = Path(sys.executable).with_name("atlas")
    found = shutil.which("atlas")
    known = found is not None and beside.exists() and Path(found).samefile(beside)
    where = "" if known or not beside.exists() else f" (atlas is {os.path.relpath(beside)})"
    return f"""What to try next, on {out}{where}:
  atlas search ' colour'                         which neurons a token feeds, and which promote it
  atlas feature 'n24[381]'                       any neuron by layer and number
  atlas head 24.7                                what an attention head carries
  atlas paths ' colour' ' British' -k 5          the strongest paths between tokens
  atlas query 'MATCH (a:Feature)-[r:DIRECT]->(b:Feature) WHERE r.z > 15 RETURN a.key, b.key, r.z LIMIT 5'
  atlas picture --map --out map.svg              the whole atlas, by layers and heads
  atlas info --dropped                           what the selection left out, by layers and heads"""
