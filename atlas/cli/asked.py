"""What most commands share: which atlas, table or JSON, and the printing of an answer."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from atlas.answers import Answer, Table
from atlas.errors import AtlasError

if TYPE_CHECKING:
    from atlas.api import Atlas

__all__ = ["atlas_option", "find_atlas", "json_option", "opened", "print_answer", "print_json"]

F = TypeVar("F", bound=Callable[..., Any])


def atlas_option(command: F) -> F:
    """--atlas PATH."""
    text = "The atlas. Without it $ATLAS, or the only *.atlas in this folder."
    return click.option("--atlas", "where", metavar="PATH", help=text)(command)


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="The same content as JSON.")(command)


def find_atlas(where: str | None) -> str:
    """The atlas that a command means. Raises AtlasError where that is none, or one of several."""
    chosen = where or os.environ.get("ATLAS")
    if chosen:
        return chosen
    here = sorted(path for path in Path.cwd().glob("*.atlas") if path.is_dir())
    if len(here) == 1:
        return str(here[0].name)
    if here:
        raise AtlasError(
            f"{len(here)} atlases here: {', '.join(p.name for p in here)}; say which with --atlas PATH"
        )
    raise AtlasError(
        "no *.atlas in this folder; say where one is with --atlas PATH or $ATLAS, or make one: atlas build"
    )


def opened(where: str | None) -> Atlas:
    """The atlas, open for reading."""
    from atlas.api import open

    return open(find_atlas(where))


def print_answer(answer: Answer | Table, as_json: bool) -> None:
    """To stdout: for people, without colours where it is no terminal; or as JSON."""
    if as_json:
        content = answer.to_json() if isinstance(answer, Answer) else answer.records()
        print_json(content)
        return
    from atlas.rendering import as_text, draw

    if not sys.stdout.isatty():
        print(as_text(answer))
        return
    from rich.console import Console

    draw(Console(file=sys.stdout, highlight=False), answer)


def print_json(content: Any) -> None:
    """One JSON value. Characters beyond ASCII stay themselves where the output can hold them."""
    plain = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(_finite(content), ensure_ascii=not plain, indent=2, allow_nan=False, default=str))


def _finite(content: Any) -> Any:
    """JSON has no infinity: a query's 1.0 / 0 becomes the text "inf"."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content
