"""Corpora: each kind of file gives the same documents, parts are decided by hash alone, and what is no corpus
is told in a line."""

import gzip
import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from ingest.corpora import PARTS, Tally, in_part, open_corpus
from ingest.errors import InputError

TEXTS = ["The first one.", "naïve 日本 — ½", "third\nwith lines\n", "a \u2028 separator"]


def texts_of(where, **options):
    return [document.text for document in open_corpus(where).documents(**options)]


def json_lines(texts, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts)


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines(TEXTS, id=3))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json_lines(TEXTS))
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "text": TEXTS}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"body": pa.array(TEXTS, pa.large_string())}), tmp_path / "d.parquet")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (
            tmp_path / "folder" / ("deep" if number % 2 else "") / f"{number}.{'md' if number else 'txt'}"
        ).write_bytes(text.encode())
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.parquet"):
        assert texts_of(tmp_path / name) == TEXTS
    assert sorted(texts_of(tmp_path / "folder")) == sorted(TEXTS)
    first = next(open_corpus(tmp_path / "a.jsonl").documents())
    assert first.hash == hashlib.sha256(TEXTS[0].encode()).hexdigest()
    assert first.name == f"{tmp_path / 'a.jsonl'}:1"


def test_a_text_file_is_one_document_whatever_its_ending(tmp_path):
    (tmp_path / "notes.log").write_bytes("\ufeffa byte order mark is no text".encode())
    assert texts_of(tmp_path / "notes.log") == ["a byte order mark is no text"]


def test_duplicates_and_empty_texts_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text(json_lines([*TEXTS, "", " \n", TEXTS[1]]))
    (tmp_path / "b.txt").write_text(TEXTS[0])
    tally = Tally()
    assert texts_of(tmp_path, tally=tally) == TEXTS
    assert (tally.documents, tally.duplicates, tally.empty) == (4, 2, 2)


def test_parts_are_decided_by_hash_alone(tmp_path):
    texts = [f"document {number}" for number in range(2000)]
    (tmp_path / "a.jsonl").write_text(json_lines(texts))
    (tmp_path / "b.jsonl").write_text(json_lines(reversed(texts)))
    held, trained = (set(texts_of(tmp_path / "a.jsonl", part=part)) for part in ("held-out", "train"))
    assert held | trained == set(texts)
    assert not held & trained
    assert set(texts_of(tmp_path / "b.jsonl", part="held-out")) == held
    assert abs(len(held) / 2000 - 0.1) < 0.03
    # A smaller share held out lies within a larger one.
    assert set(texts_of(tmp_path / "a.jsonl", part="held-out", share=0.02)) < held
    assert texts_of(tmp_path / "a.jsonl", part="held-out", share=0.0) == []
    assert in_part("00" * 32, "held-out", 0.001)
    assert in_part("ff" * 32, "train", 0.999)


def test_rows_of_token_ids(tmp_path):
    ids = np.random.default_rng(0).integers(0, 60, (50, 9))
    ids[7] = ids[3]
    np.save(tmp_path / "a.npy", ids)
    save_file({"tokens": ids.astype(np.int16), "other": np.zeros(3)}, tmp_path / "b.safetensors")
    for name in ("a.npy", "b.safetensors"):
        corpus = open_corpus(tmp_path / name)
        tally = Tally()
        rows = dict(corpus.rows(tally=tally))
        assert corpus.of_tokens
        assert np.array_equal(np.stack(list(rows.values())), np.delete(ids, 7, 0))
        assert (tally.documents, tally.duplicates) == (49, 1)
        assert hashlib.sha256(ids[0].astype("<i4").tobytes()).hexdigest() in rows
        parts = [set(dict(corpus.rows(part=part, share=0.3))) for part in ("train", "held-out")]
        assert parts[0] | parts[1] == set(rows)
    ids[:, -2:] = -100
    np.save(tmp_path / "c.npy", ids)
    with pytest.raises(InputError, match="holds -100, which is no token: say the pad"):
        list(open_corpus(tmp_path / "c.npy").rows())
    assert {int(row[-1]) for _, row in open_corpus(tmp_path / "c.npy").rows(pad=60)} == {60}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\x00\x01\x02", "is not text (it holds zero bytes)"),
        ("a.txt", "café".encode("latin-1"), "byte 3 is 0xe9"),
        ("a.txt", b"", "holds no document"),
        ("a.jsonl", b"", "holds no document"),
        ("a.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', "a.jsonl:2: no text under 'text'; found body"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: no text under 'text'"),
        ("a.jsonl", b"[1, 2]\n", "found list"),
        ("a.jsonl", b'{"text": "cut', "a.jsonl:1: is not JSON"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00junk", "truncated or no gzip file"),
        ("a.jsonl.gz", gzip.compress(json_lines(TEXTS).encode())[:-12], "truncated or no gzip file"),
        ("a.parquet", b"PAR1 and no more", "damaged or no Parquet file"),
    ],
)
def test_what_is_no_text_is_told_in_a_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        list(open_corpus(tmp_path / name).documents())
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 4)), "is float64 of shape (3, 4)"),
        (np.zeros(4, int), "of shape (4,)"),
        (np.zeros((0, 4), int), "of shape (0, 4)"),
        (np.full((2, 3), -1), "holds -1, which is no token id"),
        (np.array([[object()]]), "damaged or no .npy file"),
    ],
)
def test_what_are_no_token_ids(tmp_path, array, said):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(InputError) as error:
        list(open_corpus(tmp_path / "a.npy").rows())
    assert said in str(error.value)


def test_what_is_no_corpus(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"x")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    np.save(mixed / "a.npy", np.zeros((2, 2), int))
    (mixed / "b.txt").write_text("text")
    unequal = tmp_path / "unequal"
    unequal.mkdir()
    np.save(unequal / "a.npy", np.zeros((2, 2), int))
    np.save(unequal / "b.npy", np.zeros((2, 3), int))
    pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), tmp_path / "two.parquet")
    for where, said in [
        ("absent", "no such file"),
        ("empty", r"no corpus; expected .txt, .md, .* found picture\.png"),
        ("mixed", r"holds token ids \(a\.npy\) and texts \(b\.txt\)"),
        ("unequal", "rows of 3 tokens, other files here have 2"),
        ("two.parquet", "no column of text named 'text'; its columns: a, b"),
    ]:
        with pytest.raises(InputError, match=said):
            corpus = open_corpus(tmp_path / where)
            list(corpus.rows() if corpus.of_tokens else corpus.documents())
    with pytest.raises(InputError, match="holds text; expected a matrix"):
        next(open_corpus(mixed / "b.txt").rows())
    with pytest.raises(InputError, match="holds token ids; expected text"):
        next(open_corpus(mixed / "a.npy").documents())
    for part, share, said in [("test", 0.1, "expected train or held-out"), (PARTS[0], 1.0, "less than 1")]:
        with pytest.raises(InputError, match=said):
            in_part("0" * 64, part, share)
