"""What a query may be: keywords are told from names, strings and comments; what writes or breaks is
refused.
"""

from __future__ import annotations

import pytest

from atlas.errors import AtlasError
from atlas.store.guard import check_parameters, check_query
from atlas.store.survivable import check_survivable

READING = [
    "MATCH (f:Feature) WHERE f.key = 'CREATE (x) DELETE y' RETURN f.set",
    "MATCH (f:Feature {set: 'n'}) RETURN f.set AS set ORDER BY set",
    "MATCH (set:Feature) WHERE set.layer > 1 RETURN set, set.key",
    "// CREATE (x)\nMATCH (n) /* DELETE n */ RETURN n;",
    "MATCH (n) RETURN \"it's\", 'SET x.y = \"1\"', 'a;b'",
    "MATCH (n:`CREATE`) RETURN n.`set`",
    "WITH 1 AS create RETURN create",
    "RETURN {load: 1, copy: 2, call: 3}",
    "MATCH (a)-[:DIRECT*1..3]->(b) RETURN count(DISTINCT a.id) AS n",
    "MATCH (a) WITH collect(a.id) AS ids UNWIND ids AS id RETURN count(DISTINCT id)",
    "MATCH (a) RETURN collect(DISTINCT a.id) AS ids, count(a.id) AS n",
    "MATCH (a) RETURN 'count(DISTINCT x)', collect(a.id)",
    "MATCH (n) WHERE EXISTS { MATCH (n)-[r]->(m) } RETURN n",
    "EXPLAIN MATCH (n) RETURN n",
    "CALL show_tables() RETURN *",
    "UNWIND [1, 2] AS x RETURN x UNION ALL RETURN 3 AS x",
    "CYPHER 25 MATCH (n) RETURN n",
]

WRITING = [
    "CREATE (x)",
    "/* hello */ create (n)",
    "MATCH (n)\n\tcReAtE (m) RETURN m",
    "MATCH (n) SET n.x = 1",
    "MATCH (n) SET n = {a: 1}",
    "MATCH (n) SET n:Label",
    "MATCH (n) DELETE n",
    "MATCH (n) DELETE `n`",
    "MATCH (n) DETACH DELETE n",
    "MATCH (n) REMOVE n.x",
    "MATCH (n) MERGE (m {id: n.id})",
    "MATCH (a) CALL { CREATE (n) } RETURN a",
    "MATCH p = (n) CREATE q = (n)-[:X]->(m)",
    "MATCH (n) FOREACH (x IN [1] | CREATE (m))",
    "COPY (MATCH (n) RETURN n.id) TO 'x.csv'",
    "EXPLAIN COPY Feature FROM 'y'",
    "PROFILE CREATE (n)",
    "CYPHER 25 CREATE (n)",
    "DROP TABLE Feature",
    "EXPORT DATABASE 'x'",
    "INSTALL json",
    "LOAD EXTENSION json",
    "ATTACH 'x' AS y",
    "LOAD FROM 'x.csv' RETURN *",
    "LOAD CSV FROM 'x' AS row RETURN row",
    "MATCH (n) LOAD FROM 'x.csv' RETURN *",
    "CALL threads = 1",
    "CALL apoc.do(1)",
    "CALL `drop_x`()",
    "CHECKPOINT",
    "BEGIN TRANSACTION",
    "USE x RETURN 1",
    "RETURN 1; MATCH (n) RETURN n",
    "RETURN 1; CREATE (x)",
]


@pytest.mark.parametrize("cypher", READING)
def test_reading_queries_pass(cypher: str) -> None:
    assert check_query(cypher)


@pytest.mark.parametrize("cypher", WRITING)
def test_everything_else_is_refused(cypher: str) -> None:
    with pytest.raises(AtlasError, match=r"read|begins with|one query|may change"):
        check_query(cypher)


@pytest.mark.parametrize("cypher", ["", "  \n", "// nothing", ";"])
def test_empty_queries_are_refused(cypher: str) -> None:
    with pytest.raises(AtlasError, match="empty"):
        check_query(cypher)


@pytest.mark.parametrize("cypher", ["RETURN 'abc", 'RETURN "abc', "RETURN `abc"])
def test_an_open_quote_is_named_with_its_place(cypher: str) -> None:
    with pytest.raises(AtlasError, match="character 8"):
        check_query(cypher)


