"""What a query may be, on any store: one statement that reads, with every parameter it names.

The check works on tokens, so a keyword inside a string, a comment, a back-quoted name or a property name
is none. It is the first wall: a clear message before anything runs. The second is the database, opened
read-only. The embedded engine's own read-only mode still writes files (COPY … TO, EXPORT DATABASE) and
reads any (LOAD FROM), so statements are admitted by their first word, not refused by a list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atlas.errors import AtlasError

__all__ = ["CLAUSES", "Token", "check_parameters", "check_query", "tokens"]

_TOKEN = re.compile(
    r"""
    (?P<space>\s+ | //[^\n]* | /\*.*?\*/)
  | (?P<string>'(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*")
  | (?P<quoted>`(?:``|[^`])*`)
  | (?P<parameter>\$(?:\w+|`[^`]*`))
  | (?P<number>0x[0-9a-fA-F]+ | \d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
  | (?P<word>[^\W\d]\w*)
  | (?P<mark>.)
    """,
    re.VERBOSE | re.DOTALL,
)

_OPENERS = {"MATCH", "OPTIONAL", "UNWIND", "WITH", "RETURN", "CALL"}
_WRITES = {"CREATE", "MERGE", "SET", "DELETE", "DETACH", "REMOVE", "DROP", "ALTER", "COPY", "FOREACH"}
CLAUSES = {
    "MATCH",
    "OPTIONAL",
    "UNWIND",
    "WITH",
    "RETURN",
    "UNION",
    "CALL",
    "WHERE",
    "ORDER",
    "SKIP",
    "LIMIT",
}
_READING_CALLS = {
    "SHOW_TABLES",
    "TABLE_INFO",
    "SHOW_FUNCTIONS",
    "SHOW_MACROS",
    "DB_VERSION",
    "DB.LABELS",
    "DB.RELATIONSHIPTYPES",
    "DB.PROPERTYKEYS",
}


@dataclass(frozen=True)
class Token:
    """A piece of a query: what sort it is, its text, whether it stands where a keyword can stand."""

    sort: str
    text: str
    start: int
    keyword: str = ""
    depth: int = 0


def tokens(cypher: str) -> list[Token]:
    """The query without space and comments. `keyword` is the upper-case word, "" where it is only a name."""
    found: list[Token] = []
    depth = 0
    for match in _TOKEN.finditer(cypher):
        sort, text = str(match.lastgroup), match.group()
        if sort == "space":
            continue
        if sort == "mark" and text in "'\"`":
            raise AtlasError(f"the query has a {text} without its partner (at character {match.start() + 1})")
        if sort == "mark" and text in ")]}":
            depth -= 1
        keyword = text.upper() if sort == "word" and not _is_name(found) else ""
        found.append(Token(sort, text, match.start(), keyword, depth))
        if sort == "mark" and text in "([{":
            depth += 1
    return [_unless_key(token, found[i + 1] if i + 1 < len(found) else None) for i, token in enumerate(found)]


def _is_name(before: Sequence[Token]) -> bool:
    """Whether a word after these tokens is a property, a label, a type or an alias, whatever its letters."""
    if not before:
        return False
    last = before[-1]
    if last.text in (".", ":", "|", "&", "!"):
        return not (last.text == "." and len(before) > 1 and before[-2].text == ".")  # `*1..SHORTEST`
    return last.keyword == "AS"


def _unless_key(token: Token, following: Token | None) -> Token:
    """A word before a colon is a map's key or a variable in a pattern."""
    if token.keyword and following is not None and following.text == ":":
        return Token(token.sort, token.text, token.start, "", token.depth)
    return token


def check_query(cypher: str) -> list[Token]:
    """The tokens of the query. Raises `AtlasError` unless it is one statement that only reads."""
    found = tokens(cypher)
    while found and found[-1].text == ";":
        found.pop()
    if not found:
        raise AtlasError("the query is empty")
    if any(token.text == ";" and token.sort == "mark" for token in found):
        raise AtlasError("one query at a time: there is text after a semicolon")
    _check_opening(found)
    for i, token in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        if token.keyword in _WRITES and _opens_clause(token, found[i - 1] if i else None, after):
            raise AtlasError(f"{token.keyword} would change the atlas; queries only read it")
        if token.keyword == "LOAD" and after is not None and after.keyword in ("FROM", "WITH", "CSV"):
            raise AtlasError("LOAD reads files; queries only read the atlas")
        if token.keyword == "CALL" and after is not None:
            _check_call(found[i + 1 :])
    return found


def _check_opening(found: list[Token]) -> None:
    words = [token.keyword or token.text.upper() for token in found[:3]]
    if words[0] in ("EXPLAIN", "PROFILE"):
        words = words[1:]
    if words[0] == "CYPHER":  # Neo4j's version prefix, `CYPHER 25`
        words = words[2:]
    if words and words[0] in _WRITES:
        raise AtlasError(f"{words[0]} would change the atlas; queries only read it")
    if not words or words[0] not in _OPENERS:
        begin = words[0] if words else found[-1].text
        raise AtlasError(f"a query begins with {', '.join(sorted(_OPENERS))}; this one with {begin}")


def _opens_clause(token: Token, before: Token | None, after: Token | None) -> bool:
    """Whether this word is a writing clause rather than a variable of that name.

    A clause is followed by what it changes: a pattern or a name. A variable is followed by an operator, a
    comma, a bracket, a keyword or nothing, and stands after one of those or after a keyword that takes an
    expression.
    """
    if after is None:
        return False
    if before is not None and (before.text in ("(", "[", ",", "=", "<", ">", "+", "-", "*", "/")):
        return False
    return after.text == "(" or (
        after.sort in ("word", "quoted") and after.keyword not in CLAUSES | {"AS", "ASC"}
    )


def _check_call(rest: list[Token]) -> None:
    """Admits `CALL name(…)` of the procedures that show something, and `CALL { … }` (checked token by
    token).
    """
    if rest[0].text in ("{", "("):
        return
    name = ""
    for token in rest:
        if token.sort not in ("word", "quoted") and token.text != ".":
            break
        name += token.text.strip("`").upper()
    follows = next((t.text for t in rest if t.sort == "mark" and t.text != "."), "")
    if follows != "(" or name not in _READING_CALLS:
        raise AtlasError(
            f"CALL {name.lower()} may change something; only {_listed(_READING_CALLS)} are allowed"
        )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(name.lower() for name in names))


