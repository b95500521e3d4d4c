"""Contexts: every token of a document in its place once, an order that only the seed decides, and samples
that do not depend on how the corpus lies in files."""

import hashlib
import json

import numpy as np
import pytest

import ingest.contexts
from ingest.contexts import make_contexts
from ingest.corpora import open_corpus
from ingest.errors import InputError


class Letters:
    """A tokenizer of the alphabet."""

    def __init__(self, first=0):
        self.first = first

    def encode(self, text):
        return [ord(letter) - 96 for letter in text if letter.isalpha()]


def corpus(tmp_path, texts, name="a.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_corpus(tmp_path / name)


def words(n=40, seed=0):
    random = np.random.default_rng(seed)
    return ["".join(map(chr, random.integers(97, 123, random.integers(3, 60)))) for _ in range(n)]


def test_documents_are_cut_into_pieces_and_remainders_counted(tmp_path):
    texts = words()
    found = make_contexts(corpus(tmp_path, texts), Letters(), 8)
    assert (found.tokens.dtype, found.document.dtype) == (np.int32, np.int32)
    assert (found.tokens[:, 0] == 0).all()
    expected = {
        (hashlib.sha256(text.encode()).hexdigest(), *Letters().encode(text[at : at + 7]))
        for text in texts
        for at in range(0, len(text) - 6, 7)
    }
    hashes = [found.documents[number] for number in found.document]
    assert {(digest, *row[1:]) for digest, row in zip(hashes, found.tokens.tolist(), strict=True)} == expected
    assert len(found) == sum(len(text) // 7 for text in texts)
    assert found.dropped == sum(len(text) % 7 for text in texts)
    assert found.length == 8
    assert set(hashes) == set(found.documents)


def test_the_token_put_in_front_is_not_scored(tmp_path):
    some = corpus(tmp_path, words())
    own = make_contexts(some, Letters(first=26), 8)
    assert (own.first_scored, set(own.tokens[:, 0].tolist())) == (1, {26})
    assert own.scored(own.tokens[:2]).tolist() == [[False] + 7 * [True]] * 2
    none = make_contexts(some, Letters(first=None), 8)
    assert none.first_scored == 0
    assert none.scored(none.tokens[:1]).all()
    assert np.array_equal(make_contexts(some, Letters(), 8, first=None).tokens, none.tokens)
    assert set(make_contexts(some, Letters(), 8, first=5).tokens[:, 0].tolist()) == {5}


def test_the_order_is_the_seeds_and_nothing_elses(tmp_path):
    texts = words(60)
    one = make_contexts(corpus(tmp_path, texts), Letters(), 8, seed=3)
    other = make_contexts(corpus(tmp_path, texts[::-1], "b.jsonl"), Letters(), 8, seed=3)
    assert np.array_equal(one.tokens, other.tokens)
    assert [one.documents[at] for at in one.document] == [other.documents[at] for at in other.document]
    assert not np.array_equal(make_contexts(corpus(tmp_path, texts), Letters(), 8, seed=4).tokens, one.tokens)
    # A limit takes the beginning of the same order, and of a longer corpus the rest stays in order.
    few = make_contexts(corpus(tmp_path, texts), Letters(), 8, seed=3, limit=9)
    assert np.array_equal(few.tokens, one.tokens[:9])
    assert set(few.documents) == {one.documents[at] for at in one.document[:9]}


@pytest.mark.parametrize("limit", [None, 30])
def test_large_corpora_go_through_files_and_small_samples_through_little_memory(tmp_path, monkeypatch, limit):
    texts = words(3000)
    plain = make_contexts(corpus(tmp_path, texts), Letters(), 5, limit=limit)
    monkeypatch.setattr(ingest.contexts, "_IN_MEMORY", 10_000)
    monkeypatch.setattr(ingest.contexts, "_BLOCK", 100)
    spooled = make_contexts(corpus(tmp_path, texts), Letters(), 5, limit=limit)
    assert isinstance(spooled.tokens, np.memmap) is (limit is None)
    assert np.array_equal(spooled.tokens, plain.tokens)
    assert np.array_equal(spooled.document, plain.document)
    rows = list(spooled.batches(7))
    assert np.array_equal(np.concatenate(rows), plain.tokens)
    assert rows[0].dtype == np.int64


def test_parts_share_no_document(tmp_path):
    some = corpus(tmp_path, words(300))
    parts = [make_contexts(some, Letters(), 8, part=part, share=0.3) for part in ("train", "held-out")]
    assert not set(parts[0].documents) & set(parts[1].documents)
    assert sum(map(len, parts)) == len(make_contexts(some, Letters(), 8))
    assert (parts[1].part, parts[1].share) == ("held-out", 0.3)


def test_rows_of_ids_are_contexts_as_they_are(tmp_path):
    ids = np.random.default_rng(0).integers(1, 9, (30, 6))
    ids[:, 4:] = np.where(np.arange(30)[:, None] % 3 == 0, -100, ids[:, 4:])
    np.save(tmp_path / "a.npy", ids)
    found = make_contexts(open_corpus(tmp_path / "a.npy"), None, pad=9)
    assert (found.length, found.first_scored, found.dropped, found.pad) == (6, 0, 0, 9)
    assert sorted(found.tokens.tolist()) == sorted(np.where(ids == -100, 9, ids).tolist())
    assert np.array_equal(found.scored(found.tokens), found.tokens != 9)
    short = make_contexts(open_corpus(tmp_path / "a.npy"), None, 4, pad=9)
    assert (short.length, len(short), short.dropped) == (4, 30, 60)
    with pytest.raises(InputError, match="longest of 30 documents has 6 tokens, a context needs 7"):
        make_contexts(open_corpus(tmp_path / "a.npy"), None, 7, pad=9)


def test_what_gives_no_context_is_told_in_a_line(tmp_path):
    short = corpus(tmp_path, ["abc", "abcdef"])
    for options, said in [
        ({"length": 8}, "the longest of 2 documents has 6 tokens, a context needs 7"),
        ({"length": 1}, "expected 2 tokens or more"),
        ({"limit": 0}, "expected 1 or more"),
        ({"part": "held-out", "share": 0.0}, "none of its 2 documents falls into the part 'held-out'"),
    ]:
        with pytest.raises(InputError, match=said):
            make_contexts(short, Letters(), **{"length": 4, **options})
    with pytest.raises(InputError, match="is text, which needs a tokenizer"):
        make_contexts(short, None, 4)
