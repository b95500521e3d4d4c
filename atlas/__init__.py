"""The atlas: schema, stores, loader, command line and Python interface.

    import atlas
    with atlas.open("demo.atlas") as a:
        a.feature("n8[355]").upstream()

Names are imported when first used, so that `atlas.schema` can be read without anything heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas.api import Atlas, open
    from atlas.errors import AtlasError

__all__ = ["Atlas", "AtlasError", "open"]

_PLACES = {"Atlas": "atlas.api", "open": "atlas.api", "AtlasError": "atlas.errors"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'atlas' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "errors", "schema"]
