"""What the embedded engine (ladybug 0.18.3) crashes on or answers wrongly, recognised before it runs.

Found by generated queries (`tests/atlas/cypher_fuzz.py`) whose answers numpy knows, each run in a process
of its own. One more is seen only in the engine's plan: its join of cyclic patterns
(`atlas/store/embedded.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atlas.errors import AtlasError
from atlas.store.guard import CLAUSES, Token

__all__ = ["check_survivable"]


def check_survivable(found: Sequence[Token]) -> None:
    """Refuses what the embedded engine (ladybug 0.18.3) crashes on or answers wrongly.

    - count(DISTINCT …) beside collect(…) in one projection corrupts its memory;
    - in a projection with grouping keys, an aggregate after a DISTINCT one comes out as 0 or null;
    - all, any, none or single over the elements of a path of variable length ends the process;
    - `(n:A:B)` is taken for A or B, where Cypher means A and B.
    """
    _check_quantifiers(found)
    _check_labels(found)
    for part in _projections(found):
        items = _items(part)
        calls = [call for item in items for call in item]
        distinct = [call for call in calls if call.distinct]
        if any(call.name == "COLLECT" and not call.distinct for call in calls) and distinct:
            raise AtlasError(
                f"{distinct[0]} together with collect(…) in one WITH or RETURN corrupts the engine's memory; "
                "put them into two (WITH … collect(…) AS list, then the other)"
            )
        grouped = any(not item for item in items)
        plain = [i for i, call in enumerate(calls) if not call.distinct]
        if grouped and distinct and plain and plain[-1] > calls.index(distinct[0]):
            raise AtlasError(
                f"{calls[plain[-1]]} after {distinct[0]} in a WITH or RETURN with grouping keys is answered "
                f"wrongly by the engine; put the DISTINCT ones last"
            )


_AGGREGATES = {"COUNT", "SUM", "AVG", "MIN", "MAX", "COLLECT", "PERCENTILEDISC", "COUNT_STAR"}


@dataclass(frozen=True)
class _Call:
    """An aggregate in a projection."""

    name: str
    distinct: bool

    def __str__(self) -> str:
        return f"{self.name.lower()}({'DISTINCT ' if self.distinct else ''}…)"


def _items(part: Sequence[Token]) -> list[list[_Call]]:
    """The aggregates of each item of a projection, its ORDER BY included; an item without any is a key."""
    items: list[list[_Call]] = [[]]
    depth = part[0].depth if part else 0
    beyond = False
    for i, token in enumerate(part):
        if token.depth == depth and token.keyword in ("ORDER", "SKIP", "LIMIT"):
            beyond = True  # what stands there is no grouping key, but its aggregates count
        if token.text == "," and token.depth == depth and not beyond:
            items.append([])
        called = i + 2 < len(part) and part[i + 1].text == "("
        if called and token.keyword in _AGGREGATES:
            items[-1].append(_Call(token.keyword, part[i + 2].keyword == "DISTINCT"))
    return items


def _projections(found: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens of each WITH and RETURN, up to the next clause of the same depth."""
    for i, token in enumerate(found):
        if token.keyword not in ("WITH", "RETURN"):
            continue
        part = []
        for following in found[i + 1 :]:
            if following.depth < token.depth:
                break
            if following.depth == token.depth and following.keyword in CLAUSES - {"ORDER", "SKIP", "LIMIT"}:
                break
            part.append(following)
        yield part


def _check_quantifiers(found: Sequence[Token]) -> None:
    starts = [i for i, token in enumerate(found) if i and token.text == "[" and found[i - 1].text == "-"]
    lengths = (found[i : i + 8] for i in starts)
    if not any(token.text == "*" and token.depth > part[0].depth for part in lengths for token in part):
        return
    for i, token in enumerate(found[:-3]):
        quantifies = token.keyword in ("ALL", "ANY", "NONE", "SINGLE")
        if quantifies and found[i + 1].text == "(" and found[i + 3].text.upper() == "IN":
            raise AtlasError(
                f"{token.keyword.lower()}(…) over a path of variable length crashes the engine; write "
                "the hops out: MATCH (a)-[r]->(b)-[s]->(c) WHERE r.weight > 0 AND s.weight > 0"
            )


def _check_labels(found: Sequence[Token]) -> None:
    for i, token in enumerate(found[:-4]):
        named = [following.text for following in found[i + 1 : i + 5]]
        names = token.text == "(" or (token.sort == "word" and i and found[i - 1].text == "(")
        if names and named[0] == named[2] == ":":
            one, other = named[1], named[3]
            raise AtlasError(
                f"a node has one label: (:{one}|{other}) is either, (:{one}:{other}) would be none"
            )
