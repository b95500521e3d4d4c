"""A spec's text: YAML with the line of every key, and mistakes told by path, line, expected and found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ingest.errors import InputError

__all__ = ["Mistake", "SpecError", "SpecText", "parse_text", "read_text"]

Place = tuple[str | int, ...]  # keys and list positions from the top


@dataclass(frozen=True)
class Mistake:
    """One thing to mend in a spec."""

    path: str  # dictionaries.neurons.layers, edges[0].keep.top
    line: int  # of the YAML, from 1
    text: str  # what was expected and found

    def __str__(self) -> str:
        return (
            f"line {self.line}: {self.path}: {self.text}" if self.path else f"line {self.line}: {self.text}"
        )


class SpecError(InputError):
    """All mistakes of one spec: one line each, in the order of the file."""

    def __init__(self, source: str, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(
            sorted(set(mistakes), key=lambda mistake: (mistake.line, mistake.path, mistake.text))
        )
        if len(self.mistakes) == 1:
            super().__init__(f"{source}: {self.mistakes[0]}")
        else:
            lines = [f"  {mistake}" for mistake in self.mistakes]
            super().__init__(f"{source}: {len(self.mistakes)} mistakes", *lines)


@dataclass(frozen=True)
class SpecText:
    """Parsed YAML: the data, the line of every place in it, and keys that stand twice."""

    source: str
    data: Any
    lines: Mapping[Place, int]
    twice: tuple[Mistake, ...]

    def mistake(self, place: Place, text: str) -> Mistake:
        """A mistake at a place; where the place is not in the file, the line of the nearest thing around
        it."""
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        return Mistake(_dotted(place), self.lines.get(known, 1), text)


def parse_text(text: str, source: str) -> SpecText:
    """YAML text as data with lines. Raises InputError for what is no YAML, an alias included (none is
    needed, and nested ones can grow without bound)."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise InputError(f"{source}: YAML aliases (*name) are not supported; write the value out")
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(
            f"{source}: line {line}: not YAML: {' '.join(str(error.problem).split())}"
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError) as error:  # a date that is none, or depth without end
        raise InputError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    lines: dict[Place, int] = {}
    twice: list[Mistake] = []
    if node is not None:
        _walk(node, (), lines, twice)
    return SpecText(source, data, lines, tuple(twice))


def read_text(path: Path) -> str:
    """The spec file's text. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a spec (YAML)") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; expected a spec file (YAML)") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not text in UTF-8; expected a spec (YAML)") from None
    if not text.strip():
        raise InputError(f"{path}: is empty; expected a spec that begins with atlas: 1")
    return text


def _walk(node: yaml.Node, place: Place, lines: dict[Place, int], twice: list[Mistake]) -> None:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            inner = (*place, str(key_node.value))
            line = key_node.start_mark.line + 1
            if inner in lines:
                text = f"stands twice (first on line {lines[inner]}); expected once"
                twice.append(Mistake(_dotted(inner), line, text))
                continue
            lines[inner] = line
            _walk(value, inner, lines, twice)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*place, index), lines, twice)


def _dotted(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
