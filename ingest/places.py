"""Where a user's files are: a path, a name on the hub (of dictionaries also a folder there,
`owner/name/sub/folder`), or `package:NAME/FILE` inside an installed Python package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from ingest.errors import InputError

__all__ = ["PACKAGE", "hub_place", "is_hub_name", "resolve_place"]

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FOLDER = re.compile(rf"({_HUB.pattern})/((?:[\w-][\w.=+-]*/)*[\w-][\w.=+-]*)/?")
PACKAGE = "package:"


def is_hub_name(text: str) -> bool:
    """Whether a text that is no existing path can be a hub name: `owner/name`, nothing else."""
    return bool(_HUB.fullmatch(text))


def hub_place(text: str) -> tuple[str, str] | None:
    """The hub name and the folder in it ("" for the whole) of a text that is no existing path, or None.

    >>> hub_place("owner/name/layer_5/width_16k")
    ('owner/name', 'layer_5/width_16k')
    """
    if is_hub_name(text):
        return text, ""
    match = _FOLDER.fullmatch(text)
    return (match[1], match[2]) if match else None


def resolve_place(text: str, base: Path | None = None, *, folders: bool = False) -> str:
    """The absolute path that a text means, seen from the folder `base` (default: the working folder).

    A path that exists wins; then a hub name stays as it is, with `folders` also a folder of one, unless its
    first part is a folder here. Raises InputError for anything else. A package is found, never imported: no
    code of it runs.
    """
    if text.startswith(PACKAGE):
        return str(_in_package(text))
    base = base or Path.cwd()
    path = base / Path(text).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise InputError(f"{text}: cannot be read ({error.strerror})") from None
    if exists:
        return str(path.resolve())
    if is_hub_name(text):
        return text
    if folders and hub_place(text) and not (base / text.partition("/")[0]).is_dir():
        return text
    raise InputError(f"{text}: no such file or directory (looked for {path})")


def _in_package(text: str) -> Path:
    package, _, inside = text.removeprefix(PACKAGE).partition("/")
    # A dotted name would make find_spec import the parent package.
    if not package.isidentifier() or not inside:
        raise InputError(f"{text}: expected package:NAME/FILE with the name of an installed package")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module already loaded without a spec
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"{text}: the package {package} is not installed; install it (pip install {package})"
        )
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / inside).resolve()
    if not path.is_relative_to(root):
        raise InputError(f"{text}: leads out of the package {package}")
    if not path.exists():
        raise InputError(f"{text}: the package {package} has no {inside}")
    return path
