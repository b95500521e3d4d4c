"""A folder of dictionaries that is there whole or not at all, and what was said while it was made."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file

from ingest.dictionaries.file_form import DTYPES
from ingest.dictionaries.types import Dictionary
from ingest.errors import InputError, near

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Notes", "Written", "check_arguments", "save", "whole_folder"]


@dataclass(frozen=True)
class Written:
    """A folder of dictionaries, and every conversion in a plain sentence."""

    folder: Path
    notes: tuple[str, ...]


@dataclass
class Notes:
    """What was converted, of which layers: said once for all that share it."""

    layers: dict[str, list[int]] = field(default_factory=dict)

    def add(self, layer: int | None, text: str) -> None:
        """`layer` None: of the whole set."""
        said = self.layers.setdefault(text, [])
        if layer is not None:
            said.append(layer)

    def told(self, every: Sequence[int]) -> tuple[str, ...]:
        """The notes, those of some layers of `every` only with their numbers."""
        return tuple(
            text if not said or len(said) == len(every) else f"layer {', '.join(map(str, said))}: {text}"
            for text, said in self.layers.items()
        )


def check_arguments(folder: Path, dictionaries: Sequence[Dictionary], dtype: str) -> None:
    """InputError for a type not known, no dictionary, two of one layer, or a folder that holds something."""
    if dtype not in DTYPES:
        raise InputError(f"dtype: {dtype!r} is not known{near(dtype, DTYPES)}")
    if not dictionaries:
        raise InputError(f"{folder}: no dictionary to write; expected one for each layer")
    layers = [one.layer for one in dictionaries]
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        raise InputError(f"{folder}: two dictionaries for layer {twice[0]}; expected one for each layer")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists; give a folder that is not there yet, or remove it")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it when the block ends well, and is gone when not."""
    beside = folder.absolute().with_name(f".{folder.absolute().name}.{uuid.uuid4().hex[:8]}")
    try:
        beside.mkdir(parents=True)
        yield beside
        beside.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: cannot be written ({reason})") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save(path: Path, values: Mapping[str, Tensor]) -> None:
    """One safetensors file."""
    # Clones: safetensors refuses tensors that share memory.
    own = {key: value.detach().clone().contiguous() for key, value in values.items()}
    save_file(own, path, metadata={"format": "pt"})
