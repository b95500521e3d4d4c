"""The contract of a store: what the rest of the program may ask, whichever database answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.schema import NODES, RELATIONSHIPS
from atlas.store.result import Result

__all__ = ["Store"]


class Store(ABC):
    """An open atlas, read-only. Closing it twice is fine; it is a context manager."""

    uri: str

    @property
    @abstractmethod
    def arrays(self) -> Path:
        """Folder of the adjacency arrays that belong to what the store answers (`atlas/store/arrays.py`)."""

    @abstractmethod
    def query(
        self, cypher: str, parameters: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Result:
        """Answers one reading Cypher query.

        `timeout` is in seconds; None means no limit. Raises `AtlasError` if the query would write, is
        known to break the engine, does not parse, names what the schema does not have, takes too long or
        too much memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the database."""

    def counts(self) -> dict[str, int]:
        """Number of nodes of each label and of relationships of each type, in the schema's order."""
        counts = {}
        for label in NODES:
            counts[label] = self.query(f"MATCH (n:{label}) RETURN count(*) AS number").rows[0][0]
        for type in RELATIONSHIPS:
            counts[type] = self.query(f"MATCH ()-[r:{type}]->() RETURN count(*) AS number").rows[0][0]
        return counts

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
