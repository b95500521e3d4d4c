"""A path above several dictionaries: the folders that hold one each, and one of them for each layer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ingest.dictionaries.types import Read
from ingest.errors import InputError

__all__ = ["dictionary_folders", "one_per_layer"]

_DEPTH = 6
_MOST = 20_000  # folders looked at before the path is called too high


def dictionary_folders(where: Path, marker: str | Callable[[Path], bool]) -> list[Path]:
    """`where` itself and the folders at most six levels below it that hold the marker, 2 before 10.

    The marker is a file's name, or says of a folder whether it holds a dictionary. A path to the marked file
    itself means its folder. Hidden folders are left out, a folder reached twice through links is taken once.
    Raises InputError where there are too many folders to look through, or one cannot be read.
    """
    holds = (lambda folder: (folder / marker).is_file()) if isinstance(marker, str) else marker
    if not where.is_dir():
        return [where.parent] if isinstance(marker, str) and where.name == marker and where.is_file() else []
    return sorted((folder for folder in _folders(where) if holds(folder)), key=_natural)


def one_per_layer(found: Sequence[tuple[Path, int, Read]]) -> dict[int, Path]:
    """Layer to path, ascending, of dictionaries found (path, layer, what is read).

    Raises InputError where they read several sites or two of them one layer; the message lists them.
    """
    kinds: dict[Read, Path] = {}
    for path, _, read in found:
        kinds.setdefault(read, path)
    if len(kinds) > 1:
        listed = "; ".join(f"{path} reads {read.site} ({read.space})" for read, path in kinds.items())
        raise InputError(f"several sites are read under one path: {listed}; give the deeper path of one site")
    by_layer: dict[int, list[Path]] = {}
    for path, layer, _ in found:
        by_layer.setdefault(layer, []).append(path)
    for layer, paths in sorted(by_layer.items()):
        if len(paths) > 1:
            shown = ", ".join(map(str, paths[:4])) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            raise InputError(
                f"layer {layer} has {len(paths)} dictionaries: {shown}; expected one for each layer: give the"
                f" deeper path of one"
            )
    return {layer: paths[0] for layer, paths in sorted(by_layer.items())}


def _folders(where: Path) -> Iterator[Path]:
    seen: set[str] = set()
    waiting = [(where, 0)]
    while waiting:
        folder, depth = waiting.pop()
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        if len(seen) > _MOST:
            raise InputError(f"{where}: has more than {_MOST} folders; give the path of the dictionaries")
        yield folder
        if depth == _DEPTH:
            continue
        try:
            with os.scandir(folder) as entries:
                below = [
                    entry.path for entry in entries if not entry.name.startswith(".") and _is_folder(entry)
                ]
        except OSError as error:
            raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
        waiting += [(Path(path), depth + 1) for path in sorted(below, reverse=True)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself; who needs that file says so
        return False


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Digits as numbers: layers.2 before layers.10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
