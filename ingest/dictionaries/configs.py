"""The JSON beside a dictionary's weights, read so that no field of it is passed over in silence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from ingest.errors import InputError, near

__all__ = ["REQUIRED", "Fields", "read_json"]

REQUIRED: Any = object()
_MOST = 1e15  # no size, norm or factor is beyond; what is computed from them stays finite
_LARGEST = 64 << 20  # bytes; a configuration has thousands


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises InputError for a file that is missing, unreadable or no JSON object,
    and for a key that stands in it twice."""
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"{path}: is larger than a configuration can be ({path.stat().st_size} bytes)")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected the dictionary's configuration") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not JSON ({error})") from error
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
    except (ValueError, RecursionError) as error:  # JSON that is none, or a number of 5000 digits
        raise InputError(f"{path}: is not JSON ({error}); copy or download it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected keys and values, found {_shown(values)}")
    return values


class Fields:
    """The keys and values of one configuration, and which of them were looked at.

    `take` reads a field, `ignore` says that one means nothing for reading, `done` raises for every field that
    nobody understood. `notes` gathers what was defaulted and should be told.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix
        self.notes: list[str] = []
        self._understood: set[str] = set()  # every key that may stand here, present or not
        self._sections: list[Fields] = []

    def __contains__(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(key) is not None

    def place(self, key: str) -> str:
        """`path: section.key`, as an error begins."""
        return f"{self.path}: {self.prefix}{key}"

    def take(
        self, key: str, kind: type | UnionType, default: Any = REQUIRED, *, note: str | None = None
    ) -> Any:
        """The field's value, of this kind (a whole number is a float too, a bool is no number); where it is
        absent or null the default, and then `note` is added to the notes. Raises InputError."""
        self._understood.add(key)
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                have = ", ".join(sorted(self.values)) or "nothing"
                raise InputError(f"{self.place(key)}: is missing; expected {_name(kind)}; found {have}")
            if note:
                self.notes.append(note)
            return default
        kinds = getattr(kind, "__args__", (kind,))
        if isinstance(value, bool) and bool not in kinds:
            fits = False
        elif isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
            value, fits = float(value) if abs(value) <= _MOST else value, True
        else:
            fits = isinstance(value, kinds)
        if not fits:
            raise InputError(f"{self.place(key)}: expected {_name(kind)}, found {_shown(value)}")
        if isinstance(value, int | float) and not abs(value) <= _MOST:  # NaN too
            raise InputError(
                f"{self.place(key)}: expected a finite number of at most {_MOST:g}, found {_shown(value)}"
            )
        return value

    def one_of(
        self, key: str, choices: Iterable[Any], default: Any = REQUIRED, *, note: str | None = None
    ) -> Any:
        """The field's value, one of `choices`. Raises InputError that names them."""
        allowed = list(choices)
        self._understood.add(key)
        if key not in self:
            return self.take(key, object, default, note=note)
        value = self.values[key]
        # By type too: False is not 0.
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            known = ", ".join(_shown(choice) for choice in allowed)
            raise InputError(f"{self.place(key)}: expected one of {known}, found {_shown(value)}")
        return value

    def section(self, key: str) -> Fields:
        """The fields of a nested object (none, where it is absent); `done` asks for them too."""
        inner = Fields(self.path, self.take(key, dict, {}), f"{self.prefix}{key}.")
        inner.notes = self.notes
        self._sections.append(inner)
        return inner

    def ignore(self, *keys: str) -> None:
        """Fields that are known, and known to mean nothing for what the dictionary computes."""
        self._understood |= set(keys)

    def unknown(self) -> list[str]:
        """The fields nobody looked at yet, without those of sections."""
        return sorted(set(self.values) - self._understood)

    def done(self) -> None:
        """Raises InputError that names every field nobody understood."""
        unknown = [
            f"{part.prefix}{key}: unknown key{near(key, sorted(part._understood))}"
            for part in (self, *self._sections)
            for key in part.unknown()
        ]
        if unknown:
            raise InputError(
                f"{self.path}: {'; '.join(unknown)}; a file understood in part is not read at all"
            )


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise InputError(f"{path}: {key}: stands there twice; remove one")
        values[key] = value
    return values


_NAMES: dict[Any, str] = {
    str: "a text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object",
    list: "a list", object: "a value", type(None): "null",
}  # fmt: skip


def _name(kind: type | UnionType) -> str:
    return " or ".join(_NAMES[one] for one in getattr(kind, "__args__", (kind,)))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}…"