@pytest.mark.parametrize(
    "cypher",
    [
        "MATCH (a) RETURN count(DISTINCT a.id), collect(a.id)",
        "MATCH (a) RETURN COLLECT(a.id) AS c, a.key, Count( /* x */ distinct a.id)",
        "MATCH (a) WITH a.key AS k, collect(a) AS c, sum(DISTINCT a.id) AS n WHERE n > 1 RETURN k",
        "MATCH (a) WITH a RETURN size(collect(a.id)) + count(DISTINCT a.id) ORDER BY 1",
    ],
)
def test_distinct_aggregates_beside_collect_are_refused_with_the_reason(cypher: str) -> None:
    with pytest.raises(AtlasError, match="corrupts"):
        check_survivable(check_query(cypher))


@pytest.mark.parametrize(
    "cypher",
    [
        "MATCH (a) RETURN a.key, count(DISTINCT a.id), count(*)",
        "MATCH (a) WITH a.key AS k, sum(DISTINCT a.id) AS s, max(a.id) AS m RETURN k",
        "MATCH (a) RETURN a.key, count(DISTINCT a.id) AS n ORDER BY sum(a.id)",
        "MATCH (a) RETURN a.key, count(*) AS n, count(DISTINCT a.id), min(a.key)",
        "MATCH (a) WITH a, collect(DISTINCT a.id) AS ids, avg(a.id) AS mean RETURN mean",
        "MATCH (a) RETURN a.key, count(DISTINCT a.id) / count(*) AS share",
    ],
)
def test_grouped_aggregates_after_distinct_ones_are_refused_with_the_reason(cypher: str) -> None:
    """Version 0.18.3 answers them with 0 and null, or crashes."""
    with pytest.raises(AtlasError, match="put the DISTINCT ones last"):
        check_survivable(check_query(cypher))


@pytest.mark.parametrize(
    "cypher",
    [
        "MATCH (a) RETURN a.key, count(*), max(a.id), count(DISTINCT a.id)",
        "MATCH (a) RETURN count(DISTINCT a.id), count(*)",
        "MATCH (a) WITH a.key AS k, count(DISTINCT a.id) AS n RETURN k, count(*)",
        "MATCH (a) RETURN a.key, count(*) AS n, count(DISTINCT a.id), sum(DISTINCT a.id) ORDER BY n LIMIT 3",
        "MATCH (a) RETURN a.key, collect(DISTINCT a.id) AS x, count(DISTINCT a.id) AS n",
    ],
)
def test_aggregates_that_the_engine_gets_right_pass(cypher: str) -> None:
    check_survivable(check_query(cypher))


@pytest.mark.parametrize(
    "cypher",
    [
        "MATCH p = (a)-[:DIRECT*1..2]->(b) WHERE all(x IN relationships(p) WHERE x.weight > 0) RETURN p",
        "MATCH p = (a)-[e:DIRECT|VIA_HEAD*2]->(b) WITH p RETURN ANY( x IN nodes(p) WHERE x.layer = 1)",
    ],
)
def test_quantifiers_over_paths_of_variable_length_are_refused_with_the_reason(cypher: str) -> None:
    with pytest.raises(AtlasError, match="write the hops out"):
        check_survivable(check_query(cypher))


@pytest.mark.parametrize("cypher", ["MATCH (n:Feature:Token) RETURN n", "MATCH (:Feature:Token) RETURN 1"])
def test_two_labels_are_refused_with_the_reason(cypher: str) -> None:
    with pytest.raises(AtlasError, match="one label"):
        check_survivable(check_query(cypher))


@pytest.mark.parametrize(
    "cypher",
    [
        "MATCH p = (a)-[r]->(b) WHERE all(x IN relationships(p) WHERE x.weight > 0) RETURN p",
        "MATCH (a)-[r:DIRECT*1..2]->(b) RETURN count(*) * 2",
        "MATCH (n:Feature|Token) RETURN {a: n.key, b: n.id}",
        "RETURN all(x IN [1, 2 * 3] WHERE x > 0)",
    ],
)
def test_what_only_looks_like_it_passes(cypher: str) -> None:
    check_survivable(check_query(cypher))


def check(cypher: str, **parameters: object) -> None:
    check_parameters(check_query(cypher), parameters)


def test_parameters_must_be_those_that_the_query_names() -> None:
    """The embedded engine takes a missing one for a condition that always holds."""
    check("MATCH (f) WHERE f.id = $id RETURN '$other'", id=3)
    with pytest.raises(AtlasError, match=r"\$id"):
        check("MATCH (f) WHERE f.id = $id RETURN f")
    with pytest.raises(AtlasError, match=r"no parameter \$layr; it has \$layer"):
        check("MATCH (f) WHERE f.layer = $layer RETURN f", layer=1, layr=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**63, [1, None], {"a": None}, object(), b"x"])
def test_values_that_cannot_be_passed_are_refused(value: object) -> None:
    with pytest.raises(AtlasError, match=r"\$x"):
        check("RETURN $x", x=value)
