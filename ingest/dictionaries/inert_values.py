"""What the names in a file of tensors become here: inert values, each standing for what torch would make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ingest.dictionaries.tensor_files import Entry
from ingest.errors import InputError

__all__ = [
    "DTYPES",
    "LARGEST",
    "Blob",
    "Configuration",
    "Named",
    "PickledTensor",
    "Storage",
    "Unfinished",
    "one_line",
    "settled",
    "storage_of",
    "storage_type",
]

_MOST_VALUES = 100_000
_DEEPEST = 16
LARGEST = 2**48  # of any size or offset: far more than a disk holds, far less than overflows

_ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL",
}  # fmt: skip
DTYPES = {
    "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.int64", "torch.int32",
    "torch.int16", "torch.int8", "torch.uint8", "torch.bool",
}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A name, standing for itself: `torch.float32`, or the name of a class or function before it is used."""

    name: str


@dataclass(frozen=True)
class Configuration:
    """An object of a class that the caller knows by name: its attributes, all of them plain data."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Storage:
    """Where the numbers of a tensor lie: whoever reads the container knows the place by its key."""

    key: str
    dtype: str
    count: int

    @property
    def bytes(self) -> int:
        """Size of it all."""
        return self.count * _ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class PickledTensor(Entry):
    """One tensor by its header: within its storage for certain, and no wider than that allows."""

    stride: tuple[int, ...]
    offset: int
    storage: Storage

    @property
    def bytes(self) -> int:
        """Size of its own numbers, as they are on disk."""
        return self.count * _ITEM_SIZES[self.dtype]


class Blob(NamedTuple):
    """Bytes inside the pickle, left where they are."""

    begin: int
    end: int


class Unfinished:
    """A configuration under construction."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: object = None


def storage_of(where: str, fields: tuple[Any, ...]) -> Storage:
    """The storage that a persistent id (type, key, device, count) describes, wherever its device was."""
    match fields:
        case (Named(name=name), str(key), str(), int(count)) if (
            (dtype := storage_type(name)) and type(count) is int and 0 <= count < LARGEST
        ):
            return Storage(key, dtype, count)
    raise InputError(
        f"{where}: a storage is described as torch.save does not; copy or download it again, or save it anew"
    )


def settled(where: str, value: object) -> tuple[Any, tuple[PickledTensor, ...]]:
    """The finished value, of dictionaries, lists, tuples, texts, numbers, `Named` types, `Configuration`s and
    `PickledTensor`s alone, and every tensor in it. Raises InputError for more or deeper values than a
    dictionary has (a value may contain itself), and for what is left in the making."""
    left = _MOST_VALUES
    tensors: list[PickledTensor] = []

    def visit(value: object, depth: int, plain: bool) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise InputError(
                f"{where}: holds more than {_MOST_VALUES} values, or nests deeper than {_DEEPEST}; refused:"
                " expected a dictionary's tensors and configuration"
            )
        match value:
            case None | bool() | int() | float() | str():
                return value
            case dict():
                return {key: visit(part, depth + 1, plain) for key, part in value.items()}
            case list() | tuple() if not isinstance(value, Blob):
                return type(value)([visit(part, depth + 1, plain) for part in value])
            case Named(name=name) if name in DTYPES:
                return value
            case PickledTensor() if not plain:
                tensors.append(value)
                return value
            case Unfinished(name=name, state=state) if not plain:
                return Configuration(name, visit(state or {}, depth + 1, True))
        name = getattr(value, "name", type(value).__name__.lstrip("_"))
        inside = " inside a configuration" if plain else ""
        raise InputError(
            f"{where}: holds {one_line(name)}{inside}; refused: expected tensors, and"
            " configurations of plain data"
        )

    return visit(value, 0, False), tuple(tensors)


def storage_type(full: str) -> str | None:
    """`F32` of torch.FloatStorage and torch.cuda.FloatStorage."""
    return (
        _STORAGES.get(full.removeprefix("torch.").removeprefix("cuda."))
        if full.startswith("torch.")
        else None
    )


def one_line(name: object) -> str:
    """A name of a stranger, for one line of a message."""
    text = str(name)
    return ascii(text[:77] + "…" if len(text) > 80 else text)[1:-1]
