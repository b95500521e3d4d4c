"""`atlas build`: from a spec, or from a model and dictionaries named on the line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atlas.cli.asked import json_option, print_answer

if TYPE_CHECKING:
    from ingest.rules import Rule
    from ingest.spec import Spec

__all__ = ["build", "spec_of", "spec_options"]


def spec_options(command: Any) -> Any:
    """What `build` and `estimate` are given: a spec, or its parts."""
    dictionaries = "Its dictionaries: directory, hub name, or the word neurons. May be given twice."
    options = (
        click.argument("spec", required=False, type=click.Path(path_type=Path)),
        click.option("--model", metavar="PLACE", help="A model: directory, GGUF file, or hub name."),
        click.option("--dictionaries", multiple=True, metavar="PLACE", help=dictionaries),
        click.option("--tokenizer", metavar="PLACE", help="Where token texts come from, if not the model."),
        click.option("--keep", metavar="RULE", help="Which edges: z:6, absolute:1.5, top:16, or YAML."),
        click.option("--seed", type=click.IntRange(min=0), help="Of samples and of the floor's rotation."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@spec_options
@click.option("--name", help="The atlas's name: NAME.atlas in this folder.")
@click.option("--out", "--atlas", "out", type=click.Path(path_type=Path), help="The atlas's place.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:0.")
@click.option("--workers", type=click.IntRange(min=1), help="Steps at once; default, the number of cores.")
@click.option("--add", is_flag=True, help="Keep earlier runs on the same models beside this one.")
@json_option
def build(
    spec: Path | None,
    model: str | None,
    dictionaries: tuple[str, ...],
    tokenizer: str | None,
    keep: str | None,
    seed: int | None,
    name: str | None,
    out: Path | None,
    device: str,
    workers: int | None,
    add: bool,
    as_json: bool,
) -> None:
    """Compute the atlas of SPEC (YAML), or of --model and --dictionaries.

    The atlas is SPEC's name.atlas in this folder unless --out, --name or $ATLAS says otherwise. A build that
    was stopped goes on where it was by the same command; one that is complete changes nothing.

    \b
    atlas build smol.yaml
    atlas build --model models/smol --dictionaries neurons --keep z:6
    """
    from atlas.building import Watch, check_place
    from atlas.building import build as build_atlas
    from atlas.cli.progress import counting, showing

    wanted = spec_of(spec, model, dictionaries, tokenizer, keep, seed)
    place = _place(spec, wanted, name, out)
    check_place(place)
    built = build_atlas(
        wanted, place, device=device, workers=workers, add=add, watch=Watch(counting=counting, plan=showing)
    )
    print_answer(built.answer(), as_json)


def spec_of(
    spec: Path | None,
    model: str | None,
    dictionaries: tuple[str, ...],
    tokenizer: str | None,
    keep: str | None,
    seed: int | None,
) -> Spec:
    """The checked spec that the options mean. Raises InputError."""
    from dataclasses import replace

    from ingest.errors import InputError
    from ingest.rules import DEFAULT_RULE
    from ingest.spec import load_spec, spec_for

    if spec is not None:
        for given, option in (
            (model, "--model"),
            (dictionaries, "--dictionaries"),
            (tokenizer, "--tokenizer"),
            (keep, "--keep"),
        ):
            if given:
                raise InputError(
                    f"{option}: is said in the spec; expected SPEC, or --model and --dictionaries"
                )
        found = load_spec(spec)
    elif model is None:
        raise InputError("expected SPEC, or --model and --dictionaries")
    else:
        rule = DEFAULT_RULE if keep is None else rule_of(keep)
        found = spec_for(model, dictionaries or ("neurons",), tokenizer=tokenizer, keep=rule)
    return found if seed is None else replace(found, seed=seed)


def rule_of(text: str) -> Rule:
    """A rule from the command line: `z:6` for short, else the YAML of the spec's `keep`. Raises InputError.

    >>> rule_of("z:6"), rule_of("everything")
    (Z(z=6.0), Everything())
    >>> rule_of("any: [{z: 6}, {top: 16, per: target}]")
    Any_(rules=(Z(z=6.0), Top(k=16, per='target')))
    """
    import re

    import yaml

    from ingest.errors import InputError
    from ingest.rules import RuleMistakes, rule_from_data

    data: Any
    if match := re.fullmatch(r"\s*(z|absolute|top)\s*[:=]\s*([-+0-9.eE]+)\s*", text):
        try:
            data = {match[1]: int(match[2]) if match[1] == "top" else float(match[2])}
        except ValueError:
            data = {match[1]: match[2]}
    else:
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"--keep {text}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return rule_from_data(data)
    except RuleMistakes as error:
        raise InputError(f"--keep: {error}") from None


def _place(spec_file: Path | None, spec: Spec, name: str | None, out: Path | None) -> Path:
    from ingest.errors import InputError

    if out is not None and name is not None:
        raise InputError("--name and --out: expected one of them")
    if out is not None:
        return out
    if name is None and os.environ.get("ATLAS"):
        return Path(os.environ["ATLAS"])
    stem = name or (spec_file.stem if spec_file is not None else next(iter(spec.models)))
    if "/" in stem or not stem:
        raise InputError(f"--name {stem!r}: expected a name; a path is given by --out")
    return Path(stem if stem.endswith(".atlas") else f"{stem}.atlas")
