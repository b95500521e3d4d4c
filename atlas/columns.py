"""The types in which the schema is declared: columns, node tables, relationship tables, artifact tables.

The declarations are in `atlas/graph.py` and `atlas/artifact_tables.py`; the rest of the program takes both
from `atlas/schema.py`. pyarrow is imported only where an Arrow type is asked for: a look-up does without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArtifactTable", "Column", "Kind", "NodeTable", "RelationshipTable"]


class Kind(Enum):
    """The type of a column: in the embedded database, in Neo4j's import header, in artifacts."""

    INT = ("INT", "INT64", "long", "int64")
    SMALL_INT = ("SMALL_INT", "INT32", "long", "int32")
    LAYER = ("LAYER", "INT16", "long", "int32")  # layers and heads of edges: small in the load's memory
    DOUBLE = ("DOUBLE", "DOUBLE", "double", "double")
    FLOAT = (
        "FLOAT",
        "DOUBLE",
        "double",
        "float",
    )  # float32 in artifacts; the double of equal value in databases
    BOOLEAN = ("BOOLEAN", "BOOL", "boolean", "bool")
    STRING = ("STRING", "STRING", "string", "string")
    NAME = ("NAME", "STRING", "string", "dictionary")  # one of few strings, dictionary-encoded in artifacts

    def __init__(self, label: str, embedded: str, neo4j: str, arrow: str) -> None:
        self.label = label
        self.embedded = embedded
        self.neo4j = neo4j
        self.arrow = arrow

    def arrow_type(self) -> pa.DataType:
        """The type of an artifact's column of this kind."""
        import pyarrow as pa

        if self is Kind.NAME:
            return pa.dictionary(pa.int32(), pa.string())
        return pa.type_for_alias(self.arrow)

    def database_arrow_type(self) -> pa.DataType:
        """The Arrow type whose values a database column of this kind takes as they are."""
        import pyarrow as pa

        aliases = {"INT64": "int64", "INT32": "int32", "INT16": "int16", "DOUBLE": "double", "BOOL": "bool"}
        return pa.type_for_alias(aliases.get(self.embedded, "string"))


@dataclass(frozen=True)
class Column:
    """One property of a node or relationship, or one column of an artifact table."""

    name: str
    kind: Kind
    description: str
    unit: str = ""
    nullable: bool = False


@dataclass(frozen=True)
class NodeTable:
    """A label. `id` is the primary key in the databases, `key` is what a person reads and writes."""

    label: str
    key: str
    description: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class RelationshipTable:
    """A relationship type from one label to another.

    `arrays` says whether memory-mapped adjacency arrays are made of it (`csr/<generation>/<TYPE>/`).
    """

    type: str
    source: str
    target: str
    description: str
    columns: tuple[Column, ...]
    arrays: bool = False


@dataclass(frozen=True)
class ArtifactTable:
    """A Parquet file in the folder of a finished step, named `<name>.parquet`.

    `fills` is the label or the relationship type whose rows it becomes. Nodes are named by a content hash and
    a number, never by an atlas's ids.
    """

    name: str
    fills: str
    description: str
    columns: tuple[Column, ...]
