"""Text to token ids as the model was trained to see it: from tokenizer.json, a tokenizer's older files, or a
GGUF file's metadata.

No special token is added, and the text of a special token inside a document is text: a page about
`<|endoftext|>` does not end there. What stands at position 0 is `first`, put there by whoever makes contexts.

A GGUF file names its pre-tokenizer (tokenizer.ggml.pre) and leaves its rules to the reader. Those known here
are in `_PRE`; on digits a byte-level vocabulary does not tell one from another, so an unknown one is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.errors import InputError
from ingest.models.gguf_file import GGUFFile
from ingest.models.libraries import library_errors, one_line
from ingest.places import resolve_place

if TYPE_CHECKING:
    import tokenizers

    from ingest.models.residual import ResidualModel
    from ingest.models.source import Source

__all__ = ["Tokenizer", "open_tokenizer"]

_OLDER = ("tokenizer.model", "vocab.json", "vocab.txt")
SEPARATOR = "<|endoftext|>"  # between documents in training, in every vocabulary that has it
_LONG = 1_000_000  # characters: longer texts are encoded in parts, to bound memory
_BREAK = re.compile(r"(?<=[^\W\d_])(?=\n)")  # a letter, then a line's end: no byte-level token spans it

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> (each digit by itself first, the split's pattern or GPT-2's own, NFC first, a text
# that is a token is never merged up)
_PRE: dict[str, tuple[bool, str | None, bool, bool]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo"), (False, None, False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (True, None, False, False)),
    **dict.fromkeys(("llama-bpe", "llama3"), (False, _WORDS + r"\p{N}{1,3}" + _REST, False, True)),
    "qwen2": (False, _WORDS + r"\p{N}" + _REST, True, False),
}
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6  # tokenizer.ggml.token_type


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer without its post-processing."""

    source: Path
    first: int | None  # the token to put at position 0; None where the model knows none
    size: int  # one more than the largest id
    byte_level: bool
    _backend: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone."""
        ids: list[int] = []
        for part in self._parts(text):
            ids.extend(self._backend.encode_batch_fast([part], add_special_tokens=False)[0].ids)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def check(self, d_vocab: int) -> None:
        """Raises InputError where the tokenizer gives ids that a model of this vocabulary does not have."""
        if self.size > d_vocab:
            raise InputError(
                f"{self.source}: the tokenizer has {self.size} tokens, the model {d_vocab}: it is for"
                f" another model"
            )

    def _parts(self, text: str) -> Iterator[str]:
        at = 0
        while self.byte_level and len(text) - at > _LONG:
            found = _BREAK.search(text, at + _LONG)
            if found is None:
                break
            yield text[at : found.start()]
            at = found.start()
        yield text[at:]


def open_tokenizer(
    model_or_source: ResidualModel | Source | str | Path, tokenizer: Path | None = None
) -> Tokenizer:
    """The tokenizer of a model, or of the model at a place; or the one at `tokenizer`, a directory or
    tokenizer.json.

    first: what the tokenizer itself puts in front; else `<|endoftext|>` where the vocabulary has it; else the
    beginning-of-sequence token that its files name; else None.
    Raises InputError where there is none, it cannot be read, or its pre-tokenizer is not known.
    """
    if tokenizer is None and not isinstance(model_or_source, str | Path):
        tokenizer = getattr(model_or_source, "tokenizer", None)
    if tokenizer is not None:
        return _from_files(Path(tokenizer))
    if isinstance(model_or_source, str | Path):
        return _from_place(resolve_place(str(model_or_source)))
    model: Any = model_or_source
    source: Source = getattr(model, "_source", model)
    return _from_files(source.path) if source.gguf is None else _from_gguf(source.gguf.metadata, source.path)


def _from_place(place: str) -> Tokenizer:
    path = Path(place)
    if not path.exists():  # a hub name
        from ingest.models.source import find_source

        path = find_source(place).path
    if path.is_file() and path.suffix != ".json":
        return _from_gguf(GGUFFile(path).metadata, path)
    return _from_files(path)


# --- Hugging Face's files -----------------------------------------------------------------------------------


def _from_files(where: Path) -> Tokenizer:
    file = where / "tokenizer.json" if where.is_dir() else where
    folder = file.parent
    if file.is_file():
        backend = _backend(file)
    elif any((folder / name).is_file() for name in _OLDER):
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        except (OSError, ValueError, ImportError, AttributeError) as error:
            raise InputError(f"{folder}: the tokenizer cannot be read: {one_line(error)}") from error
    else:
        raise InputError(
            f"{where}: no tokenizer; expected tokenizer.json or one of {', '.join(_OLDER)}; give one, or a "
            f"corpus of token ids"
        )
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return _tokenizer(file, backend, _put_in_front(backend), _config(folder / "tokenizer_config.json"))


def _backend(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)  # the library's own message for broken JSON names no place
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as a tokenizer ({one_line(error)})") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception, and nothing else is called here
        raise InputError(f"{file}: cannot be read as a tokenizer ({one_line(error)})") from error


def _put_in_front(backend: tokenizers.Tokenizer) -> int | None:
    """What the post-processor puts in front of a text."""
    with_it, without = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
    return with_it[0] if with_it[:1] != without[:1] and with_it else None


def _config(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    with library_errors(f"{file}: cannot be read as JSON"):
        values = json.loads(file.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}


def _tokenizer(
    where: Path, backend: tokenizers.Tokenizer, in_front: int | None, config: Mapping[str, Any]
) -> Tokenizer:
    named = config.get("bos_token")
    text = named.get("content") if isinstance(named, dict) else named
    bos = backend.token_to_id(text) if isinstance(text, str) else None
    if in_front is None and config.get("add_bos_token") is True:
        in_front = bos
    for candidate in (in_front, backend.token_to_id(SEPARATOR), bos):
        if candidate is not None:
            break
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return Tokenizer(where, candidate, largest + 1, "ByteLevel" in repr(backend.pre_tokenizer), backend)


# --- GGUF ---------------------------------------------------------------------------------------------------


def _from_gguf(metadata: Mapping[str, Any], where: Path) -> Tokenizer:
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not tokens:
        raise InputError(f"{where}: the GGUF file holds no tokenizer; give one")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        backend = _byte_level(metadata, where, tokens)
    elif kind == "llama":
        backend = _sentencepiece(metadata, where, tokens, types)
    else:
        raise InputError(
            f"{where}: tokenizer.ggml.model is {kind!r}; gpt2 and llama are read; give the model's "
            f"tokenizer.json"
        )
    import tokenizers

    own = [token for token, type in zip(tokens, types, strict=True) if type == _USER_DEFINED]
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in own])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    adds = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    config = {"add_bos_token": bool(adds)}
    named = tokens[bos] if isinstance(bos, int) and 0 <= bos < len(tokens) else None
    return _tokenizer(where, backend, None, config | {"bos_token": named})


def _byte_level(metadata: Mapping[str, Any], where: Path, tokens: list[str]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE:
        raise InputError(
            f"{where}: tokenizer.ggml.pre is {pre!r}, a pre-tokenizer that is not known (known: "
            f"{', '.join(_PRE)}); give the model's tokenizer.json"
        )
    digits, pattern, composed, whole = _PRE[pre]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    with library_errors(f"{where}: tokenizer.ggml.merges does not fit tokenizer.ggml.tokens"):
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], where: Path, tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours the pair is joined whose piece scores highest."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise InputError(
            f"{where}: tokenizer.ggml.scores has not one number for each of {len(tokens)} tokens"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    joined = {token for token, type in zip(tokens, types, strict=True) if type in (_NORMAL, _USER_DEFINED)}
    merges = []
    for piece in joined:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in joined and right in joined:
                score = scores[vocabulary[piece]]
                merges.append((-score, vocabulary[piece], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("\u2581")] if space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if space else [])])
    return backend
