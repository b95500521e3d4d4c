"""The embedded store: a ladybug database in the process, opened read-only at the atlas's current
generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import ladybug

from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.schema import NODES, RELATIONSHIPS
from atlas.store.contract import Store
from atlas.store.engine import open_database
from atlas.store.guard import Token, check_parameters, check_query
from atlas.store.result import Result
from atlas.store.survivable import check_survivable

__all__ = ["EmbeddedStore"]

READING_MEMORY = 2 << 30
"""Bytes of buffers by default: a bound, taken only as far as pages are read."""

_PROPERTIES = {
    name: frozenset(column.name for column in table.columns)
    for tables in (NODES, RELATIONSHIPS)
    for name, table in tables.items()
}


class EmbeddedStore(Store):
    """Many of these may be open at once, in one process or in several; none sees a load before it is
    complete.
    """

    def __init__(self, path: Path, *, memory: int | None = None) -> None:
        self.folder = AtlasFolder.open(path)
        self.uri = str(path)
        self._generation = self.folder.hold()
        try:
            self._database = open_database(
                self._generation.database, memory or READING_MEMORY, read_only=True
            )
        except RuntimeError as error:
            self._generation.close()
            raise AtlasError(
                f"{self._generation.database}: the database does not open ({_first_line(error)}); "
                "load the atlas again"
            ) from error

    @property
    def generation(self) -> str:
        """Name of the generation that this store reads."""
        return self._generation.name

    @property
    def arrays(self) -> Path:
        return self._generation.arrays

    def query(
        self, cypher: str, parameters: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Result:
        found = check_query(cypher)
        parameters = dict(parameters or {})
        check_survivable(found)
        check_parameters(found, parameters)
        if self._database.is_closed:
            raise AtlasError(f"{self.uri}: this store is closed")
        cypher, parameters = _with_integers(cypher, found, parameters)
        connection = ladybug.Connection(self._database)  # one a query (0.4 ms): threads are independent
        try:
            if timeout is not None:
                connection.set_query_timeout(max(1, int(timeout * 1000)))
            if _may_close_a_cycle(found):
                _check_plan(connection, cypher, parameters)
            answer = connection.execute(cypher, parameters)
            if isinstance(answer, list):  # several statements; the guard admits one
                raise AtlasError("one query at a time")
            columns = tuple(answer.get_column_names())
            types = answer.get_column_data_types()
            rows = answer.get_all()
            answer.close()
        except RuntimeError as error:
            raise AtlasError(_explain(error, timeout)) from error
        finally:
            connection.close()
        if any(_needs_translation(type) for type in types):
            return Result(columns, tuple(tuple(_plain(value) for value in row) for row in rows))
        return Result(columns, tuple(map(tuple, rows)))

    def close(self) -> None:
        self._database.close()
        self._generation.close()


def _with_integers(
    cypher: str, found: Sequence[Token], parameters: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The query with its integer parameters written into it.

    Given as parameters they are taken for the narrowest type that holds them, so that `$x * $x` overflows at
    x = 12; written out they are 64 bits wide.
    """
    whole = {name: value for name, value in parameters.items() if type(value) is int}
    for token in reversed(found):
        name = token.text[1:].strip("`")
        if token.sort == "parameter" and name in whole:
            end = token.start + len(token.text)
            literal = str(whole[name]) if whole[name] >= 0 else f"({whole[name]})"
            cypher = cypher[: token.start] + literal + cypher[end:]
    return cypher, {name: value for name, value in parameters.items() if name not in whole}


def _may_close_a_cycle(found: Sequence[Token]) -> bool:
    """Whether the query has three relationships or more: each is written with two dashes."""
    return found[0].keyword not in ("EXPLAIN", "PROFILE") and sum(token.text == "-" for token in found) >= 6


def _check_plan(connection: ladybug.Connection, cypher: str, parameters: dict[str, Any]) -> None:
    """Refuses a query for which the engine plans its join of cyclic patterns: it counts two edges between the
    same nodes (of two readings, through two heads) as one. Taking the cycle apart gives another join.
    """
    plan = connection.execute(f"EXPLAIN {cypher}", parameters)
    if not isinstance(plan, list) and any("INTERSECT" in str(line) for line in plan.get_all()):
        raise AtlasError(
            "the engine answers patterns that close a cycle wrongly where two edges join the same nodes; "
            "close it after a WITH: MATCH (a)-[r]->(b)-[s]->(c) WITH a, b, c, r, s MATCH (a)-[t]->(c) …"
        )


def _needs_translation(type: str) -> bool:
    """Whether the engine's values are not yet what a query answers: graph elements, sums of integers."""
    return any(name in type for name in ("NODE", "REL", "INTERNAL_ID", "STRUCT", "UNION", "MAP", "INT128"))


def _plain(value: Any) -> Any:
    """Takes the engine's row addresses out of nodes, relationships and paths, wherever they are nested."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Decimal):  # how the engine's 128-bit sums of integers arrive
        return int(value) if value == value.to_integral_value() else value
    if not isinstance(value, dict):
        return value
    if "_NODES" in value and "_RELS" in value:
        return {"nodes": _plain(value["_NODES"]), "relationships": _plain(value["_RELS"])}
    if "_LABEL" in value:
        label = value["_LABEL"]
        own = _PROPERTIES.get(label, frozenset())
        kept = {name: item for name, item in value.items() if name in own and item is not None}
        return {"_type" if "_SRC" in value else "_label": label, **kept}
    if value.keys() == {"offset", "table"}:
        return f"{value['table']}:{value['offset']}"
    return {name: _plain(item) for name, item in value.items()}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=4, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(known)}"


def _explain(error: RuntimeError, timeout: float | None) -> str:
    """The engine's complaint in one line, with what to do where we know it."""
    text = str(error).strip()
    line = text.split("\n", 1)[0]
    if line.startswith("Interrupted"):
        limit = f" after {timeout:g} s" if timeout is not None else ""
        return f"the query was stopped{limit}; bound it (LIMIT, fewer hops) or give it a longer timeout"
    if match := re.search(r"Cannot find property (\S+) for (\S+?)\.?$", line):
        known = sorted({name for own in _PROPERTIES.values() for name in own})
        having = [name for name, own in _PROPERTIES.items() if match[1] in own]
        if having:
            return f"no property {match[1]} on {match[2]}; it is one of {', '.join(having)}"
        return f"no property {match[1]} on {match[2]}{_nearest(match[1], known)}"
    if match := re.search(r"Table (\S+) does not exist", line):
        return f"no label or type {match[1]}{_nearest(match[1], list(_PROPERTIES))}"
    if "read-only" in line:
        return "the query would change the atlas; queries only read it"
    if ("buffer" in line.lower() and "memory" in line.lower()) or line.startswith("Buffer manager exception"):
        return "the query needs more memory than the store has; bound it (LIMIT, fewer hops, fewer columns)"
    if match := re.match(r"Parser exception: (.*?)(?: \(line: (\d+), offset: (\d+)\))?$", line):
        place = f" (line {match[2]}, character {int(match[3]) + 1})" if match[2] else ""
        expected = re.sub(r"expecting \{.{60,}\}", "", match[1]).strip()
        return f"the query does not parse: {expected}{place}"
    return re.sub(r"^[A-Z]\w+ exception: ", "", line)
