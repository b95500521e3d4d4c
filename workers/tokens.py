"""Which tokens feed a feature, and which it promotes (methods §2; Transcoders, "de-embedding").

    EMBEDS     W_E[t] · ρ_j                             the row as it joins the stream
    PROMOTES   (ω_i C ⊙ γ_f) · (u_t - mean_t u_t)       u_t the unembedding's row times the logit multiplier

Of each feature (of each reading, for EMBEDS) the k tokens of largest weight and the k of smallest, where
they are positive and negative. Weights are exact (`workers.exact`), ties fall to the smaller token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from workers.exact import rounded_dots
from workers.operands import Candidates, Operand, RowBounds
from workers.pairs import READINGS
from workers.scan import scan
from workers.sides import DictionaryEntry, lengths
from workers.steps import Context, Done, Step
from workers.tables import repeated, write_table
from workers.vectors import Vectors

__all__ = ["embeds_step", "promotes_step", "top_tokens"]

CHUNK = 1 << 25  # numbers of a token matrix held as float64 at once: 256 MB


class Tokens:
    """One side of the vocabulary, a chunk at a time: vectors (n, d) float64, their lengths, the filter's
    operand."""

    def __init__(self, vectors: Vectors, context: Context, side: str) -> None:
        self._model, self._context, self._side = vectors.model, context, side
        facts = vectors.model.facts
        self.size, self._rows = facts.d_vocab, max(CHUNK // facts.d_model, 1024)

    def __iter__(self) -> Any:
        for first in range(0, self.size, self._rows):
            yield first, *self.chunk(first)

    def chunk(self, first: int) -> tuple[np.ndarray, np.ndarray, Operand]:
        """From token `first` on: (vectors, lengths, operand)."""
        last = min(first + self._rows, self.size)

        def make() -> tuple[np.ndarray, np.ndarray, Operand]:
            if self._side == "EMBEDS":
                found = self._model.token_vectors(first, last).numpy()
            else:
                found = self._model.unembedding(first, last).numpy() - self._mean()
            length = lengths(found)
            return found, length, Operand(found, length, length, self._context.device)

        key = ("tokens", self._side, self._model.hash, first, self._context.device)
        return self._context.cached(key, make, memory=10 * (last - first) * self._model.facts.d_model)

    def _mean(self) -> np.ndarray:
        def make() -> np.ndarray:
            total = np.zeros(self._model.facts.d_model)
            for first in range(0, self.size, 4096):  # row after row: one order, whatever the machine
                total = np.add.accumulate(
                    np.concatenate([total[None], self._model.unembedding(first, first + 4096).numpy()])
                )[-1]
            return total / self.size

        return self._context.cached(("unembedding's mean", self._model.hash), make, memory=1 << 16)


def top_tokens(rows: Operand, vectors: np.ndarray, length: np.ndarray, tokens: Tokens, k: int,
               context: Context) -> tuple[np.ndarray, ...]:  # fmt: skip
    """(row, token, weight float32, rank) of every row's k largest and k smallest weights, by row, sign and
    rank.

    vectors (R, d) float64 with their lengths (R,); `rows` the same for the filter.
    """
    bounds = RowBounds.of_heaps(len(rows), (k, k), signed=True)
    found: list[tuple[int, Candidates]] = []
    for first, _, _, operand in tokens:
        context.progress(first, tokens.size, "tokens")
        found.append((first, scan(rows, operand, bounds)))
    row, token, weight = [], [], []
    for first, candidates in found:
        chunk, chunk_length, operand = tokens.chunk(first)
        left = bounds.remaining(candidates, rows, operand)
        row.append(left.row)
        token.append(left.column + first)
        weight.append(rounded_dots(chunk, vectors, left.column, left.row, chunk_length, length))
    return _ranked(np.concatenate(row), np.concatenate(token), np.concatenate(weight), k)


def _ranked(row: np.ndarray, token: np.ndarray, weight: np.ndarray, k: int) -> tuple[np.ndarray, ...]:
    negative = weight < 0
    order = np.lexsort((token, -np.abs(weight), negative, row))
    order = order[weight[order] != 0]
    row, token, weight, negative = row[order], token[order], weight[order], negative[order]
    place = np.arange(len(row))
    new = np.ones(len(row), bool)
    new[1:] = (row[1:] != row[:-1]) | (negative[1:] != negative[:-1])
    rank = place - np.maximum.accumulate(np.where(new, place, 0)) + 1
    keep = rank <= k
    return row[keep], token[keep], weight[keep], rank[keep].astype(np.int32)


def embeds_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """EMBEDS.parquet of one dictionary. params: target, top. inputs: model, dictionaries."""
    vectors = Vectors(step, inputs, context)
    readers = vectors.readers(DictionaryEntry(**step.params["target"]))
    row, token, weight, rank = top_tokens(
        readers.operand,
        readers.rho,
        readers.norms.length,
        Tokens(vectors, context, "EMBEDS"),
        step.params["top"],
        context,
    )
    order = np.lexsort((rank, weight < 0, readers.reading[row], readers.target[row]))
    row, n = row[order], len(row)
    columns = {
        "model": repeated(vectors.model.hash, n),
        "token": token[order].astype(np.int64),
        "target_dictionary": repeated(readers.entry.hash, n),
        "target": readers.target[row].astype(np.int64),
        "reading": pa.DictionaryArray.from_arrays(readers.reading[row].astype(np.int32), list(READINGS)),
        "weight": weight[order],
        "rank": rank[order],
    }
    write_table(out, "EMBEDS", [pa.table(columns)])
    return Done({"edges": n})


def promotes_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """PROMOTES.parquet of one dictionary. params: source, top. inputs: model, dictionaries."""
    vectors = Vectors(step, inputs, context)
    model = vectors.model
    source = DictionaryEntry(**step.params["source"])
    omega = vectors.writers(source, model.cut("final", model.facts.n_layers)).omega
    read = model.final_input(torch.from_numpy(omega)).numpy()
    length = lengths(read)
    rows = Operand(read, length, device=context.device)
    row, token, weight, rank = top_tokens(
        rows, read, length, Tokens(vectors, context, "PROMOTES"), step.params["top"], context
    )
    n = len(row)
    columns = {
        "source_dictionary": repeated(source.hash, n),
        "source": row.astype(np.int64),
        "model": repeated(model.hash, n),
        "token": token.astype(np.int64),
        "weight": weight,
        "rank": rank,
    }
    write_table(out, "PROMOTES", [pa.table(columns)])
    return Done({"edges": n})
