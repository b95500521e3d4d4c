"""One module for each format, registered by holding a `FORMAT`. Adding a format is adding a file here."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ingest.dictionaries.layout import Format

__all__ = ["formats"]


@cache
def formats() -> dict[str, Format]:
    """Every reader by name, in alphabetical order."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    ]
    return {module.FORMAT.name: module.FORMAT for module in modules}
