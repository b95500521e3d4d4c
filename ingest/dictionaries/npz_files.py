""".npz files (numpy's zip of .npy arrays): their headers without reading a weight, then tensors as exact
float32.

A .npy array of objects is a pickle; nothing here can load one. Sizes are believed only as far as the file
itself bears them out: a header that promises more than its zip member holds, or more than its compressed
bytes could hold, is refused before memory is asked for.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from ingest.dictionaries.tensor_files import Entry, check_file, check_finite, exact_float32
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NpzEntry", "read_npz", "read_npz_header"]

_TYPES = {"f2": "F16", "f4": "F32", "f8": "F64"}
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes
_ENCRYPTED = 0x1
_DENSEST = 1032  # deflate cannot make a byte of more than this many
_LONGEST_HEADER = 10_000  # of a .npy array, as numpy allows
_CHUNK = 1 << 20
_ITEM = re.compile(
    r"\s*'(?P<key>descr|fortran_order|shape)'\s*:\s*"
    r"(?P<value>'[^']*'|True|False|\((\d{1,18}\s*,\s*)*(\d{1,18}\s*)?\))\s*,?\s*"
)


@dataclass(frozen=True)
class NpzEntry(Entry):
    """One array of the file, by its header."""

    numpy: np.dtype
    fortran: bool  # columns after one another
    begin: int  # of its numbers, behind the header


def read_npz_header(path: Path) -> dict[str, NpzEntry]:
    """Names, types and shapes of a .npz file's arrays; of each member the header alone is read.

    float64 passes here; `read_npz` refuses one that float32 does not hold exactly. Raises InputError for a
    file that is missing, empty, truncated or something else, for an array of objects, and for other types.
    """
    size = check_file(path, "a .npz file")
    with _archive(path) as archive:
        members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            key = member.filename.removesuffix(".npy")
            if key == member.filename:
                raise InputError(
                    f"{path}: {member.filename} is no .npy array; expected a file that numpy.savez wrote"
                )
            if key in members:
                raise InputError(f"{path}: {key} stands there twice; save the file again with numpy.savez")
            members[key] = member
        if not members:
            raise InputError(f"{path}: holds no array; expected a file that numpy.savez wrote")
        return {key: _entry(path, key, archive, member, size) for key, member in members.items()}


def read_npz(path: Path, header: Mapping[str, NpzEntry]) -> dict[str, Tensor]:
    """All arrays of a file whose header was read, widened exactly to float32, contiguous, checked finite.

    Raises InputError where the file has changed since or is damaged, holds NaN or infinity, or a float64 that
    float32 does not hold.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    with _archive(path) as archive:
        for key, entry in header.items():
            wide = exact_float32(path, key, _numbers(path, key, archive, entry))
            tensors[key] = torch.from_numpy(wide)
            check_finite(path, key, tensors[key], entry.dtype)
    return tensors


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """The open zip; what a damaged one raises becomes an InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (
        zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError, struct.error
    ) as error:  # fmt: skip
        raise InputError(
            f"{path}: truncated, damaged or no .npz file ({error}); copy or download it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _entry(path: Path, key: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, size: int) -> NpzEntry:
    if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
        raise InputError(
            f"{path}: {key} is encrypted, or compressed as numpy.savez does not; save it again with that"
        )
    most = member.compress_size * (1 if member.compress_type == zipfile.ZIP_STORED else _DENSEST) + 64
    if member.compress_size > size or member.file_size > most:
        raise InputError(
            f"{path}: {key} claims {member.file_size} bytes, its {min(member.compress_size, size)} bytes in"
            " the file cannot hold them; copy or download it again"
        )
    with archive.open(member) as file:
        entry = _npy_header(path, key, file)
    if entry.begin + entry.bytes != member.file_size:
        raise InputError(
            f"{path}: {key} has shape {entry.shape}, so {entry.bytes} bytes, the file holds"
            f" {member.file_size - entry.begin}; truncated or damaged: copy or download it again"
        )
    return entry


def _npy_header(path: Path, key: str, file: IO[bytes]) -> NpzEntry:
    """What stands before the numbers of a .npy array, by its grammar: never evaluated."""
    begin = file.read(10)
    wide = begin[6:7] in (b"\2", b"\3")  # a length of four bytes
    begin += file.read(2) if wide else b""
    length = int.from_bytes(begin[8:], "little")
    text = file.read(min(length, _LONGEST_HEADER + 1))
    if not begin.startswith(b"\x93NUMPY") or not length == len(text) <= _LONGEST_HEADER:
        raise InputError(f"{path}: {key} is no .npy array; copy or download it again")
    said = _said(text.decode("latin-1").strip())
    if said is None:
        raise InputError(
            f"{path}: {key}: its .npy header is not of one plain type"
            f" ({text[:80].decode('latin-1').strip()!r}); expected float32 numbers"
        )
    descr, fortran, shape = said
    if descr.lstrip("|") == "O":
        raise InputError(
            f"{path}: {key} is an array of Python objects, a pickle that may run code; refused: expected"
            " numbers"
        )
    name = _TYPES.get(descr[1:])
    if name is None or descr[0] not in "<>=":
        what = "raw bytes (bfloat16?)" if descr[1:] == "V2" else f"type {descr}"
        raise InputError(f"{path}: {key}: {what}, expected float32, float16 or float64; save it as float32")
    return NpzEntry(name, shape, np.dtype(descr), fortran, len(begin) + length)


def _said(text: str) -> tuple[str, bool, tuple[int, ...]] | None:
    """descr, fortran_order and shape of a header; None where it is no such three."""
    found: dict[str, str] = {}
    inside = text.removeprefix("{").removesuffix("}")
    at, end = 0, len(inside.rstrip())
    while at < end and (item := _ITEM.match(inside, at)):
        found[item["key"]], at = item["value"], item.end()
    if len(text) != len(inside) + 2 or at < end or len(found) != 3 or not found["descr"].startswith("'"):
        return None
    if found["fortran_order"] not in ("True", "False") or not found["shape"].startswith("("):
        return None
    shape = tuple(int(extent) for extent in re.findall(r"\d+", found["shape"]))
    return found["descr"].strip("'"), found["fortran_order"] == "True", shape


def _numbers(path: Path, key: str, archive: zipfile.ZipFile, entry: NpzEntry) -> np.ndarray:
    """The array as it is on disk. Reads to the member's end, where its checksum is compared."""
    flat = np.empty(entry.count, entry.numpy)
    try:
        with archive.open(f"{key}.npy") as file:
            if _npy_header(path, key, file) != entry:
                raise InputError(f"{path}: has changed since it was opened; start again")
            into, got = flat.view(np.uint8), 0
            while got <= len(into) and (chunk := file.read(_CHUNK)):
                into[got : got + len(chunk)] = np.frombuffer(chunk, np.uint8)[: len(into) - got]
                got += len(chunk)
            if got != len(into):
                raise InputError(f"{path}: {key} is not as long as when it was opened; start again")
    except KeyError:
        raise InputError(f"{path}: has changed since it was opened: no {key}; start again") from None
    return flat.reshape(entry.shape[::-1]).T if entry.fortran else flat.reshape(entry.shape)
