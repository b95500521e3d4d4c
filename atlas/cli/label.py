"""`atlas label`: explanations of features, imported with their source, listed, taken out again."""

from __future__ import annotations

from pathlib import Path

import click

from atlas.cli.asked import atlas_option, find_atlas, json_option, opened, print_answer
from atlas.errors import AtlasError

__all__ = ["label"]


@click.group()
def label() -> None:
    """Names for features, from people or programs, with where they come from."""


@label.command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--source", required=True, metavar="NAME", help="Who made them: shown with every label.")
@click.option("--set", "set_name", metavar="SET", help="The dictionary set they are of: name or alias.")
@click.option("--score", metavar="COLUMN", help="The score by which a feature's labels are ranked.")
@click.option("--add", is_flag=True, help="Keep the earlier labels of this source beside these.")
@click.option("--replace", is_flag=True, help="Put these in the place of the earlier ones of this source.")
@click.option("--skip-unknown", is_flag=True, help="Leave out what names no feature of this atlas.")
@atlas_option
@json_option
def import_(
    files: tuple[Path, ...],
    source: str,
    set_name: str | None,
    score: str | None,
    add: bool,
    replace: bool,
    skip_unknown: bool,
    where: str | None,
    as_json: bool,
) -> None:
    """Read labels from FILEs: CSV, TSV, JSON or JSON Lines, also .gz, or a folder of such files.

    A row has a feature's key (whole or short) and a text, or a layer, an index and a text. Neuronpedia's
    exports of explanations are read as they are; --set says which of this atlas's sets they explain.

    \b
    atlas label import names.csv --source mine
    atlas label import explanations/ --source neuronpedia --set tc
    """
    from atlas.cli.progress import counting
    from atlas.labels import import_labels

    with counting("importing labels") as progress:
        done = import_labels(
            find_atlas(where),
            files,
            source,
            set=set_name,
            score=score,
            add=add,
            replace=replace,
            skip_unknown=skip_unknown,
            progress=progress,
        )
    print_answer(done.answer(), as_json)


@label.command("list")
@click.argument("key", required=False)
@atlas_option
@json_option
def list_(key: str | None, where: str | None, as_json: bool) -> None:
    """The imports of labels; with a feature's KEY, every label of that feature."""
    with opened(where) as atlas:
        print_answer(atlas.labels(key), as_json)


@label.command()
@click.option("--source", required=True, metavar="NAME", help="Whose labels.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@atlas_option
@json_option
def remove(source: str, yes: bool, where: str | None, as_json: bool) -> None:
    """Take all labels of a source out of the atlas. Their artifacts stay."""
    import sys

    from atlas.cli.progress import counting
    from atlas.labels import remove_labels

    path = find_atlas(where)
    if not yes:
        if not sys.stdin.isatty():
            raise AtlasError(f"this would remove the labels of {source} from {path}; say --yes")
        click.confirm(f"Remove the labels of {source} from {path}?", abort=True, err=True)
    with counting(f"removing the labels of {source}") as progress:
        answer = remove_labels(path, source, progress)
    print_answer(answer, as_json)
