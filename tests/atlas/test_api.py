"""What the Python interface answers, counted again from the tables that the atlas was made of."""

from __future__ import annotations

import itertools

import pytest

import atlas
from atlas.answers import visible
from tests.atlas.small_atlas import HEADS, LAYERS, SIZE, TEXTS, build, dictionary_hash


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return build(tmp_path_factory.mktemp("api") / "small.atlas", sets=("neurons", "tc"))


@pytest.fixture(scope="module")
def opened(small):
    with atlas.open(small.path) as a:
        yield a


def key_of(hash: str, number: int) -> str:
    name = "neurons" if hash == dictionary_hash(int(hash[0]), "neurons") else "tc"
    return f"smol/{name}/L{int(hash[0]):02d}.mlp/{number}"


def edges_of(small, key: str, direction: str) -> list[tuple]:
    """(other's key, type or head, reading, weight, z), strongest first, from the tables."""
    mine, other = ("source", "target") if direction == "down" else ("target", "source")
    rows = []
    for type, table in (("DIRECT", small.direct), ("VIA_HEAD", small.via_head)):
        for row in table:
            if key_of(row[f"{mine}_dictionary"], row[mine]) == key:
                via = f"L{row['layer']:02d}.H{row['head']:02d}" if type == "VIA_HEAD" else type
                name = key_of(row[f"{other}_dictionary"], row[other])
                rows.append((name, via, row["reading"], float(row["weight"]), float(row["z"])))
    return sorted(rows, key=lambda row: -abs(row[3]))


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("key", ["smol/neurons/L01.mlp/3", "smol/tc/L01.mlp/11", "smol/neurons/L00.mlp/0"])
def test_edges_are_those_of_the_tables_strongest_first(small, opened, key, direction):
    table = opened.edges(key, direction, limit=None)
    assert [row[:5] for row in table.rows] == edges_of(small, key, direction)
    assert [row[:5] for row in opened.edges(key, direction, limit=3).rows] == edges_of(small, key, direction)[
        :3
    ]


def test_edges_can_be_narrowed(small, opened):
    key = "smol/neurons/L02.mlp/5"
    every = edges_of(small, key, "up")
    by_head = opened.edges(key, "up", via="1.1", limit=None)
    assert [row[:5] for row in by_head.rows] == [row for row in every if row[1] == "L01.H01"]
    direct = opened.edges(key, "up", types=["DIRECT"], limit=None)
    assert [row[:5] for row in direct.rows] == [row for row in every if row[1] == "DIRECT"]
    layer = opened.edges(key, "up", layer=1, limit=None)
    assert [row[:5] for row in layer.rows] == [row for row in every if "/L01." in row[0]]
    by_z = opened.edges(key, "up", by="z", limit=None)
    assert [abs(row[4]) for row in by_z.rows] == sorted((abs(row[4]) for row in every), reverse=True)


def test_ranks_and_promoted_tokens_stand_beside_the_edge(small, opened):
    first = opened.edges("n1[3]", "down", types=["DIRECT"], limit=1).records()[0]
    mine = (
        r for r in small.direct if key_of(r["source_dictionary"], r["source"]) == "smol/neurons/L01.mlp/3"
    )
    (row,) = (r for r in mine if float(r["weight"]) == first["weight"])
    assert (first["rank_in"], first["rank_out"]) == (row["rank_in"], row["rank_out"])
    promoted = sorted(
        (p for p in small.promotes if key_of(p["source_dictionary"], p["source"]) == first["feature"]
         and p["weight"] > 0 and p["rank"] <= 3), key=lambda p: p["rank"])  # fmt: skip
    assert first["promotes"] == [TEXTS[p["token"]] for p in promoted]


@pytest.mark.parametrize(
    "short",
    ["n1[3]", "neurons1[3]", "L1n3", "smol/n1[3]", "neurons/L01.mlp/3", "neurons/L1.mlp/3",
     "smol/neurons/L01.mlp/3", " n1[3] ", "n01[03]", "smol/neurons/L1M3", "neurons/L1M3"],
)  # fmt: skip
def test_short_forms_name_one_feature(opened, short):
    feature = opened.feature(short)
    assert feature.key == "smol/neurons/L01.mlp/3"
    assert (feature.layer, feature.number, feature.short, feature.write_norm) == (1, 3, "n1[3]", 4.0)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("L1M3", r"2 features fit: smol/neurons/L01.mlp/3, smol/tc/L01.mlp/3"),
        ("L01.mlp/3", "2 features fit"),
        ("n1[99]", f"smol/neurons/L01.mlp has the features 0 to {SIZE - 1}"),
        ("n9[0]", f"smol/neurons has the layers 0–{LAYERS - 1}"),
        ("neuron1[3]", "did you mean"),
        ("nonsense", "no feature key"),
        ("L1A3", "no such feature"),
        ("", "no feature key"),
    ],
)
def test_a_key_that_names_none_or_several_says_what_there_is(opened, key, said):
    with pytest.raises(atlas.AtlasError, match=said):
        opened.feature(key)


