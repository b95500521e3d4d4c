"""Commands that keep an atlas: its runs, taking something out, building the database anew."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from atlas.answers import Answer
from atlas.cli.asked import atlas_option, find_atlas, json_option, print_answer
from atlas.errors import AtlasError

__all__ = ["load", "remove", "runs"]


@click.command()
@atlas_option
@json_option
def runs(where: str | None, as_json: bool) -> None:
    """The runs that made an atlas."""
    from atlas.inventory import runs as table_of_runs

    print_answer(table_of_runs(find_atlas(where)), as_json)


@click.command()
@click.option("--run", metavar="HASH", help="A run, by its hash or the beginning of it.")
@click.option("--model", metavar="NAME", help="A model, with all that belongs to it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@atlas_option
@json_option
def remove(run: str | None, model: str | None, yes: bool, where: str | None, as_json: bool) -> None:
    """Take a run, or a model, out of an atlas. What another run used stays; the artifacts stay too."""
    from atlas.load import remove_model, remove_run

    if (run is None) == (model is None):
        raise AtlasError("expected --run HASH or --model NAME" + ("" if run is None else ", not both"))
    path = find_atlas(where)
    whole = _run_of(path, run or "") if model is None else ""
    what = f"model {model}" if model is not None else f"run {whole[:12]}"
    if not yes:
        if not sys.stdin.isatty():
            raise AtlasError(f"this would remove {what} from {path}; say --yes")
        click.confirm(f"Remove {what} from {path}?", abort=True, err=True)
    from atlas.cli.progress import counting

    with counting(f"removing {what}") as progress:
        if model is not None:
            report = remove_model(path, model, progress)
        else:
            report = remove_run(path, whole, progress)
    facts = {"atlas": path, "removed": what}
    print_answer(Answer(f"removed {what}", facts, notes=report.notes), as_json)


@click.command()
@atlas_option
@json_option
def load(where: str | None, as_json: bool) -> None:
    """Rebuild the database and the adjacency arrays from the artifacts."""
    from atlas.cli.progress import counting
    from atlas.load import load_all

    path = find_atlas(where)
    with counting("loading") as progress:
        report = load_all(path, progress)
    from atlas.api import open

    with open(path) as atlas:
        info = atlas.info()
    print_answer(replace(info, notes=(*info.notes, *report.notes)), as_json)


def _run_of(path: str, beginning: str) -> str:
    from atlas.inventory import runs as table_of_runs

    known = table_of_runs(path).column("run")
    fits = [run for run in known if run.startswith(beginning)]
    if len(fits) == 1 and beginning:
        return fits[0]
    if fits:
        raise AtlasError(f"run {beginning}: {len(fits)} runs begin so: {', '.join(run[:16] for run in fits)}")
    raise AtlasError(
        f"run {beginning}: no such run; there are {', '.join(run[:16] for run in known) or 'none'}"
    )
