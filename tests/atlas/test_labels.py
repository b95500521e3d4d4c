"""Labels from files are on the features of every later load, and wherever a feature is shown."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pyarrow.parquet as pq
import pytest

import atlas
from atlas.artifact_tables import ARTIFACT_TABLES
from atlas.cli import main
from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.labels import import_labels, remove_labels
from atlas.load import load_all, load_run, loaded_runs, remove_model, remove_run
from atlas.store import open_store
from atlas.store.checksum import content_checksum
from tests.atlas.small_atlas import SmallAtlas, build, dictionary_hash
from workers.artifacts import Artifacts

HOSTILE = 'of <b onload="x">colours</b>\n\x1b[31m\u202e & more, ' + "long " * 40 + "end"
TABLE = (
    ("key", "label", "f1"),
    ("n1[3]", "seldom right", "0.2"),
    ("smol/neurons/L01.mlp/3", HOSTILE, "0.9"),
    ("n1[3]", "not scored", ""),
    ("t0[7]", "wörds 日本", "0.5"),
    ("L02.mlp/11", "of both sets", "0.1"),
)
SHOWN = {
    "smol/neurons/L01.mlp/3": (HOSTILE, "rules", 0.9),
    "smol/tc/L00.mlp/7": ("wörds 日本", "rules", 0.5),
}


def file_of(path: Path, rows: Any) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def labels_in(path: Path) -> dict[str, tuple[str, str | None, float | None]]:
    with open_store(path) as store:
        rows = store.query(
            "MATCH (f:Feature) WHERE f.label IS NOT NULL RETURN f.key, f.label, f.label_source, f.label_score"
        ).rows
    return {row[0]: tuple(row[1:]) for row in rows}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallAtlas:
    return build(tmp_path_factory.mktemp("small") / "small.atlas", sets=("neurons", "tc"), density=0.1)


@pytest.fixture(scope="module")
def labelled(small: SmallAtlas) -> Path:
    path = Path(shutil.copytree(small.path, small.path.with_name("labelled.atlas")))
    import_labels(path, [file_of(path.with_suffix(".csv"), TABLE[:-1])], "rules")
    return path


@pytest.fixture
def copy(labelled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(labelled, tmp_path / "a.atlas"))


def test_the_artifact_keeps_every_label_and_the_best_is_shown(labelled: Path) -> None:
    assert labels_in(labelled) == SHOWN
    folder = AtlasFolder.open(labelled)
    run = loaded_runs(folder)[-1]
    (step,) = run.steps
    assert Artifacts(folder.artifacts).verify(step.name) == []
    rows = pq.read_table(folder.artifact(step.name) / "labels.parquet").to_pylist()
    assert list(rows[0]) == [column.name for column in ARTIFACT_TABLES["labels"].columns]
    neuron, coder = dictionary_hash(1), dictionary_hash(0, "tc")
    assert [tuple(row.values()) for row in sorted(rows, key=lambda row: (row["number"], row["rank"]))] == [
        (neuron, 3, 1, HOSTILE, "rules", 0.9, '{"f1": 0.9}', None),
        (neuron, 3, 2, "seldom right", "rules", 0.2, '{"f1": 0.2}', None),
        (neuron, 3, 3, "not scored", "rules", None, None, None),
        (coder, 7, 1, "wörds 日本", "rules", 0.5, '{"f1": 0.5}', None),
    ]
    about = json.loads(run.spec)["labels"]
    assert (about["source"], about["sets"]) == ("rules", ["smol/neurons", "smol/tc"])
    assert [file["name"] for file in about["files"]] == ["labelled.csv"]
    with atlas.open(labelled) as opened:
        every = opened.labels("n1[3]").records()
        assert [row["label"] for row in every] == [HOSTILE, "seldom right", "not scored"]
        (listed,) = opened.labels().records()
    assert (listed["labels"], listed["features"], listed["held"]) == (4, 2, 2)


def test_importing_again_changes_nothing_and_a_rebuild_keeps_it(copy: Path, small: SmallAtlas) -> None:
    with open_store(copy) as store:
        before = content_checksum(store)
    current = (copy / "CURRENT").read_text()
    again = import_labels(copy, [small.path.with_name("labelled.csv")], "rules")
    assert again.notes[-1] == "the atlas had these labels already: nothing was changed"
    assert (copy / "CURRENT").read_text() == current
    load_all(copy)
    with open_store(copy) as store:
        assert content_checksum(store) == before
    assert (copy / "CURRENT").read_text() != current


def test_labels_wait_for_dictionaries_that_are_gone(copy: Path, small: SmallAtlas) -> None:
    waits = r"labels of rules: {} of 4 belong to dictionaries that this atlas does not hold"
    report = remove_run(copy, small.manifest.run)
    assert labels_in(copy) == {} and waits.format(4) in report.notes[0]
    with atlas.open(copy) as opened:
        table = opened.labels()
    assert table.records()[0]["held"] == 0
    assert any("smol/neurons/L01.mlp as it was" in note for note in table.notes)
    assert load_run(copy, small.manifest).notes == ()
    assert labels_in(copy) == SHOWN


def test_another_build_with_the_same_dictionaries_has_the_labels(copy: Path) -> None:
    build(copy, seed=1, sets=("tc",), density=0.1)  # under the name of the run that it replaces
    assert labels_in(copy) == {"smol/tc/L00.mlp/7": SHOWN["smol/tc/L00.mlp/7"]}
    assert "labels of rules: 3 of 4" in load_all(copy).notes[0]
    remove_model(copy, "smol")
    assert loaded_runs(AtlasFolder.open(copy)) == []


def test_the_last_import_is_shown_and_each_can_go(copy: Path, tmp_path: Path) -> None:
    first = file_of(tmp_path / "a.csv", [("key", "text"), ("n1[3]", "a person's"), ("n2[0]", "new")])
    import_labels(copy, [first], "me")
    mine = {
        "smol/neurons/L01.mlp/3": ("a person's", "me", None),
        "smol/neurons/L02.mlp/0": ("new", "me", None),
    }
    assert labels_in(copy) == SHOWN | mine
    second = file_of(tmp_path / "b.csv", [("key", "text"), ("n2[0]", "newer")])
    with pytest.raises(AtlasError, match=r"labels of me are there already .*--replace.*--add"):
        import_labels(copy, [second], "me")
    import_labels(copy, [second], "me", add=True)
    newer = {"smol/neurons/L02.mlp/0": ("newer", "me", None)}
    assert labels_in(copy) == SHOWN | mine | newer
    done = import_labels(copy, [second], "me", replace=True)
    assert labels_in(copy) == SHOWN | newer
    assert "earlier imports of me, replaced: 1" in done.notes
    with pytest.raises(AtlasError, match="no labels of you; there are rules, me"):
        remove_labels(copy, "you")
    remove_labels(copy, "rules")
    assert labels_in(copy) == newer


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (TABLE, {}, r"a\.csv, line 7: L02\.mlp/11: 2 features fit: smol/neurons/L02\.mlp/11, smol/tc"),
        ([("key", "label"), ("n1[99]", "a")], {}, r"a\.csv, line 2: n1\[99\]: no such feature; .* 0 to 11"),
        ([("key", "label"), ("n1[9]", " ")], {}, r"a\.csv: no labels in it"),
        (TABLE, {"set": "nothing"}, "set 'nothing': no such set; there are smol/neurons, smol/tc"),
        (TABLE[:-1], {"score": "auc"}, "score auc: no row has one; there are f1"),
        (TABLE[:-1], {"add": True, "replace": True}, "expected one of them"),
    ],
)  # fmt: skip
def test_a_refused_import_leaves_the_atlas_as_it_was(
    small: SmallAtlas, tmp_path: Path, rows: Any, options: dict[str, Any], said: str
) -> None:
    before = sorted(path.name for path in small.path.rglob("*"))
    with pytest.raises(AtlasError, match=said):
        import_labels(small.path, [file_of(tmp_path / "a.csv", rows)], "rules", **options)
    with pytest.raises(AtlasError, match="source: expected a name"):
        import_labels(small.path, [file_of(tmp_path / "b.csv", TABLE[:-1])], "a\nb", **options)
    assert sorted(path.name for path in small.path.rglob("*")) == before


# --- killed ------------------------------------------------------------------------------------------


def _dies_before(change: int, function: Callable[[], object]) -> None:
    """Runs it, and kills this process before its change of that number (from 1) of a name."""
    made = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return count

    for name in ("replace", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    function()


def test_a_killed_import_leaves_the_atlas_before_it_or_the_one_after(
    small: SmallAtlas, labelled: Path, tmp_path: Path
) -> None:
    """Killed before each file takes its name: the artifact, the ids, CURRENT, the manifests."""
    path = Path(shutil.copytree(small.path, tmp_path / "a.atlas"))
    file = small.path.with_name("labelled.csv")
    seen = []
    for change in range(1, 20):
        process = multiprocessing.get_context("fork").Process(
            target=_dies_before, args=(change, lambda: import_labels(path, [file], "rules", replace=True))
        )
        process.start()
        process.join()
        seen.append(labels_in(path))
        if process.exitcode != -signal.SIGKILL:
            break
    assert process.exitcode == 0 and len(seen) >= 4
    assert seen[0] == {} and seen[-1] == SHOWN
    assert [labels for labels in seen if labels not in ({}, SHOWN)] == []
    with open_store(path) as store, open_store(labelled) as whole:
        assert content_checksum(store) == content_checksum(whole)
    assert len(list((path / "db").iterdir())) == len(list((path / "csr").iterdir())) == 1
    assert not list((path / "artifacts" / "tmp").iterdir())


# --- shown -------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    labelled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command on the labelled atlas: (exit code, stdout, stderr)."""
    monkeypatch.setenv("ATLAS", str(labelled))

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return command


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["edges", "{to}", "--up", "--limit", "0"], lambda said: said),
        (["paths", "{source}", "{to}", "--hops", "1"], lambda said: said["paths"]),
        (["search", "--label", "OF <B"], lambda said: said["features"]),
        (["label", "list", "n1[3]"], lambda said: said),
    ],
)  # fmt: skip
def test_labels_stand_under_keys_and_whole_in_json(
    run: Callable[..., tuple[int, str, str]], small: SmallAtlas, arguments: list[str], rows: Any
) -> None:
    edge = next(
        row for row in small.direct if (row["source_dictionary"], row["source"]) == (dictionary_hash(1), 3)
    )
    ends = {"source": "smol/neurons/L01.mlp/3", "to": f"n2[{edge['target']}]"}
    if edge["target_dictionary"] == dictionary_hash(2, "tc"):
        ends["to"] = f"t2[{edge['target']}]"
    arguments = [word.format(**ends) for word in arguments]
    code, table, error = run(*arguments)
    assert code == 0, error
    assert "of <b onload" in table and "end" not in table.split()  # cut
    assert max(map(len, table.splitlines())) <= 100
    assert all(c.isprintable() or c == "\n" for c in table)
    _, text, _ = run(*arguments, "--json")
    found = [row["label"] for row in rows(json.loads(text))]
    assert HOSTILE in found


