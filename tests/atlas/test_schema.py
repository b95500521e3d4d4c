"""The schema is one declaration: what is derived from it agrees with it, and every name works in Cypher."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from atlas.schema import ARTIFACT_TABLES, NODES, RELATIONSHIPS, artifact_schema, edge_identity, properties
from atlas.schema_docs import schema_document
from tests.atlas.conftest import Toy

ROOT = Path(__file__).parents[2]


def test_every_label_and_property_runs_unquoted(toy: Toy) -> None:
    """Reserved words differ between databases; a name of ours that needs quotes on one of them is a
    mistake.
    """
    for label, table in NODES.items():
        for name in (column.name for column in table.columns):
            answer = toy.store.query(
                f"MATCH (n:{label}) WHERE n.{name} IS NOT NULL"
                f" RETURN n.{name} AS {name} ORDER BY {name} LIMIT 3"
            )
            assert answer.columns == (name,)
            toy.store.query(f"MATCH (n:{label} {{{name}: null}}) RETURN count(n.{name}) AS {name}")


def test_every_type_and_property_runs_unquoted(toy: Toy) -> None:
    for type, table in RELATIONSHIPS.items():
        pattern = f"(a:{table.source})-[r:{type}]->(b:{table.target})"
        assert toy.store.query(f"MATCH {pattern} RETURN count(*) AS number").rows[0][0] >= 0
        for name in (column.name for column in table.columns):
            answer = toy.store.query(
                f"MATCH {pattern} WHERE r.{name} IS NULL RETURN r.{name} AS {name} LIMIT 3"
            )
            assert answer.columns == (name,)


def test_type_of_a_relationship_has_the_same_name_on_every_store(toy: Toy) -> None:
    answer = toy.store.query("MATCH (:Token)-[r:EMBEDS]->(:Feature) RETURN DISTINCT type(r) AS type")
    assert answer.rows == (("EMBEDS",),)


def test_docs_are_current() -> None:
    assert (ROOT / "docs" / "schema.md").read_text() == schema_document()


def test_relationships_join_labels_that_exist() -> None:
    for table in RELATIONSHIPS.values():
        assert {table.source, table.target} <= NODES.keys()


@pytest.mark.parametrize("name", ARTIFACT_TABLES)
def test_artifact_columns_are_what_they_fill(name: str) -> None:
    """A property that an artifact and the database share has the same meaning in both."""
    table = ARTIFACT_TABLES[name]
    own = {column.name: column for column in properties(table.fills)}
    for column in table.columns:
        if column.name in own:
            assert own[column.name].kind.embedded == column.kind.embedded
            assert own[column.name].unit == column.unit


@pytest.mark.parametrize("name", ARTIFACT_TABLES)
def test_artifact_schemas_survive_parquet(name: str) -> None:
    """Also the dictionary-encoded columns, which Parquet does not know of itself."""
    file = io.BytesIO()
    pq.write_table(artifact_schema(name).empty_table(), file)
    assert pq.read_schema(file).equals(artifact_schema(name))


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="DIRECT"):
        artifact_schema("DIRECTS")
    with pytest.raises(KeyError, match="Feature"):
        properties("Features")


def test_edges_are_identified_by_what_their_type_has() -> None:
    assert edge_identity("VIA_HEAD") == ("source", "target", "reading", "layer", "head")
    assert edge_identity("DIRECT") == ("source", "target", "reading")
    assert edge_identity("PROMOTES") == ("source", "target")


def test_the_schema_is_read_without_anything_heavy() -> None:
    """Look-ups start with it, so it must not bring pyarrow along."""
    code = "import sys, atlas.schema; print([m for m in ('pyarrow', 'numpy', 'ladybug') if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
