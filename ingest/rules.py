"""Rules that select edges, as plain frozen values: no pydantic, no torch, so that every worker can hold them.

What each means is methods §2, "Selecting edges". A pair's weight is V = float32(float64 product); comparisons
are strict; ties fall to the smaller (source, target, reading, layer, head).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ingest.errors import near

__all__ = [
    "DEFAULT_RULE", "PER", "Absolute", "All_", "Any_", "Everything", "Rule", "RuleMistakes", "Top", "Z",
    "rule_from_data", "rule_to_data",
]  # fmt: skip


@dataclass(frozen=True)
class Everything:
    """Every pair with an edge. For tests and very small models."""


@dataclass(frozen=True)
class Absolute:
    """|V| > tau, a latent of free scale brought to unit writing norm first."""

    tau: float


@dataclass(frozen=True)
class Z:
    """|V| sqrt(d) / (|omega| |rho|) > z, with what comes out of the head in place of omega through a head."""

    z: float


@dataclass(frozen=True)
class Top:
    """The k largest |V| per target (and type, source layer or head), per source, or per block: a pair of
    dictionaries for DIRECT, a head for VIA_HEAD. Free scales as in Absolute."""

    k: int
    per: str = "target"


@dataclass(frozen=True)
class Any_:
    """Kept if one of the rules keeps it."""

    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class All_:
    """Kept if every rule keeps it."""

    rules: tuple[Rule, ...]


Rule = Everything | Absolute | Z | Top | Any_ | All_

DEFAULT_RULE = Z(6.0)
PER = ("target", "target×type", "target×source_layer", "target×head", "source", "block")
_FORMS = (
    "'everything', {absolute: number}, {z: number}, {top: number, per: target}, {any: [rules]}"
    " or {all: [rules]}"
)
_KEYS = ("absolute", "z", "top", "any", "all")


class RuleMistakes(ValueError):
    """All that is wrong with one rule: pairs of (path inside the rule, what was expected and found)."""

    def __init__(self, mistakes: list[tuple[tuple[str | int, ...], str]]) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {text}" for path, text in mistakes))


def rule_from_data(data: Any) -> Rule:
    """The rule that a `keep:` of the spec (or a step's JSON) states.

    Raises RuleMistakes with every mistake in it.

    >>> rule_from_data({"any": [{"z": 6}, {"top": 16, "per": "target*head"}]})
    Any_(rules=(Z(z=6.0), Top(k=16, per='target×head')))
    """
    mistakes: list[tuple[tuple[str | int, ...], str]] = []
    rule = _parse(data, (), mistakes)
    if rule is None or mistakes:
        raise RuleMistakes(mistakes)
    return rule


def rule_to_data(rule: Rule) -> Any:
    """The JSON form of a rule; `rule_from_data` reads it back to an equal rule."""
    match rule:
        case Everything():
            return "everything"
        case Absolute(tau=tau):
            return {"absolute": tau}
        case Z(z=z):
            return {"z": z}
        case Top(k=k, per=per):
            return {"top": k, "per": per}
        case Any_(rules=rules):
            return {"any": [rule_to_data(inner) for inner in rules]}
        case All_(rules=rules):
            return {"all": [rule_to_data(inner) for inner in rules]}


def _parse(
    data: Any, path: tuple[str | int, ...], mistakes: list[tuple[tuple[str | int, ...], str]]
) -> Rule | None:
    def wrong(text: str, *inner: str | int) -> None:
        mistakes.append(((*path, *inner), text))

    if data == "everything":
        return Everything()
    if not isinstance(data, dict):
        wrong(f"expected {_FORMS}, found {data!r}")
        return None
    kinds = [key for key in _KEYS if key in data]
    for key in data:
        if key not in _KEYS and not (key == "per" and "top" in data):
            wrong(f"unknown key{near(key, (*_KEYS, 'per'))}", str(key))
    if len(kinds) != 1:
        if kinds or not data:
            found = f"{len(kinds)}: {', '.join(kinds)} (join rules by any or all)" if kinds else "none"
            wrong(f"expected exactly one of {', '.join(_KEYS)}, found {found}")
        return None
    kind, value = kinds[0], data[kinds[0]]
    if kind in ("any", "all"):
        if not isinstance(value, list) or not value:
            wrong(f"expected a list of one or more rules, found {value!r}", kind)
            return None
        inner = [_parse(item, (*path, kind, index), mistakes) for index, item in enumerate(value)]
        rules = tuple(rule for rule in inner if rule is not None)
        return Any_(rules) if kind == "any" else All_(rules)
    if kind == "top":
        per = str(data.get("per", "target")).replace("*", "×").replace(".", "×").replace(" ", "")
        if per not in PER:
            wrong(f"expected {', '.join(PER)} ('*' may stand for '×'), found {data['per']!r}", "per")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            wrong(f"expected a whole number of 1 or more, found {value!r}", "top")
            return None
        return Top(value, per)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        wrong(f"expected a number of 0 or more, found {value!r}", kind)
        return None
    return Absolute(float(value)) if kind == "absolute" else Z(float(value))