def test_a_page_has_the_label_in_its_title_and_whole_below(run: Callable[..., tuple[int, str, str]]) -> None:
    _, page, _ = run("feature", "n1[3]")
    title = page.splitlines()[0]
    assert title.startswith(r"Feature smol/neurons/L01.mlp/3 (n1[3]): of <b onload") and title.endswith("…")
    assert "label source  rules" in page and "label score   0.9000" in page and r"\u202e" in page
    assert all(c.isprintable() or c == "\n" for c in page)
    content = json.loads(run("feature", "n1[3]", "--json")[1])
    assert (content["label"], content["label_score"]) == (HOSTILE, 0.9)


def test_heads_and_tokens_name_their_features(labelled: Path) -> None:
    with atlas.open(labelled) as opened:
        pairs = [
            row
            for head in ("1.0", "1.1", "2.0", "2.1")
            for row in opened.head(head, 500).tables["strongest"].records()
        ]
        of = {key: label for key, (label, *_) in SHOWN.items()}
        assert {of.get(row["source"]) for row in pairs} >= set(of.values())
        assert all(row["source_label"] == of.get(row["source"]) for row in pairs)
        assert all(row["target_label"] == of.get(row["target"]) for row in pairs)
        found = [row for text in ("the", " Paris", "é") for table in ("feeds", "promoted_by")
                 for row in opened.search(text, 500).tables[table].records()]  # fmt: skip
        assert {row["label"] for row in found} >= set(of.values())
        assert all(row["label"] == of.get(row["feature"]) for row in found)


