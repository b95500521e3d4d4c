"""The graph, declared once: labels, relationship types, properties, and the artifacts they are loaded from.

The stores' DDL, the Arrow schemas of artifacts, the loader, `docs/schema.md` and the validation of what is
loaded come from here. Tables that later work fills (contexts, clusters, circuits) exist from the start,
empty: the embedded database refuses a query that names a label or a property it does not know.

Three conventions:

- Every node has an integer `id`, by which relationships load and join, and a readable `key`. Everything that
  a step made carries `step`, the id of its Step.
- A value is the same number wherever it is kept: a float32 weight is stored as the DOUBLE that equals it.
- One head hop is stored (VIA_HEAD). Longer compositions of heads are paths of the graph, not edges.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from atlas.artifact_tables import ARTIFACT_TABLES
from atlas.columns import ArtifactTable, Column, Kind, NodeTable, RelationshipTable
from atlas.graph import NODES, RELATIONSHIPS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ARTIFACT_TABLES",
    "EDGE_IDENTITY",
    "MACROS",
    "NODES",
    "RELATIONSHIPS",
    "SCHEMA_VERSION",
    "ArtifactTable",
    "Column",
    "Kind",
    "NodeTable",
    "RelationshipTable",
    "add_column",
    "artifact_schema",
    "create_table",
    "ddl",
    "edge_identity",
    "properties",
]

SCHEMA_VERSION = 2
"""Raised when a change would make an older program misread an atlas. Written into atlas.json."""

EDGE_IDENTITY = ("source", "target", "reading", "layer", "head")
"""What tells two edges of one type apart: those of these columns that the type has."""


def artifact_schema(table: str) -> pa.Schema:
    """The Arrow schema of an artifact table: what its Parquet file is written with and checked against.

    Raises `KeyError` naming the known tables if `table` is none of them.
    """
    import pyarrow as pa

    if table not in ARTIFACT_TABLES:
        raise KeyError(f"no artifact table {table!r}; there are {', '.join(ARTIFACT_TABLES)}")
    return pa.schema(
        [
            pa.field(column.name, column.kind.arrow_type(), nullable=column.nullable)
            for column in ARTIFACT_TABLES[table].columns
        ]
    )


def properties(label_or_type: str) -> tuple[Column, ...]:
    """The properties of a label or relationship type, in the order of its columns in the embedded database.

    Raises `KeyError` naming what there is.
    """
    if label_or_type in NODES:
        return NODES[label_or_type].columns
    if label_or_type in RELATIONSHIPS:
        return RELATIONSHIPS[label_or_type].columns
    raise KeyError(f"no label or type {label_or_type!r}; there are {', '.join((*NODES, *RELATIONSHIPS))}")


def edge_identity(type: str) -> tuple[str, ...]:
    """The columns that identify an edge of this type, beginning with its two ends."""
    own = {column.name for column in RELATIONSHIPS[type].columns}
    return tuple(name for name in EDGE_IDENTITY if name in own or name in ("source", "target"))


def create_table(label_or_type: str, columns: Collection[str] | None = None) -> str:
    """The statement that makes one table of the embedded database, with some of its columns or all.

    Columns without a value anywhere are cheaper to add after a load (`add_column`) than to load as nulls:
    a sixth of the time and a third of the memory of 5M edges with the four columns of a harvest.
    """
    own = [column for column in properties(label_or_type) if columns is None or column.name in columns]
    parts = [f"{column.name} {column.kind.embedded}" for column in own]
    if label_or_type in NODES:
        return f"CREATE NODE TABLE {label_or_type}({', '.join(parts)}, PRIMARY KEY (id))"
    ends = RELATIONSHIPS[label_or_type]
    return f"CREATE REL TABLE {label_or_type}({', '.join([f'FROM {ends.source} TO {ends.target}', *parts])})"


def add_column(label_or_type: str, column: Column) -> str:
    """The statement that adds an empty column to a table of the embedded database."""
    return f"ALTER TABLE {label_or_type} ADD {column.name} {column.kind.embedded}"


MACROS = ("CREATE MACRO type(r) AS label(r)",)  # Neo4j's name for it, so that queries run on both


def ddl() -> list[str]:
    """The statements that make the empty embedded database, in an order it accepts."""
    return [*(create_table(name) for name in (*NODES, *RELATIONSHIPS)), *MACROS]
