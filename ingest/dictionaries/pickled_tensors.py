"""Tensors of torch's own files, `.pt` `.pth` `.bin`, and of pickles (plain, or compressed with gzip), read
without torch's loader: headers first, then numbers as exact float32. Nothing in a file is run."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ingest.dictionaries.inert_values import Configuration, Named, PickledTensor, one_line
from ingest.dictionaries.tensor_files import check_finite, exact_float32
from ingest.dictionaries.torch_archives import PickledFile, opened, pickle_head
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Configuration",
    "Named",
    "PickledFile",
    "PickledTensor",
    "pickle_head",
    "read_numbers",
    "read_pickled",
    "read_pickled_tensors",
    "state_dict",
]

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_pickled(path: Path, classes: Set[str] = frozenset()) -> PickledFile:
    """What a file holds, its tensors by their headers. `classes` are the full names of configuration classes,
    whose objects become a `Configuration`.

    Raises InputError for a file that is missing, empty, truncated, damaged or something else, for one that
    names anything but tensors and those classes (nothing of it runs), for a storage whose size is not what
    the tensors need, and for tensors that would take up far more memory than the file does.
    """
    with opened(path, classes) as (file, _):
        return file


def state_dict(path: Path, value: object) -> dict[str, PickledTensor]:
    """A value that is nothing but tensors by name. Raises InputError for another."""
    if isinstance(value, dict) and all(isinstance(part, PickledTensor) for part in value.values()):
        return value
    what = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
    raise InputError(f"{path}: expected a state dict, tensors by name; found {one_line(what)}")


def read_pickled_tensors(file: PickledFile, tensors: Mapping[str, PickledTensor]) -> dict[str, Tensor]:
    """Some tensors of a file whose value was read, widened exactly to float32, contiguous, each with numbers
    of its own, checked finite. Keys are for messages.

    Raises InputError where the file has changed since or is damaged, holds NaN or infinity, or a float64 or a
    whole number that is no float32.
    """
    import torch

    read: dict[str, Tensor] = {}
    with opened(file.path, file.classes) as (again, numbers):
        _same(file, again)
        for key, entry in tensors.items():
            found = _array(entry, numbers(entry.storage))
            read[key] = torch.from_numpy(exact_float32(file.path, key, found))
            check_finite(file.path, key, read[key], entry.dtype)
    return read


def read_numbers(
    file: PickledFile, tensors: Mapping[str, PickledTensor]
) -> dict[str, list[int] | list[float]]:
    """The few numbers of small tensors (a k, a threshold), flat, as they are on disk; without torch.

    Raises InputError where one has more than 1,000, or the file has changed since.
    """
    read = {}
    with opened(file.path, file.classes) as (again, numbers):
        _same(file, again)
        for key, entry in tensors.items():
            if entry.count > 1000:
                raise InputError(f"{file.path}: {key} has {entry.count} numbers, expected a few at most")
            read[key] = _array(entry, numbers(entry.storage)).ravel().tolist()
    return read


def _same(file: PickledFile, again: PickledFile) -> None:
    if again.tensors != file.tensors:
        raise InputError(f"{file.path}: has changed since it was opened; start again")


def _array(entry: PickledTensor, data: bytearray) -> np.ndarray:
    """The tensor's numbers as they are on disk: a view of its storage's bytes."""
    flat = np.frombuffer(data, np.dtype(_NUMPY[entry.dtype]))[entry.offset :]
    if entry.dtype == "BF16":
        flat = (flat.astype("<u4") << 16).view("<f4")
    if not entry.count:
        return np.empty(entry.shape, flat.dtype)
    steps = [step * flat.itemsize for step in entry.stride]
    return np.lib.stride_tricks.as_strided(flat, entry.shape, steps)