def test_nothing_of_a_label_is_markup(labelled: Path, small: SmallAtlas) -> None:
    edge = next(
        row for row in small.direct if (row["source_dictionary"], row["source"]) == (dictionary_hash(1), 3)
    )
    name = "t" if edge["target_dictionary"] == dictionary_hash(2, "tc") else "n"
    with atlas.open(labelled) as opened:
        feature = opened.feature("n1[3]")
        other = opened.feature(f"{name}2[{edge['target']}]")
        drawn = [feature.picture(50, 50).svg, other.picture(100, 100).svg]
        pages = [feature._repr_html_(), opened.labels("n1[3]")._repr_html_()]
    for text in (*drawn, *pages):
        assert "&lt;b onload=" in text and "<b onload" not in text
        assert not {"\x1b", "\u202e"} & set(text)


def test_exports_have_labels(labelled: Path, tmp_path: Path) -> None:
    with atlas.open(labelled) as opened:
        opened.export(tmp_path / "all.csv", types=["DIRECT"])
        opened.export(tmp_path / "near.graphml", around="n1[3]")
        graph = opened.to_networkx(around="n1[3]")
    with (tmp_path / "all.csv" / "Feature.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    for key, (label, source, score) in SHOWN.items():
        assert (rows[key]["label"], rows[key]["label_source"], float(rows[key]["label_score"])) == (
            label,
            source,
            score,
        )
    node = nx.read_graphml(tmp_path / "near.graphml").nodes["smol/neurons/L01.mlp/3"]
    assert node["label"] == HOSTILE.replace("\x1b", r"\x1b") and node["label_source"] == "rules"
    assert graph.nodes["smol/neurons/L01.mlp/3"]["label"] == HOSTILE


def test_the_command_imports_lists_searches_and_removes(
    run: Callable[..., tuple[int, str, str]], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATLAS", str(copy))
    rows = [
        {"modelId": "smol", "layer": f"{layer}-tc-12k", "index": "1", "description": f"d{layer}"}
        for layer in range(5)
    ]
    (tmp_path / "explanations").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "explanations" / f"batch-{number}.jsonl").write_text(json.dumps(row))
    given = ("label", "import", str(tmp_path / "explanations"), "--source", "neuronpedia", "--set", "tc")
    code, _, error = run(*given)
    assert (
        code == 2
        and "batch-3.jsonl, line 1: no dictionary of layer 3; there are those of layers 0 to 2" in error
    )
    code, text, error = run(*given, "--skip-unknown", "--json")
    assert code == 0, error
    said = json.loads(text)
    assert (said["labels"], said["features"]) == (3, 3)
    assert any(
        note.startswith("rows that name no feature of this atlas, left out: 2") for note in said["notes"]
    )
    assert "taken for smol/tc: smol, sources N-tc-12k" in said["notes"]
    assert "neuronpedia" in run("label", "list")[1]
    found = json.loads(run("search", "--label", "D1", "--json")[1])["features"]
    assert found == [{"feature": "smol/tc/L01.mlp/1", "label": "d1", "source": "neuronpedia", "score": None}]
    assert run("search", "the", "--label", "d1")[0] == run("search")[0] == 2
    assert run("label", "remove", "--source", "neuronpedia")[0] == 2  # nobody to ask
    assert run("label", "remove", "--source", "neuronpedia", "--yes")[0] == 0
    assert labels_in(copy) == SHOWN
