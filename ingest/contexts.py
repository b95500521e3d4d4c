"""Contexts: a corpus cut into rows of tokens of one length, in an order that only the seed decides.

Each document is cut into consecutive pieces that do not overlap, the model's first token is put in front of
each, and the remainder at a document's end is dropped and counted. Position 0 of such a context is a sink
without content: it is not scored, enters no statistic and no training, and a dictionary in place leaves it
as the model has it.

The order is that of blake2b(seed, document hash, piece): so a limit takes the same sample of the whole
corpus whatever the order of its files.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal

import numpy as np

from ingest.corpora import HELD_OUT, Corpus, Tally
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models.tokenizer import Tokenizer

__all__ = ["Contexts", "make_contexts"]

LENGTH = 128
_IN_MEMORY = 256 << 20  # bytes of tokens; beyond them in a file without a name
_BLOCK = 8192  # rows


@dataclass(frozen=True, eq=False)
class Contexts:
    """n contexts of T tokens."""

    tokens: np.ndarray  # (n, T) int32, memory-mapped where large
    document: np.ndarray  # (n,) int32: of `documents`
    documents: tuple[str, ...]  # hashes of the documents that have a context here
    first_scored: int  # positions before it are in no statistic
    pad: int | None = None  # positions with this token are neither
    part: str = "all"
    share: float = HELD_OUT  # of the documents that are held out
    seed: int = 0
    dropped: int = 0  # tokens of remainders
    duplicates: int = 0  # documents

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """T."""
        return self.tokens.shape[1]

    def batches(self, size: int) -> Iterator[np.ndarray]:
        """(≤ size, T) int64 rows, in order."""
        for lo in range(0, len(self.tokens), size):
            yield self.tokens[lo : lo + size].astype(np.int64)

    def scored(self, tokens: np.ndarray) -> np.ndarray:
        """(B, T) bool: which positions of these rows are in statistics."""
        mask = np.ones(tokens.shape, dtype=bool) if self.pad is None else tokens != self.pad
        mask[:, : self.first_scored] = False
        return mask


def make_contexts(
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    length: int | None = None,
    first: int | Literal["own"] | None = "own",
    part: str = "all",
    share: float = HELD_OUT,
    limit: int | None = None,
    seed: int = 0,
    pad: int | None = None,
) -> Contexts:
    """Contexts of a part of a corpus.

    length: T, the first token included; default 128, or a token matrix's own. first: the token at position
    0; "own" is the tokenizer's, None is none. limit: so many contexts at most, a random sample of the part.
    pad: of token matrices, the id of positions without a token.
    Raises InputError for a corpus whose documents are all shorter than a context, a part without documents,
    and whatever the corpus cannot give.
    """
    if length is not None and length < 2:
        raise InputError(f"context length {length}: expected 2 tokens or more")
    if limit is not None and limit < 1:
        raise InputError(f"{limit} contexts: expected 1 or more")
    tally, dropped, longest, in_part = Tally(), 0, 0, 0
    if corpus.of_tokens:
        put = None if first == "own" else first
        pieces_of = corpus.rows(part, share, pad, tally)
    else:
        if tokenizer is None:
            raise InputError(f"{corpus.where}: is text, which needs a tokenizer; give one, or token ids")
        length = length or LENGTH
        put = tokenizer.first if first == "own" else first
        pieces_of = _texts(corpus, tokenizer, part, share, tally)
    spool: _Spool | None = None
    for digest, ids in pieces_of:
        length = length or len(ids) + (put is not None)
        spool = spool or _Spool(length, limit, seed)
        in_part += 1
        longest = max(longest, len(ids))
        room = length - (put is not None)
        # A row of a matrix is one context: its end is no further one.
        count = min(len(ids) // room, 1) if corpus.of_tokens else len(ids) // room
        dropped += len(ids) - count * room
        if count:
            rows = np.empty((count, length), np.int32)
            rows[:, length - room :] = ids[: count * room].reshape(count, room)
            if put is not None:
                rows[:, 0] = put
            spool.add(digest, rows)
    if not in_part:
        raise InputError(
            f"{corpus.where}: none of its {tally.documents} documents falls into the part {part!r} (share "
            f"held out: {share:g}, by hash); take part 'all', or more documents"
        )
    if spool is None or not spool.count:
        raise InputError(
            f"{corpus.where}: the longest of {in_part} documents has {longest} tokens, a context needs "
            f"{(length or 0) - (put is not None)}; give longer texts or a shorter length"
        )
    tokens, document, documents = spool.finish()
    return Contexts(
        tokens=tokens,
        document=document,
        documents=documents,
        first_scored=int(put is not None),
        pad=pad,
        part=part,
        share=share,
        seed=seed,
        dropped=dropped,
        duplicates=tally.duplicates,
    )


def _texts(
    corpus: Corpus, tokenizer: Tokenizer, part: str, share: float, tally: Tally
) -> Iterator[tuple[str, np.ndarray]]:
    for document in corpus.documents(part, share, tally):
        yield document.hash, np.array(tokenizer.encode(document.text), dtype=np.int32)


class _Spool:
    """Collects rows as they come, keeps the `limit` first of the shuffled order, and gives them in it."""

    def __init__(self, length: int, limit: int | None, seed: int) -> None:
        self._length, self._limit, self._seed = length, limit, seed
        self._documents: list[str] = []
        self._rows: list[np.ndarray] = []
        self._ranks: list[np.ndarray] = []
        self._owners: list[np.ndarray] = []
        self._file: IO[bytes] | None = None
        self._held = 0  # rows in memory
        self.count = 0

    def add(self, digest: str, rows: np.ndarray) -> None:
        key = bytes.fromhex(digest) + self._seed.to_bytes(8, "little", signed=True)
        ranks = [
            int.from_bytes(hashlib.blake2b(key + piece.to_bytes(4, "little"), digest_size=8).digest())
            for piece in range(len(rows))
        ]
        self._rows.append(rows)
        self._ranks.append(np.array(ranks, dtype=np.uint64))
        self._owners.append(np.full(len(rows), len(self._documents), np.int32))
        self._documents.append(digest)
        self._held += len(rows)
        self.count += len(rows)
        if self._limit is not None and self._held > 2 * self._limit + 4096:
            self._prune(self._limit)
        elif self._limit is None and self._held * self._length * 4 > _IN_MEMORY:
            self._write()

    def finish(self) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        """(tokens, document, documents)."""
        ranks, owners = np.concatenate(self._ranks), np.concatenate(self._owners)
        order = np.argsort(ranks, kind="stable")[: self._limit]
        if self._file is None:
            tokens = np.concatenate(self._rows)[order]
        else:
            self._write()
            shape = (len(order), self._length)
            unsorted = np.memmap(self._file, np.int32, "r", shape=shape)
            with tempfile.TemporaryFile() as file:  # the map outlives the name and the handle
                tokens = np.memmap(file, np.int32, "w+", shape=shape)
            for lo in range(0, len(order), _BLOCK):
                tokens[lo : lo + _BLOCK] = unsorted[order[lo : lo + _BLOCK]]
            self._file.close()
        numbers, document = np.unique(owners[order], return_inverse=True)
        return tokens, document.astype(np.int32), tuple(self._documents[number] for number in numbers)

    def _prune(self, limit: int) -> None:
        ranks = np.concatenate(self._ranks)
        best = np.sort(np.argpartition(ranks, limit)[:limit])
        self._ranks = [ranks[best]]
        self._rows = [np.concatenate(self._rows)[best]]
        self._owners = [np.concatenate(self._owners)[best]]
        self._held = limit

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the spool)
        for rows in self._rows:
            self._file.write(rows.tobytes())
        self._file.flush()
        self._rows, self._held = [], 0
