"""One number for everything a store answers: to compare a load with another, or one database with the
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from atlas.schema import NODES, RELATIONSHIPS
from atlas.store.contract import Store

__all__ = ["content_checksum"]

TIMES = ("started", "ended")
"""What differs between two runs that did the same."""


def content_checksum(store: Store) -> str:
    """A checksum of all rows, whatever their order, the ids given out and the times of runs.

    Ends and steps are taken by their keys and numbers bit for bit. It reads the whole database: a minute
    for ten million edges.
    """
    steps = dict(store.query("MATCH (s:Step) RETURN s.id, s.key").rows)
    total = 0
    for label, node in NODES.items():
        names = [column.name for column in node.columns if column.name not in ("id", "step", *TIMES)]
        shown = [f"n.{name}" for name in names] + (["n.step"] if label not in ("Run", "Step") else [])
        rows = store.query(f"MATCH (n:{label}) RETURN {', '.join(shown)}").rows
        total += _sum(label, _with_step(rows, steps) if "n.step" in shown else rows)
    for type, edge in RELATIONSHIPS.items():
        shown = ["a.key", "b.key"] + [f"r.{column.name}" for column in edge.columns]
        ends = f"(a:{edge.source})-[r:{type}]->(b:{edge.target})"
        rows = store.query(f"MATCH {ends} RETURN {', '.join(shown)}").rows
        total += _sum(type, _with_step(rows, steps) if shown[-1] == "r.step" else rows)
    return f"{total % 2**128:032x}"


def _with_step(rows: Iterable[tuple[Any, ...]], steps: dict[int, str]) -> Iterable[tuple[Any, ...]]:
    """The rows with the key of their step in place of its id, which stands last."""
    return ((*row[:-1], steps.get(row[-1])) for row in rows)


def _sum(table: str, rows: Iterable[tuple[Any, ...]]) -> int:
    """The sum of the rows' own checksums: the same for every order, different if a row is there twice."""
    digests = (blake2b(repr((table, row)).encode(), digest_size=16).digest() for row in rows)
    return sum(int.from_bytes(digest) for digest in digests)
