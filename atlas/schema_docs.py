"""`docs/schema.md`, written from the schema: `python -m atlas.schema_docs > docs/schema.md`."""

from __future__ import annotations

from collections.abc import Iterable

from atlas.schema import ARTIFACT_TABLES, NODES, RELATIONSHIPS, SCHEMA_VERSION, Column, edge_identity

__all__ = ["schema_document"]

_HEAD = f"""# The graph (schema {SCHEMA_VERSION})

Written from `atlas/schema.py` by `python -m atlas.schema_docs`; change it there.

Every node has an integer `id`, by which relationships load and join, and a readable `key`. Weights are
input-invariant: norm scales are left out. A float32 value is stored as the DOUBLE that equals it exactly.
One head hop is stored; longer compositions of heads are paths of the graph, not edges. Labels, types and
properties that nothing has filled yet exist, empty. On the embedded database `IN`, `index`, `order` and
`end` are reserved words; none of the names here is.
"""


def schema_document() -> str:
    """The whole document, as Markdown."""
    parts = [_HEAD, "## Nodes\n"]
    for node in NODES.values():
        parts.append(f"### {node.label}\n\n{node.description} Key: `{node.key}`.\n\n{_table(node.columns)}")
    parts.append("## Relationships\n")
    for edge in RELATIONSHIPS.values():
        pattern = f"(:{edge.source})-[:{edge.type}]->(:{edge.target})"
        text = f"### {edge.type}\n\n`{pattern}` {edge.description}"
        if edge.arrays:
            text += f" Identified by ({', '.join(edge_identity(edge.type))}); also kept as adjacency arrays."
        parts.append(f"{text}\n\n{_table(edge.columns)}" if edge.columns else f"{text}\n")
    parts.append("## Artifacts\n\nParquet files of steps, by table. Nodes are named by hash and number.\n")
    for table in ARTIFACT_TABLES.values():
        heading = f"### {table.name}.parquet\n\n{table.description} Fills `{table.fills}`."
        parts.append(f"{heading}\n\n{_table(table.columns, artifact=True)}")
    return "\n".join(parts)


def _table(columns: Iterable[Column], *, artifact: bool = False) -> str:
    lines = ["| property | type | unit | meaning |", "|---|---|---|---|"]
    if artifact:
        lines[0] = lines[0].replace("property", "column")
    for column in columns:
        kind = column.kind.arrow if artifact else column.kind.embedded
        text = f"{column.description}{' (may be null)' if column.nullable else ''}".replace("|", "\\|")
        lines.append(f"| `{column.name}` | {kind} | {column.unit} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(schema_document(), end="")
