"""What a token id reads as: decoded for a person, whatever the tokenizer's own spelling."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ingest.errors import InputError
from ingest.models import open_model
from ingest.models.token_texts import _bytes_of_characters
from tests.ingest.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model") / "llama"
    tiny_model("llama").save_pretrained(where)
    return where


def texts(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_model(folder, check=False).token_texts()


def byte_level(vocabulary):
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_byte_level_tokens_are_decoded(folder):
    tokenizer = byte_level(["a", "Ġthe", "Ċ", "Ã©", "Ã", "âĢ", "Ġä¸Ģ"])
    tokenizer.add_special_tokens(["<|end|>"])
    found = texts(folder, tokenizer)
    assert found[:8] == ["a", " the", "\n", "é", "\\xc3", "\\xe2\\x80", " 一", "<|end|>"]
    assert found[8:] == [f"<id {number}>" for number in range(8, 61)]


def test_the_byte_table_is_the_tokenizers_own():
    """Every byte has one character, and the tokenizers library decodes it to that byte."""
    table, decode = _bytes_of_characters(), decoders.ByteLevel().decode
    assert sorted(table.values()) == list(range(256))
    for character, byte in table.items():
        if byte < 128:
            assert decode([character]) == chr(byte)
    for first, second in (("é".encode(), "é"), ("一".encode(), "一"), ("🙂".encode(), "🙂")):
        spelt = {byte: character for character, byte in table.items()}
        assert decode(["".join(spelt[byte] for byte in first)]) == second


def test_sentencepiece_tokens_are_decoded(folder):
    vocabulary = {"<unk>": 0, "▁the": 1, "s": 2, "<0x0A>": 3, "<0xE2>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert texts(folder, tokenizer)[:5] == ["<unk>", " the", "s", "\n", "\\xe2"]


def test_a_unigram_vocabulary_is_a_list(folder):
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁so", -1.0), ("on", -2.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    assert texts(folder, tokenizer)[:3] == ["<unk>", " so", "on"]


def test_another_tokenizer_can_be_given(folder, tmp_path):
    byte_level(["x", "Ġy"]).save(str(tmp_path / "tokenizer.json"))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        assert open_model(folder, tokenizer=given, check=False).token_texts()[:2] == ["x", " y"]


def test_a_missing_or_damaged_tokenizer_is_named(folder, tmp_path):
    def refused(given, match):
        with pytest.raises(InputError, match=match):
            open_model(folder, tokenizer=given, check=False).token_texts()

    refused(tmp_path, "no tokenizer")
    refused(tmp_path / "absent.json", "no tokenizer")
    (tmp_path / "tokenizer.json").write_text("{")
    refused(tmp_path, "cannot be read as a tokenizer")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    refused(tmp_path, "cannot be read as a tokenizer")
