"""Corpora: documents one by one from text files, JSON lines, Parquet, folders of these, or matrices of token
ids for models whose data are no text.

A document's hash, sha256 of its text's UTF-8 (of a row of ids: of its int32 bytes, little-endian), is all
that identifies it: duplicates are dropped by it, and it alone decides the part a document belongs to. So
training and evaluation agree on what is held out whatever the files' names, order or number.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from ingest.errors import InputError, near
from ingest.places import resolve_place

__all__ = ["HELD_OUT", "PARTS", "Corpus", "Document", "Tally", "in_part", "open_corpus"]

HELD_OUT = 0.1  # share of the documents
PARTS = ("train", "held-out", "all")
_TEXT = {".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc", ".py"}
_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_MATRICES = {".npy", ".safetensors"}
_PAD = -100  # what training libraries write where there is no token
_ROWS = 4096  # rows of a matrix, or of a Parquet batch over 16, in memory at once


@dataclass(frozen=True)
class Document:
    """One text. name: its file, and the line or row in it."""

    name: str
    text: str
    hash: str  # sha256 of the text's UTF-8, hex


@dataclass
class Tally:
    """What a pass over a corpus met; filled as it goes."""

    documents: int = 0  # different ones, of every part
    duplicates: int = 0
    empty: int = 0


def in_part(digest: str, part: str, share: float = HELD_OUT) -> bool:
    """Whether a document with this hash belongs to "train", "held-out" or "all".

    Raises InputError for another part, or a share that is not 0 or more and less than 1.
    """
    if part not in PARTS:
        raise InputError(f"part: {part!r} is none{near(part, PARTS)}")
    if not 0.0 <= share < 1.0:
        raise InputError(f"held-out share: expected 0 or more and less than 1, found {share}")
    if part == "all":
        return True
    return (int(digest[:16], 16) < share * 2.0**64) == (part == "held-out")


@dataclass(frozen=True)
class Corpus:
    """Files that hold documents, or matrices of token ids. Nothing of them is kept in memory."""

    where: Path
    files: tuple[Path, ...]
    of_tokens: bool  # rows of ids: `rows`; else texts: `documents`
    field: str | None = None  # the text's key or column; default: text
    left_out: int = 0  # files of the folder that are of no known kind

    def documents(
        self, part: str = "all", share: float = HELD_OUT, tally: Tally | None = None
    ) -> Iterator[Document]:
        """The texts of a part, in the order of files; duplicates and empty ones left out and counted.

        Raises InputError for what is not text, for a missing field, and at the end for a corpus without
        documents.
        """
        if self.of_tokens:
            raise InputError(f"{self.where}: holds token ids; expected text")
        tally, seen = tally or Tally(), set[bytes]()
        in_part("0" * 64, part, share)
        for file in self.files:
            for name, text in _texts(file, self.field):
                if not text.strip():
                    tally.empty += 1
                    continue
                digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass"))
                if _known(digest.digest(), seen, tally):
                    continue
                if in_part(digest.hexdigest(), part, share):
                    yield Document(name, text, digest.hexdigest())
        self._some(tally)

    def rows(
        self, part: str = "all", share: float = HELD_OUT, pad: int | None = None, tally: Tally | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """(hash, ids (T,) int32) of the rows of a part; -100 becomes `pad`.

        Raises InputError for ids below zero, files whose rows differ in length, and a corpus of texts.
        """
        if not self.of_tokens:
            raise InputError(f"{self.where}: holds text; expected a matrix of token ids")
        tally, seen, width = tally or Tally(), set[bytes](), None
        in_part("0" * 64, part, share)
        for file in self.files:
            for block in _blocks(file):
                if width is not None and block.shape[1] != width:
                    raise InputError(
                        f"{file}: rows of {block.shape[1]} tokens, other files here have {width}; expected"
                        f" one length"
                    )
                width = block.shape[1]
                for row in _filled(file, block, pad):
                    digest = hashlib.sha256(row.astype("<i4").tobytes())
                    if not _known(digest.digest(), seen, tally) and in_part(digest.hexdigest(), part, share):
                        yield digest.hexdigest(), row
        self._some(tally)

    def _some(self, tally: Tally) -> None:
        if not tally.documents:
            raise InputError(f"{self.where}: holds no document; expected at least one that is not empty")


def open_corpus(where: str | Path, field: str | None = None) -> Corpus:
    """The corpus at a path (or `package:NAME/FILE`): a text file is one document; .jsonl(.gz) and .parquet
    hold one in each line or row, under `field`; .npy (n, T) or .safetensors with `tokens` hold token ids; a
    folder holds files of these, in the order of their names.

    Raises InputError where nothing is there, for a folder that mixes texts and token ids, and for a file
    that is damaged at its beginning.
    """
    path = Path(resolve_place(str(where)))
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
        files = [file for file in inside if _known_kind(file)]
        left_out = len(inside) - len(files)
        if not files:
            found = ", ".join(file.name for file in inside[:5]) or "nothing"
            raise InputError(
                f"{path}: no corpus; expected .txt, .md, .rst, .jsonl, .parquet or .npy files, found {found}"
            )
    elif path.is_file():
        files, left_out = [path], 0
    else:
        raise InputError(f"{where}: no such file or folder; expected a corpus")
    of_tokens = [file for file in files if file.suffix in _MATRICES]
    if of_tokens and len(of_tokens) < len(files):
        other = next(file for file in files if file.suffix not in _MATRICES)
        raise InputError(
            f"{path}: holds token ids ({of_tokens[0].name}) and texts ({other.name}); expected one kind"
        )
    return Corpus(path, tuple(files), bool(of_tokens), field, left_out)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _known_kind(file: Path) -> bool:
    return file.suffix in _TEXT | _MATRICES | {".parquet"} or file.name.endswith(_LINES)


def _known(digest: bytes, seen: set[bytes], tally: Tally) -> bool:
    if digest[:16] in seen:
        tally.duplicates += 1
        return True
    seen.add(digest[:16])
    tally.documents += 1
    return False


# --- texts --------------------------------------------------------------------------------------------------


def _texts(file: Path, field: str | None) -> Iterator[tuple[str, str]]:
    """(name, text) of each document of a file."""
    try:
        if file.name.endswith(_LINES):
            yield from _lines(file, field or "text")
        elif file.suffix == ".parquet":
            yield from _parquet(file, field)
        else:
            yield str(file), _decoded(file.read_bytes(), str(file)).removeprefix("\ufeff")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None


def _decoded(raw: bytes, where: str) -> str:
    if b"\0" in raw:
        raise InputError(f"{where}: is not text (it holds zero bytes); expected UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: is not text in UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); convert it"
        ) from None


def _lines(file: Path, field: str) -> Iterator[tuple[str, str]]:
    try:
        with _opened(file) as opened:
            for number, raw in enumerate(opened, start=1):
                where = f"{file}:{number}"
                if not raw.strip():
                    continue
                try:
                    value = json.loads(_decoded(raw, where).removeprefix("\ufeff"))
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{where}: is not JSON ({' '.join(str(error).split())})") from None
                if not isinstance(value, dict) or not isinstance(value.get(field), str):
                    keys = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
                    raise InputError(f"{where}: no text under {field!r}; found {keys or 'nothing'}")
                yield where, value[field]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{file}: truncated or no gzip file ({error})") from None


def _opened(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _parquet(file: Path, field: str | None) -> Iterator[tuple[str, str]]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            column = _column(file, table.schema_arrow, field)
            at = 0
            for batch in table.iter_batches(batch_size=_ROWS // 16, columns=[column]):
                for text in batch.column(0):
                    if (value := text.as_py()) is not None:
                        yield f"{file}:{at}", value
                    at += 1
    except pa.ArrowException as error:
        raise InputError(
            f"{file}: damaged or no Parquet file ({' '.join(str(error).split())[:200]})"
        ) from None


def _column(file: Path, schema: Any, field: str | None) -> str:
    texts = [one.name for one in schema if pa.types.is_string(one.type) or pa.types.is_large_string(one.type)]
    wanted = field or "text"
    if wanted in texts:
        return wanted
    if field is None and len(texts) == 1:
        return texts[0]
    raise InputError(f"{file}: no column of text named {wanted!r}; its columns: {', '.join(schema.names)}")


# --- token ids ----------------------------------------------------------------------------------------------


def _blocks(file: Path) -> Iterator[np.ndarray]:
    """(≤ _ROWS, T) integers."""
    if file.suffix == ".npy":
        try:
            matrix = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise InputError(f"{file}: damaged or no .npy file ({' '.join(str(error).split())})") from None
        _matrix(file, "the array", matrix.dtype, matrix.shape)
        for lo in range(0, len(matrix), _ROWS):
            yield np.asarray(matrix[lo : lo + _ROWS])
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as stored:
            names = list(stored.keys())
            if "tokens" not in names:
                raise InputError(f"{file}: no tensor 'tokens'; found {', '.join(names) or 'nothing'}")
            part = stored.get_slice("tokens")
            rows = part.get_shape()[0] if part.get_shape() else 0
            first = part[0:1] if rows else np.zeros(0)
            _matrix(file, "tokens", first.dtype, tuple(part.get_shape()))
            for lo in range(0, rows, _ROWS):
                yield part[lo : min(lo + _ROWS, rows)]
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: truncated or no safetensors file ({error})") from None


def _matrix(file: Path, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
    if not np.issubdtype(dtype, np.integer) or len(shape) != 2 or 0 in shape:
        raise InputError(
            f"{file}: {name} is {dtype} of shape {shape}; expected whole numbers (contexts, positions)"
        )


def _filled(file: Path, block: np.ndarray, pad: int | None) -> np.ndarray:
    """int32, -100 replaced."""
    absent = block == _PAD
    if absent.any():
        if pad is None:
            raise InputError(f"{file}: holds {_PAD}, which is no token: say the pad token's id")
        block = np.where(absent, pad, block)
    if int(block.min()) < 0 or int(block.max()) > np.iinfo(np.int32).max:
        wrong = int(block.min()) if int(block.min()) < 0 else int(block.max())
        raise InputError(f"{file}: holds {wrong}, which is no token id")
    return block.astype(np.int32)