def test_a_property_without_a_value_is_none_and_an_unknown_one_an_error(opened):
    feature = opened.feature("n1[3]")
    assert feature.firing_rate is None
    with pytest.raises(AttributeError, match="no_such"):
        feature.no_such  # noqa: B018


def test_token_tables_hold_both_signs_by_rank(small, opened):
    feature = opened.feature("t2[4]")
    tables = feature.embeds(limit=100)
    gate, up = tables["gate"], tables["up"]
    for table, reading in ((gate, "gate"), (up, "up")):
        rows = [r for r in small.embeds if key_of(r["target_dictionary"], r["target"]) == feature.key
                and r["reading"] == reading]  # fmt: skip
        highest = sorted((r for r in rows if r["weight"] > 0), key=lambda r: r["rank"])
        lowest = sorted((r for r in rows if r["weight"] < 0), key=lambda r: r["rank"])
        assert table.title.endswith(reading)
        assert [v for v in table.column("highest") if v is not None] == [TEXTS[r["token"]] for r in highest]
        assert [v for v in table.column("weight_lowest") if v is not None] == [
            float(r["weight"]) for r in lowest
        ]
    promotes = feature.promotes(limit=2)
    rows = [r for r in small.promotes if key_of(r["source_dictionary"], r["source"]) == feature.key]
    best = sorted((r for r in rows if r["weight"] > 0), key=lambda r: -r["weight"])[:2]
    assert [v for v in promotes.column("weight") if v is not None] == [float(r["weight"]) for r in best]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_every_text_is_found_however_hostile(opened, number):
    for given in (TEXTS[number], visible(TEXTS[number]), f"#{number}"):
        found = opened.search(given).to_json()["tokens"]
        assert {"key": f"smol/{number}", "text": TEXTS[number]} in found


def test_a_word_finds_the_token_with_a_space_too_but_not_the_other_way_round(opened):
    assert [row["text"] for row in opened.search("the").to_json()["tokens"]] == ["the", " the"]
    assert [row["text"] for row in opened.search(" the").to_json()["tokens"]] == [" the"]
    with pytest.raises(atlas.AtlasError, match="near it are ' Paris'"):
        opened.search("pari")


def test_search_lists_what_a_token_feeds_and_what_promotes_it(small, opened):
    answer = opened.search(" Paris", limit=1000).to_json()
    feeds = sorted((r for r in small.embeds if r["token"] == 2), key=lambda r: -abs(r["weight"]))
    assert [row["weight"] for row in answer["feeds"]] == [float(r["weight"]) for r in feeds]
    assert [row["feature"] for row in answer["feeds"]] == [
        key_of(r["target_dictionary"], r["target"]) for r in feeds
    ]
    raised = sorted((r for r in small.promotes if r["token"] == 2), key=lambda r: -abs(r["weight"]))
    assert [row["weight"] for row in answer["promoted_by"]] == [float(r["weight"]) for r in raised]


@pytest.mark.parametrize("key", ["1.1", "L1H1", "L01.H01", "smol/L01.H01", "l1.h1"])
def test_a_head_shows_its_strongest_pairs_and_its_shares(small, opened, key):
    own = sorted(
        (r for r in small.via_head if (r["layer"], r["head"]) == (1, 1)), key=lambda r: -abs(r["weight"])
    )
    answer = opened.head(key, limit=5).to_json()
    assert (answer["key"], answer["edges"]) == ("smol/L01.H01", len(own))
    assert [row["weight"] for row in answer["strongest"]] == [float(r["weight"]) for r in own[:5]]
    by_z = opened.head(key, limit=5, by="z").to_json()["strongest"]
    assert [row["z"] for row in by_z] == sorted((float(r["z"]) for r in own), key=abs, reverse=True)[:5]
    total = sum(abs(float(r["weight"])) for r in own)
    assert answer["total_weight"] == pytest.approx(total)
    for side, end in (("source layer", "source_dictionary"), ("target layer", "target_dictionary")):
        rows = [row for row in answer["shares"] if row["side"] == side]
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        for row in rows:
            part = [r for r in own if int(r[end][0]) == row["layer"]]
            assert row["edges"] == len(part)
            assert row["total"] == pytest.approx(sum(abs(float(r["weight"])) for r in part))


@pytest.mark.parametrize(
    ("key", "said"), [("9.0", "layers 0–2 of heads 0–1"), ("11", "no head"), ("x", "no head")]
)
def test_an_unknown_head_says_which_there_are(opened, key, said):
    with pytest.raises(atlas.AtlasError, match=said):
        opened.head(key)


