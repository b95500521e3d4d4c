"""What each token id reads as, from tokenizer.json or a GGUF file's metadata.

Byte-level tokens are decoded to UTF-8 (their leading space kept), SentencePiece's ▁ becomes a space. A token
that is no UTF-8 by itself is shown with its bytes escaped (\\xe2\\x80); an id without a token as <id 123>.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.errors import InputError
from ingest.models.libraries import one_line

if TYPE_CHECKING:
    from ingest.models.source import Source

__all__ = ["token_texts"]

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_texts(source: Source, d_vocab: int, tokenizer: Path | None = None) -> list[str]:
    """d_vocab texts. `tokenizer`: a directory or a tokenizer.json to take in place of the model's own.

    Raises InputError where the tokenizer given is none, or one cannot be read.
    """
    if tokenizer is None and source.gguf is not None:
        found, style = _from_gguf(source.gguf.metadata, source.path)
    elif tokenizer is None and not any((source.path / name).is_file() for name in _FILES):
        found, style = {}, "plain"  # a model without a tokenizer has weights all the same
    else:
        found, style = _from_json(tokenizer or source.path)
    texts = [f"<id {number}>" for number in range(d_vocab)]
    for number, token in found.items():
        if number < d_vocab:
            texts[number] = _readable(token, style)
    return texts


def _from_gguf(metadata: dict[str, Any], where: Path) -> tuple[dict[int, str], str]:
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not tokens:
        raise InputError(f"{where}: the GGUF file holds no tokenizer")
    return dict(enumerate(tokens)), "byte-level" if kind == "gpt2" else "sentencepiece"


def _from_json(where: Path) -> tuple[dict[int, str], str]:
    file = where / "tokenizer.json" if where.is_dir() else where
    if not file.is_file():
        return _from_library(where)
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = stored["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = {number: token for token, number in vocabulary.items()}
        else:  # Unigram: [token, score] in order of ids
            found = {number: token for number, (token, _) in enumerate(vocabulary)}
        found |= {one["id"]: one["content"] for one in stored.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: cannot be read as a tokenizer ({type(error).__name__}: {error})") from None
    parts = json.dumps([stored.get("decoder"), stored.get("pre_tokenizer")])
    if '"ByteLevel"' in parts:
        return found, "byte-level"
    pieces = "\\u2581" in parts or "Metaspace" in parts
    return found, "sentencepiece" if pieces else "plain"


def _from_library(where: Path) -> tuple[dict[int, str], str]:
    """An older tokenizer in its own files (vocab.json and merges.txt, tokenizer.model)."""
    if not any((where / name).is_file() for name in _FILES[1:]):
        raise InputError(f"{where}: no tokenizer; expected one of {', '.join(_FILES)}")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(where).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise InputError(f"{where}: the tokenizer cannot be read: {one_line(error)}") from error
    found = {number: token for token, number in backend.get_vocab(with_added_tokens=True).items()}
    decoder = repr(backend.decoder)
    return found, "byte-level" if "ByteLevel" in decoder else "sentencepiece"


def _readable(token: str, style: str) -> str:
    if style == "byte-level":
        bytes_of = _bytes_of_characters()
        if all(character in bytes_of for character in token):
            return bytes(map(bytes_of.__getitem__, token)).decode("utf-8", errors="backslashreplace")
        return token
    if style == "sentencepiece":
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)]).decode("utf-8", errors="backslashreplace")
        return token.replace("\u2581", " ")
    return token


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 for itself, the
    other bytes, in order, for the characters from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
