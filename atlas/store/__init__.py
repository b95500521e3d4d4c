"""Graph databases that keep an atlas, behind one contract."""

from __future__ import annotations

from pathlib import Path

from atlas.errors import AtlasError
from atlas.store.contract import Store
from atlas.store.result import Result

__all__ = ["Result", "Store", "open_store"]


def open_store(where: str | Path, *, memory: int | None = None) -> Store:
    """Opens an atlas for reading: a folder, at its current generation.

    `memory` bounds the database's buffers, in bytes. Raises `AtlasError` if there is no atlas, nothing is
    loaded in it, or it was made by a newer schema.
    """
    if isinstance(where, str) and "://" in where:
        raise AtlasError(f"{where}: only atlases in a folder can be opened")
    from atlas.store.embedded import EmbeddedStore

    return EmbeddedStore(Path(where), memory=memory)
