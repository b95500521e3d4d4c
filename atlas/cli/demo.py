"""`atlas demo`: builds the demo's atlas, the first time, and walks through it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atlas.cli.asked import opened, print_answer

if TYPE_CHECKING:
    from atlas.answers import Answer, Table
    from atlas.svg import Picture

__all__ = ["demo"]


@click.command()
@click.option("--model", type=click.Choice(["smollm2", "othello"]), default="smollm2", show_default=True,
              help="A language model's neurons, or a game's model with trained dictionaries.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path),
              help="Where the atlas is, or will be; default, demo.atlas or othello.atlas.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), help="Steps at once; default, the number of cores.")
def demo(model: str, out: Path | None, workers: int | None) -> None:
    """Build the demo's atlas and look around in it.

    smollm2: SmolLM2-135M-Instruct, a language model, with its own 46,080 MLP neurons: every neuron-to-neuron
    weight above a threshold, direct and through each of 270 heads. Minutes the first time; after that it is
    only looked at.

    othello: Othello-GPT with 13,312 features of its embedding, attention and MLPs, named by what the rules of
    the game confirm. Seconds; its files come with the repository.
    """
    if model == "othello":
        _othello(out or Path("othello.atlas"), workers)
        return
    from atlas.demonstration import SPEC, picture_of, tour

    out = out or Path("demo.atlas")
    if not (out / "CURRENT").exists():
        _build(SPEC, out, workers, "SmolLM2-135M")
    with opened(str(out)) as atlas:
        _show(tour(atlas), lambda: picture_of(atlas), out)
    click.echo(_next(out))


def _othello(out: Path, workers: int | None) -> None:
    from atlas.labels import import_labels, imports
    from atlas.othello_demonstration import (
        LABEL_SOURCE,
        label_files,
        othello_files,
        picture_of,
        spec_text,
        tour,
    )

    folder = othello_files()
    if not (out / "CURRENT").exists():
        _build(spec_text(folder), out, workers, "Othello-GPT")
    with opened(str(out)) as atlas:
        there = any(row[0] == LABEL_SOURCE for row in imports(atlas).rows)
    if not there:
        print_answer(
            import_labels(out, label_files(folder), LABEL_SOURCE, score="f1").answer(), as_json=False
        )
        click.echo()
    with opened(str(out)) as atlas:
        _show(tour(atlas, folder), lambda: picture_of(atlas, folder), out)
    click.echo(_next_othello(out))


def _build(text: str, out: Path, workers: int | None, name: str) -> None:
    from atlas.building import Watch, build, check_place
    from atlas.cli.progress import counting, showing
    from ingest.spec import parse_spec

    spec = parse_spec(text, source="the demo's spec")
    check_place(out)
    click.echo(f"Building an atlas of {name}. Ctrl-C is safe: the same command goes on.", err=True)
    built = build(spec, out, workers=workers, watch=Watch(counting=counting, plan=showing))
    print_answer(built.answer(), as_json=False)
    click.echo()


def _show(parts: Iterable[Answer | Table | str], picture: Callable[[], Picture], out: Path) -> None:
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        else:
            print_answer(part, as_json=False)
        click.echo()
    place = out.with_suffix(".svg")
    picture().save(place)
    click.echo(f"Its picture: {place}")
    click.echo()


def _where() -> str:
    """How `atlas` is called here, where that is not plain."""
    beside = Path(sys.executable).with_name("atlas")
    found = shutil.which("atlas")
    known = found is not None and beside.exists() and Path(found).samefile(beside)
    return "" if known or not beside.exists() else f" (atlas is {os.path.relpath(beside)})"


def _next(out: Path) -> str:
    return f"""What to try next, on {out}{_where()}:
  atlas search ' colour'                         which neurons a token feeds, and which promote it
  atlas feature 'n24[381]'                       any neuron by layer and number
  atlas head 24.7                                what an attention head carries
  atlas paths ' colour' ' British' -k 5          the strongest paths between tokens
  atlas query 'MATCH (a:Feature)-[r:DIRECT]->(b:Feature) WHERE r.z > 15 RETURN a.key, b.key, r.z LIMIT 5'
  atlas picture --map --out map.svg              the whole atlas, by layers and heads
  atlas info --dropped                           what the selection left out, by layers and heads"""


def _next_othello(out: Path) -> str:
    models = "examples/othello/models"
    return f"""What to try next, with --atlas {out}{_where()}:
  atlas search d3                                which features read a move, and which write to its logit
  atlas feature 't3[17]'                         any feature by set, layer and number: e, a or t
  atlas head 3.4                                 what an attention head carries
  atlas query 'MATCH (f:Feature) WHERE f.label STARTS WITH "legal f5" RETURN f.key, f.label'
  atlas evaluate --help                          measures dictionaries: {models}/seed-1/README.md shows how"""
