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

from typing import TYPE_CHECKING

from atlas.artifact_tables import ARTIFACT_TABLES
from atlas.columns import ArtifactTable, Column, Kind, NodeTable, RelationshipTable
from atlas.graph import NODES, RELATIONSHIPS

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ARTIFACT_TABLES",
    "EDGE_IDENTITY",
    "NODES",
    "RELATIONSHIPS",
    "SCHEMA_VERSION",
    "ArtifactTable",
    "Column",
    "Kind",
    "NodeTable",
    "RelationshipTable",
    "artifact_schema",
    "ddl",
    "edge_identity",
    "properties",
]

SCHEMA_VERSION = 1
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


def ddl() -> list[str]:
    """The statements that make the empty embedded database, in an order it accepts."""
    statements = []
    for node in NODES.values():
        columns = ", ".join(f"{column.name} {column.kind.embedded}" for column in node.columns)
        statements.append(f"CREATE NODE TABLE {node.label}({columns}, PRIMARY KEY (id))")
    for relationship in RELATIONSHIPS.values():
        parts = [f"FROM {relationship.source} TO {relationship.target}"]
        parts += [f"{column.name} {column.kind.embedded}" for column in relationship.columns]
        statements.append(f"CREATE REL TABLE {relationship.type}({', '.join(parts)})")
    statements.append("CREATE MACRO type(r) AS label(r)")  # Neo4j's name for it, so that queries run on both
    return statements
