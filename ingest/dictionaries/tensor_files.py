"""safetensors files: their headers without reading a weight (and without torch), then tensors as exact
float32."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Entry",
    "check_file",
    "check_finite",
    "check_keys",
    "check_shape",
    "exact_float32",
    "read_header",
    "read_metadata",
    "read_numbers",
    "read_part",
    "read_tensors",
]

# Every value of these is a float32; a float64 is not, and rounding it would change the dictionary silently.
_WIDENED = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_SIZES = {**_WIDENED, "F64": 8}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, by its header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return _SIZES[self.dtype] * self.count

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def check_file(path: Path, kind: str) -> int:
    """The size of a file that can be read and is not empty. `kind`, "a safetensors file": what is expected.

    Raises InputError, for a Git LFS pointer too.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise InputError(f"{path}: is not a file; expected {kind}")
        with path.open("rb") as file:
            begin = file.read(24)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected {kind}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if size == 0:
        raise InputError(f"{path}: is empty (0 bytes); expected {kind}; copy or download it again")
    if begin.startswith(b"version https://git-lfs"):
        raise InputError(
            f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` where it came from"
        )
    return size


def read_header(path: Path) -> dict[str, Entry]:
    """Names, types and shapes of a safetensors file; nothing but its header is read.

    Raises InputError for a file that is missing, empty, truncated or something else, and for a type that
    float32 cannot hold exactly.
    """
    size = check_file(path, "a safetensors file")
    try:
        with safe_open(str(path), framework="numpy") as file:
            entries = {
                key: Entry(str(part.get_dtype()), tuple(part.get_shape()))
                for key in file.keys()  # noqa: SIM118 (the file is no mapping)
                for part in [file.get_slice(key)]
            }
    except SafetensorError as error:
        raise InputError(
            f"{path}: truncated or no safetensors file ({size} bytes: {error}); copy or download it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    for key, entry in entries.items():
        if entry.dtype not in _WIDENED:
            raise InputError(
                f"{path}: {key}: type {entry.dtype}, expected one that float32 holds exactly"
                f" ({', '.join(_WIDENED)}); save it as float32"
            )
    return entries


def check_keys(
    path: Path, found: Mapping[str, object], required: Set[str], optional: Set[str] = frozenset()
) -> None:
    """InputError that names every tensor missing and every tensor left over."""
    missing, over = sorted(required - set(found)), sorted(set(found) - required - set(optional))
    problems = []
    if missing:
        problems.append(f"tensor missing: {', '.join(missing)}")
    if over:
        problems.append(f"tensor left over: {', '.join(over)}")
    if problems:
        expected = ", ".join(sorted(required)) + (
            f" (optional: {', '.join(sorted(optional))})" if optional else ""
        )
        raise InputError(
            f"{path}: {'; '.join(problems)}; expected {expected}, found {', '.join(sorted(found))}"
        )


def check_shape(path: Path, key: str, entry: Entry, expected: tuple[int, ...], meaning: str) -> None:
    """InputError that names the tensor, both shapes and where the expected one comes from."""
    if entry.shape != expected:
        raise InputError(
            f"{path}: {key} has shape {_text(entry.shape)}, expected {_text(expected)}: {meaning}"
        )


def read_tensors(
    path: Path, header: Mapping[str, Entry], leave_out: Set[str] = frozenset()
) -> dict[str, Tensor]:
    """The tensors of a file whose header was read, widened exactly to float32, contiguous, checked finite;
    all but those to `leave_out`, which may be large.

    Raises InputError where the file has changed since, or holds NaN or infinity.
    """
    import torch

    widened: dict[str, Tensor] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            if shapes != {key: entry.shape for key, entry in header.items()}:
                raise InputError(f"{path}: has changed since it was opened; start again")
            for key in sorted(shapes.keys() - leave_out):
                # A copy: what is mapped from the file would change, or crash, with the file.
                widened[key] = file.get_tensor(key).to(torch.float32, copy=True).contiguous()
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read any more ({error}); it was sound when it was opened"
        ) from error
    for key, tensor in widened.items():
        check_finite(path, key, tensor, header[key].dtype)
    return widened


def read_part(
    path: Path, header: Mapping[str, Entry], key: str, at: int | None = None, axis: int = 1
) -> Tensor:
    """tensor[:, at], or tensor[at] with axis 0, or the whole without `at`, of a file whose header was read:
    float32, contiguous, checked finite. Of a large tensor one part after the other.

    Raises InputError where the file has changed since, or the part holds NaN or infinity.
    """
    import torch

    try:
        with safe_open(str(path), framework="pt") as file:
            found = file.get_slice(key)
            if tuple(found.get_shape()) != header[key].shape:
                raise InputError(f"{path}: has changed since it was opened; start again")
            part = found[:] if at is None else found[:, at] if axis else found[at]
            part = part.to(torch.float32, copy=True).contiguous()
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read any more ({error}); it was sound when it was opened"
        ) from error
    where = "" if at is None else f"[:, {at}]" if axis else f"[{at}]"
    check_finite(path, key + where, part, header[key].dtype)
    return part


def read_numbers(path: Path, header: Mapping[str, Entry], keys: Iterable[str]) -> dict[str, float]:
    """The tensors of one number among these keys, exact, without torch: factors that a header does not hold.

    Raises InputError for a tensor of several numbers.
    """
    found = {}
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
            for key in keys:
                entry = header[key]
                if entry.count != 1 or entry.dtype not in ("F32", "F16", "BF16"):
                    raise InputError(
                        f"{path}: {key} has shape {_text(entry.shape)} and type {entry.dtype}, expected one"
                        " number of type F32, F16 or BF16"
                    )
                file.seek(8 + length + entries[key]["data_offsets"][0])
                raw = file.read(entry.bytes)
                # bfloat16 is the upper half of a float32.
                half = entry.dtype == "F16"
                found[key] = struct.unpack("<e" if half else "<f", raw if half else raw.rjust(4, b"\0"))[0]
    except (OSError, ValueError, KeyError, struct.error) as error:  # read_header found no fault
        raise InputError(f"{path}: has changed since it was opened ({error}); start again") from error
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """What a safetensors file whose header was read says of itself: the version that wrote it, or nothing."""
    with safe_open(str(path), framework="numpy") as file:
        return dict(file.metadata() or {})


def check_finite(path: Path, key: str, tensor: Tensor, dtype: str) -> None:
    """InputError that names the first value that is NaN or infinite. `dtype`: the type on disk."""
    # The sum is a pass without a temporary; only a sum that is not finite (or overflows) needs a closer look.
    if tensor.sum().isfinite():
        return
    bad = ~tensor.isfinite()
    count = int(bad.sum())
    if not count:
        return
    first = tuple(int(part) for part in bad.nonzero()[0])
    kind = "NaN" if tensor[first].isnan() else "infinite"
    why = (
        "; float16 ends at 65504, so whatever wrote the file overflowed: save it as bfloat16 or float32"
        if dtype == "F16" and kind == "infinite"
        else "; the file is damaged or its training diverged"
    )
    raise InputError(
        f"{path}: {key}{list(first)} is {kind} ({count} of {tensor.numel()} values are not finite), expected"
        f" finite weights{why}"
    )


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def exact_float32(path: Path, key: str, found: np.ndarray) -> np.ndarray:
    """The same numbers as float32, contiguous, in their own shape.

    Raises InputError where float32 does not hold one of them exactly; NaN is left for `check_finite`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.require(found, np.float32, "C").reshape(found.shape)
        lost = int(((wide.astype(found.dtype) != found) & (found == found)).sum())
    if lost:
        raise InputError(
            f"{path}: {key}: {found.dtype}, and {lost} of {found.size} numbers are no float32; rounding would"
            " change the dictionary: save it as float32"
        )
    return wide
