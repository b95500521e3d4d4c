"""The contract of a store: what answers look like, what is refused, in one clear line."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atlas.errors import AtlasError
from atlas.schema import NODES, RELATIONSHIPS
from atlas.store import open_store
from atlas.store.guard import tokens
from tests.atlas.conftest import Toy


def test_rows_are_plain_values_under_the_names_of_return(toy: Toy) -> None:
    answer = toy.store.query(
        "MATCH (f:Feature) WHERE f.layer = $layer AND f.number < 2"
        " RETURN f.key AS key, f.write_norm AS norm, f.label AS label ORDER BY key",
        {"layer": 1},
    )
    assert answer.columns == ("key", "norm", "label")
    assert answer.rows == (("toy/neurons/L01.mlp/0", 13.0, None), ("toy/neurons/L01.mlp/1", 14.0, None))
    assert answer.column("norm") == [13.0, 14.0]
    assert list(answer)[1] == {"key": "toy/neurons/L01.mlp/1", "norm": 14.0, "label": None}
    with pytest.raises(KeyError, match="key, norm, label"):
        answer.column("none")


def test_answers_become_arrow_and_pandas(toy: Toy) -> None:
    answer = toy.store.query("MATCH (h:Head) RETURN h.layer AS layer, h.key AS key ORDER BY key")
    assert answer.to_arrow().to_pydict() == {"layer": answer.column("layer"), "key": answer.column("key")}
    frame = answer.to_pandas()
    assert list(frame.columns) == ["layer", "key"] and frame["layer"].tolist() == answer.column("layer")
    none = toy.store.query("MATCH (c:Circuit) RETURN c.key AS key")
    assert none.rows == () and list(none.to_pandas().columns) == ["key"] and none.to_arrow().num_rows == 0


def test_nodes_relationships_and_paths_are_dicts_without_row_addresses(toy: Toy) -> None:
    answer = toy.store.query(
        "MATCH p = (a:Feature)-[r:VIA_HEAD]->(b:Feature) RETURN a, r, p ORDER BY a.id, b.id, r.weight LIMIT 1"
    )
    node, edge, path = answer.rows[0]
    assert node["_label"] == "Feature" and node["key"].startswith("toy/neurons/")
    assert edge["_type"] == "VIA_HEAD"
    assert set(edge) == {"_type", "layer", "head", "reading", "weight", "z", "rank_in", "rank_out", "step"}
    assert set(path) == {"nodes", "relationships"}
    assert path["nodes"][0] == node and path["relationships"] == [edge]
    collected = toy.store.query(
        "MATCH (f:Feature) WHERE f.id = $id RETURN collect(f) AS nodes", {"id": node["id"]}
    )
    assert collected.rows == (([node],),)


def test_nodes_of_any_label_keep_only_their_own_properties(toy: Toy) -> None:
    answer = toy.store.query("MATCH (n) WHERE n.key = 'toy' OR n.key = 'toy/L01.H00' RETURN n ORDER BY n.key")
    (model,), (head,) = answer.rows
    assert model["_label"] == "Model" and set(model) <= {"_label"} | {c.name for c in NODES["Model"].columns}
    assert head["_label"] == "Head" and set(head) <= {"_label"} | {c.name for c in NODES["Head"].columns}


def test_sums_of_integers_are_integers(toy: Toy) -> None:
    (total,) = toy.store.query("MATCH (f:Feature) RETURN sum(f.number) AS total").rows[0]
    assert total == 4 * sum(range(12)) and isinstance(total, int)
    (total,) = toy.store.query("MATCH ()-[r:VIA_HEAD]->() RETURN sum(r.rank_in) AS total").rows[0]
    assert total == toy.model.edges["VIA_HEAD"]["rank_in"].sum() and isinstance(total, int)


def test_thresholds_compare_as_float64(toy: Toy) -> None:
    """The float32 next to 0.25 is not 0.25, wherever the comparison is made."""
    weight = toy.model.edges["DIRECT"]["weight"].astype(np.float64)
    for threshold in (0.25, np.nextafter(0.25, 1), float(np.float32(0.1)), 0.1):
        answer = toy.store.query(
            "MATCH ()-[r:DIRECT]->() WHERE r.weight >= $t RETURN count(*)", {"t": threshold}
        )
        assert answer.rows == (((weight >= threshold).sum(),),)


@pytest.mark.parametrize(
    "value", ["it's", 'a "quote"', "back\\slash", "line\nbreak", "🙂 é", "", "NUL\x00byte"]
)
def test_parameters_come_back_exact(toy: Toy, value: str) -> None:
    assert toy.store.query("RETURN $x AS x", {"x": value}).rows == ((value,),)
    found = toy.store.query("MATCH (t:Token) WHERE t.text = $x RETURN t.text", {"x": value})
    assert found.rows == ((value,),)


def test_small_numbers_as_parameters_do_not_overflow(toy: Toy) -> None:
    """The engine takes 100 for an 8-bit integer; its products must not be."""
    assert toy.store.query("RETURN $x * 1000 AS y, $x * $x AS z", {"x": 100}).rows == ((100_000, 10_000),)
    assert toy.store.query("RETURN 1 - $x AS y, '$x' AS z LIMIT $x", {"x": 2}).rows == ((-1, "$x"),)
    assert toy.store.query("RETURN 1-$x AS y, $x AS z", {"x": -5}).rows == ((6, -5),)
    ids = toy.store.query("MATCH (f:Feature) WHERE f.number IN $n RETURN count(*)", {"n": [1, 3, 2**40]})
    assert ids.rows == ((8,),)
    assert toy.store.query("MATCH (f:Feature) WHERE f.number IN $n RETURN f.id", {"n": []}).rows == ()


@pytest.mark.parametrize(
    ("cypher", "says"),
    [
        ("MATCH (f:Feature) RETURN f.wieght", r"no property wieght on f; did you mean .*weight"),
        ("MATCH (f:Featur) RETURN f", r"no label or type Featur; did you mean Feature"),
        ("MATCH ()-[r:VIAHEAD]->() RETURN r", r"no label or type VIAHEAD; did you mean VIA_HEAD"),
        ("MATCH (t:Token) RETURN t.write_norm", r"no property write_norm on t; it is one of Feature"),
        ("MATCH (f:Feature RETURN f", r"does not parse: .*line 1, character \d+"),
        ("MATCH (f:Feature) RETURN g", r"g"),
        ("MATCH (f:Feature) RETURN f.layer + {a: 1}", r"\+"),
        ("RETURN 1 / 0", r"[Dd]ivide by zero"),
    ],
)
def test_mistakes_are_one_line_with_what_to_do(toy: Toy, cypher: str, says: str) -> None:
    with pytest.raises(AtlasError, match=says) as raised:
        toy.store.query(cypher)
    assert "\n" not in str(raised.value) and "exception" not in str(raised.value)


def test_a_cycle_is_refused_where_the_engine_loses_edges_and_its_remedy_is_right(toy: Toy) -> None:
    """Counted from the edges: a pair of nodes is joined by several."""
    edges = toy.model.edges["DIRECT"]
    joined = Counter(zip(edges["source"].tolist(), edges["target"].tolist(), strict=True))
    loops = sum(
        n * m * joined[a, c] for (a, b), n in joined.items() for (other, c), m in joined.items() if other == b
    )
    first, last = (
        "MATCH (a:Feature)-[r:DIRECT]->(b:Feature)-[s:DIRECT]->(c:Feature)",
        "MATCH (a)-[t:DIRECT]->(c)",
    )
    apart = toy.store.query(f"{first} WITH a, b, c, r, s {last} RETURN count(*) AS n")
    assert apart.rows == ((loops,),)
    if toy.store.uri.startswith("neo4j"):
        assert toy.store.query(f"{first} {last} RETURN count(*) AS n").rows == ((loops,),)
        return
    for cypher in (f"{first} {last} RETURN count(*)", f"{first}<-[t:DIRECT]-(a) RETURN count(*)"):
        with pytest.raises(AtlasError, match="close it after a WITH"):
            toy.store.query(cypher)


def test_a_query_that_takes_too_long_is_stopped(toy: Toy) -> None:
    unwind = " ".join(f"UNWIND range(1, 5000) AS {name}" for name in "xyz")
    start = time.monotonic()
    with pytest.raises(AtlasError, match=r"stopped after 0.3 s"):
        toy.store.query(f"{unwind} RETURN sum(x * y * z)", timeout=0.3)
    assert time.monotonic() - start < 5
    assert toy.store.query("RETURN 1 AS x").rows == ((1,),)  # and the next one has no limit


def test_the_database_itself_refuses_to_write(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wall, for what the guard might miss."""
    monkeypatch.setattr("atlas.store.embedded.check_query", tokens)
    for cypher in (
        "CREATE (:Feature {id: -1})",
        "MATCH (f:Feature) SET f.layer = 1",
        "MATCH (f:Feature) DELETE f",
    ):
        with pytest.raises(AtlasError, match="only read"):
            toy.store.query(cypher)


def test_queries_of_several_threads_do_not_disturb_each_other(toy: Toy) -> None:
    answers: dict[int, object] = {}

    def ask(layer: int) -> None:
        for _ in range(20):
            cypher = "MATCH (f:Feature) WHERE f.layer = $layer RETURN min(f.layer), max(f.layer), count(*)"
            answers[layer] = toy.store.query(cypher, {"layer": layer}).rows

    threads = [threading.Thread(target=ask, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {layer: ((layer, layer, 12),) for layer in range(4)}


def test_counts_name_every_label_and_type(toy: Toy) -> None:
    counts = toy.store.counts()
    assert list(counts) == [*NODES, *RELATIONSHIPS]
    assert counts["Feature"] == 48 and counts["Token"] == 30 and counts["Cluster"] == 0
    for type, edges in toy.model.edges.items():
        assert counts[type] == len(edges["weight"])


def test_a_closed_store_says_so_and_closes_again(toy: Toy) -> None:
    if "://" in toy.store.uri:
        pytest.skip("opening a second connection is tested with that store")
    other = open_store(Path(toy.store.uri))
    other.close()
    other.close()
    with pytest.raises(AtlasError, match="closed"):
        other.query("RETURN 1")
