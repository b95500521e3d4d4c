"""Loading: what the artifacts hold is what the database answers, bit for bit; runs and models come and go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.load import load_all, load_run, remove_model, remove_run
from atlas.loading.ids import Blocks
from atlas.schema import NODES, properties
from atlas.store import open_store
from tests.atlas.conftest import Toy
from tests.atlas.synthetic import Synthetic, table, write_artifact

READINGS = ("gate", "up")


def bits(values: object) -> list[int]:
    return np.asarray(values, np.float64).view(np.int64).tolist()


@pytest.mark.parametrize("type", ["DIRECT", "VIA_HEAD"])
def test_edges_between_features_are_the_artifacts_bit_for_bit(toy: Toy, type: str) -> None:
    has_head = type == "VIA_HEAD"
    answer = toy.store.query(
        f"MATCH (a:Feature)-[r:{type}]->(b:Feature) RETURN a.layer * 12 + a.number, b.layer * 12 + b.number,"
        f" r.reading, {'r.layer, r.head' if has_head else '0, 0'}, r.weight, r.z, r.rank_in, r.rank_out"
    )
    own = toy.model.edges[type]
    zero = np.zeros(len(own["weight"]), int)
    expected = zip(
        own["source"].tolist(),
        own["target"].tolist(),
        [READINGS[code] for code in own["reading"]],
        own.get("layer", zero).tolist(),
        own.get("head", zero).tolist(),
        bits(own["weight"]),
        bits(own["z"]),
        own["rank_in"].tolist(),
        own["rank_out"].tolist(),
        strict=True,
    )
    found = [(*row[:5], *bits(row[5:7]), *row[7:]) for row in answer.rows]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("type", ["EMBEDS", "PROMOTES"])
def test_edges_of_tokens_are_the_artifacts_bit_for_bit(toy: Toy, type: str) -> None:
    ends = "(t:Token)-[r:EMBEDS]->(f:Feature)" if type == "EMBEDS" else "(f:Feature)-[r:PROMOTES]->(t:Token)"
    reading = "r.reading" if type == "EMBEDS" else "''"
    answer = toy.store.query(
        f"MATCH {ends} RETURN t.number, f.layer * 12 + f.number, {reading}, r.weight, r.rank"
    )
    own = toy.model.edges[type]
    token, feature = ("source", "target") if type == "EMBEDS" else ("target", "source")
    names = [READINGS[code] for code in own["reading"]] if type == "EMBEDS" else [""] * len(own["weight"])
    expected = zip(
        own[token].tolist(),
        own[feature].tolist(),
        names,
        bits(own["weight"]),
        own["rank"].tolist(),
        strict=True,
    )
    found = [(*row[:3], *bits(row[3:4]), row[4]) for row in answer.rows]
    assert sorted(found) == sorted(expected)


def test_texts_come_back_exact(toy: Toy) -> None:
    """Quotes, backslashes, line breaks, NUL, nothing at all."""
    answer = toy.store.query("MATCH (t:Token) RETURN t.number, t.text ORDER BY t.number")
    assert answer.rows == tuple((i, toy.model.token_text(i)) for i in range(toy.model.d_vocab))


def test_features_carry_key_place_and_norms(toy: Toy) -> None:
    answer = toy.store.query("MATCH (f:Feature {key: 'toy/neurons/L02.mlp/5'}) RETURN f")
    (feature,) = answer.rows[0]
    step = toy.store.query("MATCH (s:Step {id: $id}) RETURN s.key", {"id": feature.pop("step")}).rows[0][0]
    assert step == toy.model.step("dictionaries")
    assert feature.pop("id") >= 0
    assert feature == {
        "_label": "Feature", "key": "toy/neurons/L02.mlp/5", "model": "toy", "set": "neurons", "layer": 2,
        "site": "mlp", "kind": "neurons", "number": 5,
        "write_norm": 30.0, "read_norm": 31.0, "read_norm_up": 32.0,
    }  # fmt: skip


def test_heads_know_the_totals_of_their_edges(toy: Toy) -> None:
    own = toy.model.edges["VIA_HEAD"]
    heads = toy.store.query("MATCH (h:Head) RETURN h.key, h.layer, h.number, h.edges, h.total_weight").rows
    assert len(heads) == toy.model.n_layers * toy.model.n_heads
    for key, layer, number, edges, total in heads:
        mine = (own["layer"] == layer) & (own["head"] == number)
        assert key == f"toy/L{layer:02d}.H{number:02d}"
        assert edges == mine.sum()
        assert total == pytest.approx(np.abs(own["weight"][mine]).sum(), rel=1e-6)


def test_every_element_names_a_step_that_a_run_used(toy: Toy) -> None:
    for label in NODES:
        if label in ("Run", "Step"):
            continue
        lost = toy.store.query(
            f"MATCH (n:{label}) OPTIONAL MATCH (r:Run)-[:USED]->(s:Step) WHERE s.id = n.step"
            " WITH n, count(r) AS runs WHERE runs <> 1 RETURN count(*) AS lost"
        )
        assert lost.rows == ((0,),)
    made = toy.store.query(
        "MATCH (:Feature)-[r:VIA_HEAD]->(b:Feature) MATCH (s:Step) WHERE s.id = r.step"
        " RETURN DISTINCT b.layer AS layer, s.kind AS kind ORDER BY layer"
    )
    assert made.rows == ((1, "edges1"), (2, "edges2"), (3, "edges3"))


def test_ids_are_blocks_with_the_numbers_in_order(toy: Toy) -> None:
    answer = toy.store.query(
        "MATCH (f:Feature) RETURN f.layer, f.id - f.number AS base, count(*) ORDER BY f.layer"
    )
    assert [(row[0], row[2]) for row in answer.rows] == [(layer, 12) for layer in range(4)]
    assert len({row[1] for row in answer.rows}) == 4


def contents(path: Path) -> dict[str, list]:
    """Everything that the database of an atlas answers, with keys for ids, sorted."""
    with open_store(path) as store:
        steps = dict(store.query("MATCH (s:Step) RETURN s.id, s.key").rows)
        found: dict[str, list] = {}
        for label, node in NODES.items():
            names = [column.name for column in node.columns if column.name not in ("id", "step")]
            rows = store.query(f"MATCH (n:{label}) RETURN {', '.join(f'n.{name}' for name in names)}").rows
            found[label] = sorted(rows, key=repr)
        for type in ("DIRECT", "VIA_HEAD", "EMBEDS", "PROMOTES", "USED"):
            names = [column.name for column in properties(type) if column.name != "step"]
            returned = ", ".join(["a.key", "b.key", *(f"r.{name}" for name in names)])
            step = "" if type == "USED" else ", r.step"
            rows = store.query(f"MATCH (a)-[r:{type}]->(b) RETURN {returned}{step}").rows
            if step:
                rows = tuple((*row[:-1], steps[row[-1]]) for row in rows)
            found[type] = sorted(rows, key=repr)
    return found


def atlas_of(path: Path, *models: Synthetic) -> Path:
    for model in models:
        model.write(path)
        load_run(path, model.manifest())
    return path


def test_a_second_load_of_the_same_run_changes_nothing(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", model := Synthetic())
    again = load_run(path, model.manifest())
    assert not again.rebuilt
    assert AtlasFolder.open(path).current() == again.generation == "000001"
    before = contents(path)
    assert load_all(path).generation == "000002"
    assert contents(path) == before


def test_several_models_live_in_one_atlas_and_leave_it(tmp_path: Path) -> None:
    """The content with one model removed is that of an atlas that never had it; ids stay as they were."""
    small, other = Synthetic("small", n_edges=100), Synthetic("other", n_layers=3, n_edges=100)
    alone = contents(atlas_of(tmp_path / "alone.atlas", other))
    path = atlas_of(tmp_path / "both.atlas", small, other)
    both = contents(path)
    assert len(both["Model"]) == 2
    with open_store(path) as store:
        ids = dict(store.query("MATCH (f:Feature {model: 'other'}) RETURN f.key, f.id").rows)
    remove_model(path, "small")
    assert contents(path) == alone
    with open_store(path) as store:
        assert dict(store.query("MATCH (f:Feature) RETURN f.key, f.id").rows) == ids
    load_run(path, small.manifest())
    assert contents(path) == both
    assert not (AtlasFolder.open(path).runs / "absent.json").exists()
    remove_run(path, "run-other-a")
    assert contents(path) == contents(atlas_of(tmp_path / "small.atlas", small))


def test_what_another_run_used_stays_when_a_run_goes(tmp_path: Path) -> None:
    model = Synthetic(n_edges=60)
    path = atlas_of(tmp_path / "a.atlas", model)
    shared = tuple(step for step in model.steps if not step.kind.startswith("edges"))
    load_run(path, model.manifest("only-nodes", steps=shared))
    before = contents(path)
    assert len(before["Run"]) == 2 and len(before["USED"]) == len(model.steps) + len(shared)
    remove_run(path, model.manifest().run)
    left = contents(path)
    assert left["Feature"] == before["Feature"] and left["Token"] == before["Token"]
    assert left["DIRECT"] == [] and len(left["Step"]) == len(shared)


def test_a_run_that_selects_otherwise_replaces_the_old_one(tmp_path: Path) -> None:
    """Two selections of the same edges rank them differently, so they cannot stand side by side unasked."""
    first, second = Synthetic(n_edges=200), Synthetic(n_edges=200, selection="b")
    path = atlas_of(tmp_path / "a.atlas", first)
    second.write(path)
    clashing = {**{step.name: step for step in first.steps}, **{step.name: step for step in second.steps}}
    with pytest.raises(AtlasError, match=r"two selections of the same edges"):
        load_run(path, second.manifest("both", steps=tuple(clashing.values())))
    load_run(path, second.manifest(), replace=[first.manifest().run])
    assert contents(path) == contents(atlas_of(tmp_path / "b.atlas", Synthetic(n_edges=200, selection="b")))


def test_the_same_edge_from_two_steps_is_one_edge(tmp_path: Path) -> None:
    """A newer version of a step may repeat what an older one made, value for value."""
    model = Synthetic(n_edges=50)
    folder = model.write(tmp_path / "a.atlas")
    copy = {"DIRECT": pq.read_table(folder.artifact(model.step("edges2")) / "DIRECT.parquet")}
    write_artifact(folder, "later-version", copy)
    load_run(folder.path, model.manifest())
    before = contents(folder.path)["DIRECT"]
    load_run(folder.path, with_step(model, "later-version"))
    assert contents(folder.path)["DIRECT"] == before


def with_step(model: Synthetic, name: str):
    steps = (*model.steps, type(model.steps[0])(name, "extra"))
    return model.manifest("with-" + name, steps=steps)


def bad_edges(toy: Synthetic, **changes: object) -> pa.Table:
    """Two good VIA_HEAD edges, the second changed."""
    good = {
        "source_dictionary": [toy.dictionary(0)] * 2, "source": [1, 2],
        "target_dictionary": [toy.dictionary(2)] * 2,
        "target": [3, 4], "reading": ["gate"] * 2, "weight": [1.0, 2.0], "z": [1.0, 1.0], "rank_in": [1, 1],
        "rank_out": [1, 1], "model": [toy.hash] * 2, "layer": [1, 1], "head": [0, 1],
    }  # fmt: skip
    columns = {name: [values[0], changes.get(name, values[1])] for name, values in good.items()}
    return table("VIA_HEAD", columns)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight": float("nan")}, r"VIA_HEAD.*column weight, row 1: nan is not a finite number"),
        ({"z": float("inf")}, r"VIA_HEAD.*column z, row 1: inf"),
        ({"target": 12}, r"column target, row 1: 12, but .* has the numbers 0 to 11"),
        ({"source": -1}, r"column source, row 1: -1"),
        (
            {"target_dictionary": "sha256:unknown"},
            r"column target_dictionary, row 1: sha256:unknown is in no table",
        ),
        ({"head": 2}, r"column head, row 1: layer 1 head 2 is no head"),
        ({"layer": 4}, r"column head, row 1: layer 4 head 1 is no head"),
        ({"model": "sha256:other"}, r"row 1"),
        ({"weight": None}, r"column weight, row 1: no value"),
        (
            {"source": 1, "target": 3, "head": 0},
            r"the VIA_HEAD edge \(source \d+, target \d+, layer 1, head 0\) occurs twice",
        ),
    ],
)
def test_bad_edges_are_refused_by_file_column_and_row(tmp_path: Path, changes: dict, says: str) -> None:
    path = atlas_of(tmp_path / "a.atlas", model := Synthetic(n_edges=50))
    write_artifact(AtlasFolder.open(path), "bad", {"VIA_HEAD": bad_edges(model, **changes)})
    with pytest.raises(AtlasError, match=says) as raised:
        load_run(path, with_step(model, "bad"))
    assert "bad/VIA_HEAD.parquet" in str(raised.value) and "\n" not in str(raised.value)
    folder = AtlasFolder.open(path)
    assert folder.current() == "000001"
    assert (
        [p.name for p in (path / "db").iterdir()] == ["000001"] == [p.name for p in (path / "csr").iterdir()]
    )


def test_a_missing_artifact_a_missing_column_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", model := Synthetic(n_edges=50))
    folder = AtlasFolder.open(path)
    with pytest.raises(AtlasError, match=r"artifact of step nowhere is missing"):
        load_run(path, with_step(model, "nowhere"))
    write_artifact(folder, "narrow", {"VIA_HEAD": bad_edges(model).drop_columns("z")})
    with pytest.raises(AtlasError, match="column z is missing"):
        load_run(path, with_step(model, "narrow"))
    wide = bad_edges(model).set_column(5, "weight", pa.array([1.0, 2.0]))
    write_artifact(folder, "wide", {"VIA_HEAD": wide})
    with pytest.raises(AtlasError, match=r"column weight .* is double, expected float"):
        load_run(path, with_step(model, "wide"))
    file = folder.artifact("wide") / "VIA_HEAD.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(AtlasError, match="not readable"):
        load_run(path, with_step(model, "wide"))


def test_features_must_be_all_of_their_dictionary(tmp_path: Path) -> None:
    model = Synthetic(n_edges=50)
    folder = model.write(tmp_path / "a.atlas")
    file = folder.artifact(model.step("dictionaries")) / "features.parquet"
    pq.write_table(pq.read_table(file).slice(1), file)
    with pytest.raises(AtlasError, match="expected the numbers 0 to 11"):
        load_run(folder.path, model.manifest())


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=50))
    folder = AtlasFolder.open(path)
    models = pq.read_table(folder.artifact(Synthetic().step("model")) / "models.parquet")
    other = models.set_column(1, "hash", pa.array(["sha256:else"]))
    write_artifact(folder, "else", {"models": other})
    with pytest.raises(AtlasError, match=r"two models .* are called toy"):
        load_run(path, Synthetic().manifest("second", steps=with_step(Synthetic(), "else").steps[-1:]))


def test_unknown_runs_and_models_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", Synthetic(n_edges=50))
    with pytest.raises(AtlasError, match="run-toy-a"):
        remove_run(path, "x")
    with pytest.raises(AtlasError, match="there are toy"):
        remove_model(path, "x")


def test_a_table_too_large_for_the_memory_is_copied_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Synthetic(n_edges=300)
    whole = contents(atlas_of(tmp_path / "whole.atlas", model))
    monkeypatch.setattr("atlas.store.embedded_writer.BYTES_PER_EDGE", 1e9)
    monkeypatch.setattr("atlas.store.embedded_writer.FEWEST_ROWS", 70)
    assert contents(atlas_of(tmp_path / "parts.atlas", Synthetic(n_edges=300))) == whole


def test_ids_are_never_given_out_twice(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "ids.parquet")
    assert blocks.base("Feature", "a", 10) == 0
    assert blocks.base("Token", "a", 5) == 10
    blocks.save()
    again = Blocks.read(tmp_path / "ids.parquet")
    assert again.base("Feature", "b", 1) == 15
    assert again.base("Token", "a", 5) == 10
    with pytest.raises(AtlasError, match="6 rows, but 5"):
        again.base("Token", "a", 6)


def test_the_generation_says_what_is_in_it(tmp_path: Path) -> None:
    path = atlas_of(tmp_path / "a.atlas", model := Synthetic(n_edges=50))
    said = json.loads((path / "db" / "000001" / "generation.json").read_text())
    assert [run["run"] for run in said["runs"]] == [model.manifest().run]
    with open_store(path) as store:
        counts = store.counts()
    assert {name: counts[name] for name in said["counts"]} == said["counts"]
    assert all(count == 0 for name, count in counts.items() if name not in said["counts"])