def test_paths_between_tokens_are_the_strongest_products(small, opened):
    """One hop, listed by hand: EMBEDS · edge · PROMOTES."""
    answer = opened.paths(" Paris", "😀", 4, hops=(1, 1)).to_json()
    products = []
    for start in (r for r in small.embeds if r["token"] == 2):
        for edge in itertools.chain(small.direct, small.via_head):
            if (edge["source_dictionary"], edge["source"]) != (start["target_dictionary"], start["target"]):
                continue
            for end in (r for r in small.promotes if r["token"] == TEXTS.index("😀")):
                if (end["source_dictionary"], end["source"]) == (edge["target_dictionary"], edge["target"]):
                    weights = [float(row["weight"]) for row in (start, edge, end)]
                    products.append(weights[0] * weights[1] * weights[2])
    products.sort(key=lambda product: -abs(product))
    by_path = {row["path"]: row["product"] for row in answer["paths"]}
    assert list(by_path.values()) == pytest.approx(products[:4], rel=1e-12)
    for number, product in by_path.items():
        rows = [row for row in answer["paths"] if row["path"] == number]
        weight = 1.0
        for row in rows[1:]:
            weight *= row["weight"]
        assert weight == pytest.approx(product, rel=1e-12)
        assert [row["via"] for row in rows if row["via"][0] != "L" and row["via"] != "DIRECT"] == [
            "from", "EMBEDS", "PROMOTES"]  # fmt: skip
        assert (rows[0]["to"], rows[-1]["to"]) == ("' Paris'", "'😀'")
    assert "input-invariant" in answer["notes"][0]


def test_an_edge_of_a_path_is_the_edge_of_the_database(opened):
    answer = opened.paths("n0[3]", "t2[7]", 20, hops=(1, 2)).to_json()
    assert answer["found"] > 0
    before = None
    for row in answer["paths"]:
        via, head = row["via"], []
        if via != "from":
            if via != "DIRECT":
                head, via = [f"r.layer = {int(via[1:3])} AND r.head = {int(via[5:])}"], "VIA_HEAD"
            where = " AND ".join(["a.key = $a AND b.key = $b AND r.reading = $reading", *head])
            found = opened.query(
                f"MATCH (a:Feature)-[r:{via}]->(b:Feature) WHERE {where} RETURN r.weight",
                {"a": before, "b": row["to"], "reading": row["reading"]},
            )
            assert found.rows == ((row["weight"],),)
        before = row["to"]


def test_a_query_bounds_its_rows_and_says_so(opened):
    bounded = opened.query("MATCH (f:Feature) RETURN f.id AS id ORDER BY id", limit=5)
    assert bounded.column("id") == sorted(bounded.column("id"))
    assert len(bounded) == 5 and "there are more" in bounded.notes[0]
    whole = opened.query("MATCH (f:Feature) RETURN f.id", limit=2 * LAYERS * SIZE)
    assert len(whole) == 2 * LAYERS * SIZE and not whole.notes
    own = opened.query("MATCH (f:Feature) RETURN f.id LIMIT 7 // all", limit=5)
    assert len(own) == 5 and own.notes
    union = "MATCH (f:Feature) RETURN f.id AS id UNION ALL MATCH (t:Token) RETURN t.id AS id"
    assert len(opened.query(union, limit=5)) == 5
    frame = opened.query("MATCH (f:Feature) RETURN f.key AS key, f.layer AS layer LIMIT 3").to_pandas()
    assert list(frame.columns) == ["key", "layer"] and len(frame) == 3


def test_info_counts_what_there_is(small, opened):
    info = opened.info().to_json()
    holds = {row["of"]: row["rows"] for row in info["holds"]}
    assert holds["DIRECT"] == len(small.direct) and holds["EMBEDS"] == len(small.embeds)
    assert holds["Feature"] == 2 * LAYERS * SIZE and holds["Head"] == LAYERS * HEADS
    assert [(row["set"], row["alias"], row["features"]) for row in info["sets"]] == [
        ("neurons", "n", LAYERS * SIZE), ("tc", "t", LAYERS * SIZE)]  # fmt: skip
    assert [row["run"] for row in opened.runs().records()] == [small.manifest.run]


def test_answers_show_themselves(opened):
    feature = opened.feature("n1[3]")
    assert repr(feature) == "Feature smol/neurons/L01.mlp/3 (n1[3])"
    text = repr(feature.downstream(limit=2))
    assert "downstream of smol/neurons/L01.mlp/3" in text and max(map(len, text.splitlines())) <= 100
    html = opened.search("[bold]not markup[/bold]")._repr_html_()
    assert "[bold]not markup[/bold]" in html
    assert (
        "<script" not in opened.search("&<>")._repr_html_()
        and "&amp;&lt;&gt;" in opened.search("&<>")._repr_html_()
    )
    assert "smol" in repr(opened)


def test_nothing_in_an_atlas_reaches_the_terminal_as_a_control_character(opened):
    for text in TEXTS:
        if text:
            shown = repr(opened.search(text, limit=3))
            assert all(c.isprintable() or c == "\n" for c in shown)


def test_an_atlas_that_is_none_is_said_to_be_none(tmp_path):
    with pytest.raises(atlas.AtlasError, match="no atlas here"):
        atlas.open(tmp_path / "nothing.atlas")
