"""Files of labels are read in every form that they come in; what is wrong with one is said with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import atlas.label_files
from atlas.errors import AtlasError
from atlas.keys import DictionaryName
from atlas.label_files import MOST_TEXT, LabelFile, LabelRow, label_files
from atlas.label_places import Places

KNOWN = [
    DictionaryName(f"gpt/{name}/L{layer:02d}.{site}", "gpt", name, layer, site, size, alias)
    for name, site, size, alias in (("tc", "mlp", 16, "t"), ("res", "resid_pre", 1000, None))
    for layer in (0, 1, 5)
]


def written(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows_of(path: Path, content: str | bytes, score: str | None = None) -> list[LabelRow]:
    return list(LabelFile(written(path, content), score).rows())


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


TWO = [("t5[3]", "colours, of all kinds"), ("gpt/res/L01.resid_pre/7", "wörds")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'key,label\nt5[3],"colours, of all kinds"\n\ngpt/res/L01.resid_pre/7, wörds \n'),
        ("a.csv", 'Label,Feature Key\n"colours, of all kinds",t5[3]\nwörds,gpt/res/L01.resid_pre/7\n'),
        (
            "a.csv",
            '\ufefffeature,explanationText\r\nt5[3],"colours, of all kinds"\r\n'
            "gpt/res/L01.resid_pre/7,wörds\r\n",
        ),
        ("a.tsv", "key\tdescription\nt5[3]\tcolours, of all kinds\ngpt/res/L01.resid_pre/7\twörds\n"),
        ("a.tsv.gz", "key\ttext\nt5[3]\tcolours, of all kinds\ngpt/res/L01.resid_pre/7\twörds\n"),
        ("a.jsonl", lines(*({"key": key, "explanation": text} for key, text in TWO))),
        ("a.ndjson.gz", lines(*({"key": key, "text": text} for key, text in TWO)) + "\n\n"),
        ("a.json", json.dumps([{"key": key, "label": text} for key, text in TWO])),
        ("a.json", json.dumps(dict(TWO))),
        ("a.json.gz", json.dumps({key: {"label": text} for key, text in TWO})),
    ],
)  # fmt: skip
def test_keys_and_texts_in_every_form(tmp_path: Path, name: str, content: str) -> None:
    assert [(row.key, row.text) for row in rows_of(tmp_path / name, content)] == TWO


def test_places_scores_and_authors_are_kept_and_the_rest_is_named(tmp_path: Path) -> None:
    header = "layer,feature,label,F1 score,precision,author,note\n"
    content = f"{header}5,3,a,0.5,1,me,x\n1,7,b,,0.25,,y\n0,0,,0.9,1,,z\n"
    file = LabelFile(written(tmp_path / "a.csv", content), "note score")
    rows = list(file.rows())
    assert [(row.layer, row.number, row.key, row.origin) for row in rows] == [
        (5, 3, None, None),
        (1, 7, None, None),
    ]
    assert [row.scores for row in rows] == [{"F1 score": 0.5, "precision": 1.0}, {"precision": 0.25}]
    assert [row.author for row in rows] == ["me", None]
    assert (list(file.columns), file.empty) == (["note"], 1)
    named = rows_of(tmp_path / "b.csv", "key,text,my measure\nt5[3],a,7\n", "My_Measure")
    assert named[0].scores == {"my measure": 7.0}


EXPORT = {
    "modelId": "gpt2-small", "layer": "5-res-jb", "index": "204", "description": "time phrases",
    "typeName": "oai_token-act-pair", "explanationModelName": "gpt-4o-mini", "embedding": "[0.0, 1.0]",
}  # fmt: skip


def test_neuronpedias_exports(tmp_path: Path) -> None:
    file = LabelFile(written(tmp_path / "batch-0.jsonl.gz", lines(EXPORT, {**EXPORT, "index": 7})))
    first, second = file.rows()
    assert (first.layer, first.number, first.text) == (5, 204, "time phrases")
    assert (first.origin, second.number) == (("gpt2-small", "res-jb"), 7)
    assert first.author == "gpt-4o-mini, oai_token-act-pair"
    assert list(file.columns) == ["embedding"]


def test_neuronpedias_scores_and_its_api(tmp_path: Path) -> None:
    scores = [
        {"value": 0.7, "explanationScoreTypeName": "eleuther_fuzz", "explanationScoreModelName": "a"},
        {"value": 0.4, "explanationScoreTypeName": "eleuther_fuzz", "explanationScoreModelName": "b"},
        {"value": None, "explanationScoreTypeName": "eleuther_recall"},
    ]
    place = {"modelId": "gpt2-small", "layer": "5-res-jb", "index": "3"}
    feature = {**place, "explanations": [{"description": "a", "scores": scores}, {"description": "b"}]}
    for name, content in (("a.jsonl", lines(feature)), ("a.json", json.dumps(feature))):
        rows = rows_of(tmp_path / name, content)
        assert [(row.layer, row.number, row.text) for row in rows] == [(5, 3, "a"), (5, 3, "b")]
        assert [row.scores for row in rows] == [{"eleuther_fuzz": 0.7, "eleuther_fuzz by b": 0.4}, {}]
    whole = {"modelId": "gpt2-small", "explanationsCount": 1, "explanations": [EXPORT]}
    assert rows_of(tmp_path / "b.json", json.dumps(whole))[0].text == "time phrases"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "id,words\n1,a\n", "line 1: expected key, or layer and index.*the columns 'id', 'words'"),
        ("a.csv", "", "line 1: expected key.*none"),
        ("a.csv", "key,label\nt5[3],a\nt5[4]\n", "line 3: 1 cells, but the first line names 2"),
        ("a.csv", "key,label,label\n", "line 1: two columns are called label"),
        ("a.csv", 'key,label\nt5[3],"a\n', "line 2: not CSV"),
        ("a.csv", b"key,label\nt5[3],caf\xe9\n", r"line 2: byte 10 \(0xe9\) is no UTF-8"),
        ("a.csv", "key,label\nt5[3],a\n".encode("utf-16"), "line 1: UTF-16; save the file as UTF-8"),
        (
            "a.csv",
            f"key,label\nt5[3],{'x' * (MOST_TEXT + 1)}\n",
            "line 2: label of 2,001 characters; expected at most 2,000",
        ),
        ("a.csv", f"key,label\nt5[3],{'x' * 140_000}\n", "line 2: not CSV .*limit"),
        ("a.csv", "layer,index,label\n5,3.5,a\n", "line 2: index '3.5': expected the number of a feature"),
        ("a.csv", "layer,index,label\n-1,3,a\n", "line 2: layer '-1': expected a number"),
        ("a.csv", "key,label,f1\nt5[3],a,nan\n", "line 2: f1 'nan': expected a finite number"),
        ("a.csv", "key,label,f1\nt5[3],a,high\n", "line 2: f1 'high'"),
        ("a.jsonl", '{"key": "t5[3]", "label": "a"}\n{"key": \n', "line 2: not JSON"),
        ("a.jsonl", '["t5[3]", "a"]\n', "line 1: expected an object .* found list"),
        ("a.jsonl", '{"key": "t5[3]", "label": 7}\n', "line 1: label: expected a text, found int"),
        ("a.jsonl", '{"key": "t5[3]", "label": "\\ud800"}\n', "line 1: label: half a surrogate pair"),
        ("a.jsonl", '{"key": "t5[3]", "label": "a", "score": NaN}\n', "NaN is no number"),
        ("a.jsonl", '{"key": "t5[3]", "key": "t5[4]", "label": "a"}\n', "'key' is there twice"),
        ("a.jsonl", "[" * 100_000 + "\n", "nested too deep|not JSON"),
        ("a.json", "7", "a.json: expected an object"),
        ("a.json", '{"t5[3]": 7}', r"'t5\[3\]': expected a text"),
        ("a.json", '[{"key": "t5[3]"}]', "entry 1: expected key.*found the columns 'key'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(AtlasError, match=said) as error:
        rows_of(tmp_path / name, content)
    assert "\n" not in str(error.value)


def test_damaged_and_enormous_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(lines(*[EXPORT] * 50).encode())
    for damaged in (whole[:-20], whole[:20] + b"\0\1\2" + whole[30:], b"no gzip"):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(damaged)
        with pytest.raises(AtlasError, match="not a whole gzip file"):
            list(LabelFile(path).rows())
    monkeypatch.setattr(atlas.label_files, "MOST_LINE", 1 << 20)
    bomb = gzip.compress(b'{"key": "t5[3]", "label": "' + b"x" * (50 << 20))
    (tmp_path / "bomb.jsonl.gz").write_bytes(bomb)
    with pytest.raises(AtlasError, match="line 1: longer than 1 MiB"):
        list(LabelFile(tmp_path / "bomb.jsonl.gz").rows())
    monkeypatch.setattr(atlas.label_files, "MOST_JSON", 1 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(bomb)
    with pytest.raises(AtlasError, match=r"more than 1 MiB of JSON.*\.jsonl"):
        list(LabelFile(tmp_path / "bomb.json.gz").rows())


def test_files_of_a_folder_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("batch-10.jsonl.gz", "batch-2.jsonl.gz", "batch-1.jsonl.gz", "notes.txt"):
        (tmp_path / name).touch()
    names = [path.name for path in label_files([tmp_path])]
    assert names == ["batch-1.jsonl.gz", "batch-2.jsonl.gz", "batch-10.jsonl.gz"]
    (tmp_path / "empty").mkdir()
    for wrong, said in (
        ("notes.txt", r"ends in \.csv"),
        ("none.csv", "no such file"),
        ("empty", "no file in it"),
    ):
        with pytest.raises(AtlasError, match=said):
            label_files([tmp_path / wrong])


def row(
    key: str | None = None, *, layer: int | None = None, number: int | None = None, **more: Any
) -> LabelRow:
    values: dict[str, Any] = {"set": None, "origin": None, "text": "a", "scores": {}, "author": None, **more}
    return LabelRow("f.csv, line 9", key, values["set"], layer, number, *list(values.values())[1:])


@pytest.mark.parametrize(
    ("given", "set", "expected"),
    [
        (row("gpt/tc/L05.mlp/3"), None, "gpt/tc/L05.mlp/3"),
        (row("L05.mlp/3"), None, "gpt/tc/L05.mlp/3"),
        (row("t5[3]"), None, "gpt/tc/L05.mlp/3"),
        (row("L1R999"), None, "gpt/res/L01.resid_pre/999"),
        (row("res/L1R7"), None, "gpt/res/L01.resid_pre/7"),
        (row(layer=5, number=15), "t", "gpt/tc/L05.mlp/15"),
        (row(layer=5, number=15), "gpt/res", "gpt/res/L05.resid_pre/15"),
        (row(layer=5, number=15, set="res"), "t", "gpt/res/L05.resid_pre/15"),
    ],
)
def test_features_are_found_by_key_and_by_place(given: LabelRow, set: str | None, expected: str) -> None:
    places = Places(KNOWN, set)
    for _ in range(2):  # the second time from memory
        dictionary, number = places.of(given) or pytest.fail("not found")
        assert f"{dictionary.key}/{number}" == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (row("t5[16]"), "t5.16.: no such feature; gpt/tc/L05.mlp has the features 0 to 15"),
        (row("gpt/tc/L05.mlp/1000000003"), "no such feature"),  # not its last nine digits
        (row("gpt/tc/L05.mlp/\u06631"), "no such feature"),  # 31 to Python, but not 1
        (row("t2[3]"), "gpt/tc has the layers 0–1, 5"),
        (row("words"), "no feature key"),
        (row("gpt/tc/L05.mlp"), "no feature key"),
        (row(layer=5, number=3), "layer 5 is in several sets: gpt/tc, gpt/res; say which with --set"),
        (row(layer=5, number=16, set="tc"), "feature 16: no such feature"),
        (row(layer=2, number=1), "no dictionary of layer 2; there are those of layers 0 to 5"),
        (row(layer=5, number=1, set="cl\x1b"), r"set 'cl\\x1b': no such set; there are gpt/tc, gpt/res"),
    ],
)
def test_what_is_no_feature_is_said_with_its_line(given: LabelRow, said: str) -> None:
    places = Places(KNOWN, None)
    for _ in range(2):
        with pytest.raises(AtlasError, match=rf"f\.csv, line 9: .*{said}"):
            places.of(given)


def test_the_memory_of_a_name_does_not_hide_that_it_is_ambiguous() -> None:
    known = [
        DictionaryName(f"{m}/s/L00.mlp", m, "s", 0, "mlp", size, None) for m, size in (("a", 9), ("b", 5))
    ]
    places = Places(known, None)
    dictionary, number = places.of(row("s0[7]")) or pytest.fail("not found")
    assert (dictionary.model, number) == ("a", 7)
    with pytest.raises(AtlasError, match=r"2 features fit: a/s/L00\.mlp/3, b/s/L00\.mlp/3"):
        places.of(row("s0[3]"))


def test_unknown_features_can_be_skipped_but_not_ambiguous_ones() -> None:
    places = Places(KNOWN, None, skip_unknown=True)
    assert [places.of(row(key)) for key in ("t5[99]", "t9[0]")] == [None, None]
    assert "t5[99]: no such feature" in places.first_unknown
    for wrong in (row(layer=5, number=3), row("words")):
        with pytest.raises(AtlasError, match="line 9"):
            places.of(wrong)


def test_what_speaks_against_a_source_is_said() -> None:
    places = Places(KNOWN, "tc")
    places.of(row(layer=5, number=3, origin=("gpt2-small", "res_16k-oai")))
    taken, *_ = places.origin_notes({"gpt/tc": "transcoder"})
    assert taken == "taken for gpt/tc: gpt2-small, sources N-res_16k-oai"
    with pytest.raises(AtlasError, match="two sources, gpt2-small N-res_16k-oai and gpt2-small N-att"):
        places.of(row(layer=1, number=3, origin=("gpt2-small", "att")))
    places = Places(KNOWN, "tc")
    places.of(row(layer=5, number=3, origin=("gemma", "gemmascope-res-16k")))
    notes = list(places.origin_notes({"gpt/tc": "transcoder", "gpt/res": "sae"}))
    assert notes[1:] == [
        "warning: gemmascope-res-16k says 16k features, the dictionaries have 16",
        "warning: gemmascope-res-16k against gpt/tc (transcoder)",
    ]
