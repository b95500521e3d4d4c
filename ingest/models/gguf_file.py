"""A GGUF file (llama.cpp): its metadata, and its tensors dequantised to float32 under Hugging Face's names.

The header is read here, because the gguf package's reader needs seconds for a vocabulary; blocks are
dequantised by that package. llama.cpp changes some tensors when it writes them, and that is undone: rows of
Q and K are permuted for its rotary kernel (llama, granite), and Gemma's gains are stored as 1 + weight.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ingest.errors import InputError

__all__ = ["GGUFFile"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LONGEST = 1 << 32  # a length beyond this is a damaged header, not a file


@dataclass(frozen=True)
class _Stored:
    shape: tuple[int, ...]  # slowest dimension first, as numpy and Hugging Face write it
    kind: int  # ggml's type
    offset: int  # from the start of the file


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        if self.at + length > len(self.data):
            raise struct.error("a text runs past the end")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            value = self.scalar(_SCALARS[kind])
            # The shortest decimal of a float32: 1e-05 was written, not 9.999999747378752e-06.
            return float(str(np.float32(value))) if kind == 6 else value
        inner, length = self.scalar("I"), self.scalar("Q")
        if inner in (_TEXT, _ARRAY):
            if length > _LONGEST:
                raise struct.error("an array runs past the end")
            return [self.value(inner) for _ in range(length)]
        values = struct.unpack_from(f"<{length}{_SCALARS[inner]}", self.data, self.at)
        self.at += length * struct.calcsize(_SCALARS[inner])
        return list(values)


class GGUFFile:
    """An open file. `metadata` holds its key-value pairs, `shapes` its tensors' shapes by llama.cpp's names.

    Raises InputError for a file that is not GGUF, is truncated, or whose byte order is not little-endian.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise InputError(f"{path}: the file is empty; expected a GGUF model") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        header = _Header(self._data)
        try:
            self.metadata, self._stored = self._read(header)
        except (struct.error, KeyError, OverflowError, RecursionError, MemoryError) as error:
            raise InputError(f"{path}: the GGUF header is damaged or truncated ({error})") from None

    def _read(self, header: _Header) -> tuple[dict[str, Any], dict[str, _Stored]]:
        if self._data[:4] != b"GGUF":
            raise InputError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        header.at = 4
        version = header.scalar("I")
        if version not in (2, 3):
            raise InputError(f"{self.path}: GGUF version {version}; 2 and 3, little-endian, are read")
        n_tensors, n_pairs = header.scalar("Q"), header.scalar("Q")
        metadata = {}
        for _ in range(n_pairs):
            key = header.text()
            metadata[key] = header.value(header.scalar("I"))
        infos = []
        for _ in range(n_tensors):
            name = header.text()
            dimensions = [header.scalar("Q") for _ in range(header.scalar("I"))]
            infos.append((name, tuple(reversed(dimensions)), header.scalar("I"), header.scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise InputError(f"{self.path}: general.alignment is {alignment!r}; expected a positive integer")
        start = -(-header.at // alignment) * alignment
        return metadata, {name: _Stored(shape, kind, start + at) for name, shape, kind, at in infos}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    @property
    def dtype(self) -> str:
        """The type that most of the weights are stored in, by ggml's name."""
        from gguf import GGMLQuantizationType

        count: dict[int, int] = {}
        for stored in self._stored.values():
            count[stored.kind] = count.get(stored.kind, 0) + math.prod(stored.shape)
        try:
            return GGMLQuantizationType(max(count, key=lambda kind: count[kind])).name
        except ValueError:
            return "unknown"

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32, in its own memory. Raises InputError for an unknown type or missing bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self._stored[name]
        try:
            kind = GGMLQuantizationType(stored.kind)
        except ValueError:
            raise InputError(f"{self.path}: tensor {name} has the unknown type {stored.kind}") from None
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        *outer, width = stored.shape
        if width % per_block:
            raise InputError(f"{self.path}: tensor {name}: width {width} is no multiple of {per_block}")
        row = width // per_block * block_bytes
        size = row * math.prod(outer)
        if stored.offset + size > len(self._data):
            raise InputError(
                f"{self.path}: truncated: tensor {name} ends at byte {stored.offset + size}, the file at "
                f"{len(self._data)}"
            )
        raw = np.frombuffer(self._data, np.uint8, size, stored.offset).reshape(*outer, row)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError:
            raise InputError(f"{self.path}: tensor {name}: type {kind.name} cannot be dequantised") from None
        return np.array(values, dtype=np.float32).reshape(stored.shape)

    def names(self) -> Iterable[str]:
        return self._stored.keys()