def check_parameters(found: Sequence[Token], parameters: Mapping[str, Any]) -> None:
    """Raises `AtlasError` unless exactly the parameters that the query names are given, with values it
    can hold.

    The embedded engine takes a missing parameter for one that matches everything, and a null in a list for 0.
    """
    named = {token.text[1:].strip("`") for token in found if token.sort == "parameter"}
    for name in sorted(named - parameters.keys()):
        raise AtlasError(f"the query names the parameter ${name}; give it a value")
    for name in sorted(parameters.keys() - named):
        raise AtlasError(
            f"the query has no parameter ${name}" + (f"; it has {_dollars(named)}" if named else "")
        )
    for name, value in parameters.items():
        _check_value(name, value)


def _dollars(names: set[str]) -> str:
    return ", ".join(f"${name}" for name in sorted(names))


def _check_value(name: str, value: Any, *, inside: bool = False) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _check_value(name, item, inside=True)
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_value(name, item, inside=True)
    elif value is None:
        if inside:
            raise AtlasError(f"parameter ${name}: null inside a list or map cannot be passed")
    elif isinstance(value, bool | str):
        pass
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise AtlasError(f"parameter ${name}: {value} does not fit in 64 bits")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise AtlasError(f"parameter ${name}: {value} cannot be compared with anything in the atlas")
    else:
        raise AtlasError(
            f"parameter ${name}: a {type(value).__name__} is neither text, number, truth value nor list"
        )
