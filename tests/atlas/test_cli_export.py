"""Exports, read back by the programs that they are for."""

from __future__ import annotations

import networkx as nx
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import atlas
from atlas.export import export
from tests.atlas.small_atlas import TEXTS, build


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return build(tmp_path_factory.mktemp("export") / "small.atlas")


@pytest.fixture(scope="module")
def opened(small):
    with atlas.open(small.path) as a:
        yield a


def edge_set(opened, type: str) -> set[tuple]:
    rows = opened.query(f"MATCH (a)-[r:{type}]->(b) RETURN a.key, b.key, r.weight, r.reading").rows
    return set(rows)


def test_parquet_holds_every_node_and_edge_exactly(small, opened, tmp_path):
    answer = export(opened, tmp_path / "out", format="parquet")
    written = {row["table"]: row["rows"] for row in answer.to_json()["written"]}
    direct = pq.read_table(tmp_path / "out" / "DIRECT.parquet")
    assert written["DIRECT"] == len(direct) == len(small.direct)
    columns = (direct[name].to_pylist() for name in ("source", "target", "weight", "reading"))
    assert set(zip(*columns, strict=True)) == edge_set(opened, "DIRECT")
    features = pq.read_table(tmp_path / "out" / "Feature.parquet")
    ids = dict(zip(features["key"].to_pylist(), features["id"].to_pylist(), strict=True))
    assert [ids[key] for key in direct["source"].to_pylist()] == direct["source_id"].to_pylist()
    tokens = pq.read_table(tmp_path / "out" / "Token.parquet")
    assert tokens["text"].to_pylist() == TEXTS
    assert not (tmp_path / "out" / "Circuit.parquet").exists()  # nothing of it in the atlas


def test_csv_holds_hostile_texts(opened, tmp_path):
    export(opened, tmp_path / "out", format="csv", types=["PROMOTES"])
    options = pa_csv.ParseOptions(newlines_in_values=True)
    kept = pa_csv.ConvertOptions(strings_can_be_null=False)
    tokens = pa_csv.read_csv(tmp_path / "out" / "Token.csv", parse_options=options, convert_options=kept)
    assert tokens["text"].to_pylist() == TEXTS
    assert not (tmp_path / "out" / "DIRECT.csv").exists()


def test_networkx_reads_the_graphml_of_the_whole_graph(small, opened, tmp_path):
    export(opened, tmp_path / "all.graphml")
    graph = nx.read_graphml(tmp_path / "all.graphml")
    assert graph.is_directed() and graph.is_multigraph()
    count = len(small.direct) + len(small.via_head) + len(small.embeds) + len(small.promotes)
    assert graph.number_of_edges() == count
    found = {
        (a, b, data["weight"], data["reading"])
        for a, b, data in graph.edges(data=True)
        if data["type"] == "DIRECT"
    }
    assert found == edge_set(opened, "DIRECT")  # the same doubles
    escaped = {"\x1b[31mred": "\\x1b[31mred", "\x7fdel": "\x7fdel"}
    for number, text in enumerate(TEXTS):
        assert graph.nodes[f"smol/{number}"].get("text", "") == escaped.get(text, text)
    assert graph.nodes["smol/neurons/L01.mlp/3"]["layer"] == 1


def test_a_neighbourhood_is_what_the_strongest_edges_reach(small, opened, tmp_path):
    export(opened, tmp_path / "near.graphml", around="n1[3]", hops=1, top=2, types=["DIRECT"])
    graph = nx.read_graphml(tmp_path / "near.graphml")
    start = "smol/neurons/L01.mlp/3"
    reached = {start}
    for direction, rank in (("-[r:DIRECT]->", "rank_out"), ("<-[r:DIRECT]-", "rank_in")):
        rows = opened.query(
            f"MATCH (f:Feature){direction}(o:Feature) WHERE f.key = $key AND r.{rank} <= 2 RETURN o.key",
            {"key": start},
        ).rows
        reached |= {row[0] for row in rows}
    assert {key for key, data in graph.nodes(data=True) if data["labels"] == "Feature"} == reached
    among = {edge for edge in edge_set(opened, "DIRECT") if {edge[0], edge[1]} <= reached}
    assert {(a, b, d["weight"], d["reading"]) for a, b, d in graph.edges(data=True)} == among
    only = nx.read_graphml(
        export_to(opened, tmp_path / "alone.graphml", around="n1[3]", hops=0, types=["DIRECT"])
    )
    assert set(only.nodes) == {start} and only.number_of_edges() == 0


def test_the_networkx_graph_is_what_the_graphml_holds(opened, tmp_path):
    options = {"around": "n1[3]", "hops": 1, "top": 3}
    in_memory = opened.to_networkx(**options)
    written = nx.read_graphml(export_to(opened, tmp_path / "near.graphml", **options))
    assert set(in_memory.nodes) == set(written.nodes) and in_memory.number_of_edges() > 20
    for key, values in in_memory.nodes(data=True):
        if key.count("/") > 1:  # a token's text may hold what XML does not
            assert values == written.nodes[key]
    rows = [sorted((a, b, tuple(sorted(data.items(), key=str))) for a, b, data in graph.edges(data=True))
            for graph in (in_memory, written)]  # fmt: skip
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    assert {row[2] for row in rows[0]} == {tuple(i for i in row[2] if i[0] != "id") for row in rows[1]}


def export_to(opened, path, **options):
    export(opened, path, **options)
    return path


def test_a_query_selects_nodes_and_all_edges_among_them(opened, tmp_path):
    query = "MATCH (f:Feature) WHERE f.number < $n RETURN f"
    export(opened, tmp_path / "few", format="parquet", query=query, parameters={"n": 4})
    features = pq.read_table(tmp_path / "few" / "Feature.parquet")
    assert len(features) == 12
    kept = pq.read_table(tmp_path / "few" / "DIRECT.parquet")
    keys = set(features["key"].to_pylist())
    among = {edge for edge in edge_set(opened, "DIRECT") if {edge[0], edge[1]} <= keys}
    found = zip(*(kept[name].to_pylist() for name in ("source", "target", "weight", "reading")), strict=True)
    assert set(found) == among
    with pytest.raises(atlas.AtlasError, match="returns no node"):
        export(opened, tmp_path / "none", format="parquet", query="MATCH (f:Feature) RETURN f.key")


def test_nothing_is_overwritten_and_nothing_half_written(opened, tmp_path, monkeypatch):
    path = tmp_path / "out.graphml"
    path.write_text("mine")
    with pytest.raises(atlas.AtlasError, match="exists"):
        export(opened, path)
    assert path.read_text() == "mine"
    monkeypatch.setattr(
        "atlas.graphml.GraphMLWriter.edge", lambda *_: (_ for _ in ()).throw(RuntimeError("stop"))
    )
    with pytest.raises(RuntimeError):
        export(opened, path, overwrite=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    export(opened, path, overwrite=True)
    assert nx.read_graphml(path).number_of_nodes() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "xlsx"}, "expected a format"),
        ({"format": "csv", "types": ["NONE"]}, "no type of relationship"),
        ({"format": "csv", "around": "n1[3]", "query": "MATCH (f) RETURN f"}, "one of them"),
        ({"format": "csv", "around": "zz"}, "no feature key"),
    ],
)
def test_a_mistake_leaves_no_file(opened, tmp_path, options, said):
    with pytest.raises(atlas.AtlasError, match=said):
        export(opened, tmp_path / "out", **options)
    with pytest.raises(atlas.AtlasError, match="no such folder"):
        export(opened, tmp_path / "deep" / "out.graphml")
    assert list(tmp_path.iterdir()) == []
