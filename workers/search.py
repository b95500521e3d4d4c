"""The search for what a rule may keep among the pairs into one set of readers, block of writers by block.

Top-k bounds outlive a block: what has been found for a target raises what later blocks must exceed, and what
was found before is judged again by the final bounds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from ingest.rules import Everything, Rule, Top
from workers.operands import Candidates, Operand, RowBounds
from workers.scan import scan
from workers.selection import Norms, filter_bounds, tops

__all__ = ["Search"]

SAMPLE = 64  # columns that give a rule per block its first bound


class Search:
    """Candidates into R rows: each `read` takes one block of columns, `finish` gives what remains of each.

    shared: what is known of groups that span the targets of several searches; one mapping for all of them.
    """

    def __init__(
        self, rule: Rule, rows: Norms, width: int, shared: dict[Hashable, np.ndarray] | None = None
    ) -> None:
        self._rule, self._rows, self._width = rule, rows, width
        self._tops, self._block_tops = tops(rule, "target"), tops(rule, "block")
        self._heaps: dict[Hashable, np.ndarray] = {}
        self._sizes: dict[Hashable, np.ndarray] = {} if shared is None else shared
        self._found: list[tuple[Candidates, _Where, Operand, Operand, list[Candidates]]] = []

    def read(
        self,
        rows: Operand,
        columns: Operand,
        *,
        layer: int,
        block: Hashable = None,
        head: tuple[int, int] | None = None,
    ) -> None:
        """Searches one block. layer: of its sources; block: which group of a rule per block it belongs to;
        head: what it goes through."""
        where = _Where(layer, head or block, head)
        if isinstance(self._rule, Everything):
            self._found.append((_all_pairs(len(rows), len(columns)), where, rows, columns, []))
            return
        for top in self._block_tops:
            if len(self._sizes.get((top, where.block), ())) < top.k:
                self._sizes.setdefault((top, where.block), np.empty(0))
                self._sizes[top, where.block, "seed"] = self._proven_sample(rows, columns, top.k)
        bounds = self._bounds(where)
        found = scan(rows, columns, bounds)
        for leaf, top in enumerate(self._tops):
            self._heaps[top, where.group(top)] = bounds.heaps[leaf, :, : top.k]
        for top in self._block_tops:
            sizes = self._proven(found, rows, columns)
            known = np.concatenate([self._sizes[top, where.block], sizes])
            self._sizes[top, where.block] = np.sort(known)[::-1][: top.k]
        self._found.append((found, where, rows, columns, _top_per_source(self._rule, rows, columns)))

    def finish(self) -> list[Candidates]:
        """For each block read, in order: the candidates by row and column that the final bounds leave."""
        remaining = []
        for found, where, rows, columns, extra in self._found:
            if self._tops or self._block_tops:
                found = self._bounds(where).minima().remaining(found, rows, columns)
            remaining.append(_united([found, *extra], len(columns)))
        self._found = []
        return remaining

    def least(
        self, *, layer: int, block: Hashable = None, head: tuple[int, int] | None = None
    ) -> dict[Top, np.ndarray]:
        """(R,) for each top-k leaf: about the size that its k-th member into each row has by now."""
        where = _Where(layer, head or block, head)
        heaps = self._stacked(where)[:, :, 0]
        found = {top: heaps[leaf] * self._rows.weight for leaf, top in enumerate(self._tops)}
        return found | {
            top: np.full(len(self._rows.length), self._least(top, where)) for top in self._block_tops
        }

    def _bounds(self, where: _Where) -> RowBounds:
        least = [self._least(top, where) for top in self._block_tops]
        return filter_bounds(self._rule, self._rows, self._width, self._stacked(where), least)

    def _stacked(self, where: _Where) -> np.ndarray:
        heaps = RowBounds.of_heaps(len(self._rows.length), tuple(top.k for top in self._tops)).heaps
        for leaf, top in enumerate(self._tops):
            if (top, where.group(top)) in self._heaps:
                heaps[leaf, :, : top.k] = self._heaps[top, where.group(top)]
        return heaps

    def _least(self, top: Top, where: _Where) -> float:
        """A size that k pairs of the block have; 0 while fewer are known."""
        known = (self._sizes.get((top, where.block), ()), self._sizes.get((top, where.block, "seed"), ()))
        return max((float(sizes[top.k - 1]) for sizes in known if len(sizes) >= top.k), default=0.0)

    def _proven(self, found: Candidates, rows: Operand, columns: Operand) -> np.ndarray:
        """Sizes that the candidates certainly reach."""
        certain = np.abs(found.score.astype(np.float64)) / (1 + rows.precision.output)
        certain -= rows.slack(columns)[found.row]
        return certain * columns.weight[found.column] * self._rows.weight[found.row] * (1 - 1e-6)

    def _proven_sample(self, rows: Operand, columns: Operand, k: int) -> np.ndarray:
        """The k largest sizes certain among some columns: a first bound, before anything is scanned."""
        some = np.unique(np.linspace(0, len(columns) - 1, SAMPLE).astype(np.int64))
        part = torch.from_numpy(some).to(columns.low.device)
        scores = (columns.low[part].float() @ rows.low.float().T).cpu().numpy()  # (S, R)
        row, column = np.arange(len(rows), dtype=np.int32), some.astype(np.int32)
        pairs = Candidates(np.tile(row, len(some)), np.repeat(column, len(row)), scores.ravel())
        return np.sort(self._proven(pairs, rows, columns))[::-1][:k]


@dataclass(frozen=True)
class _Where:
    """Which groups the pairs of one block belong to."""

    layer: int
    block: Hashable
    head: tuple[int, int] | None

    def group(self, top: Top) -> Hashable:
        """Of those with the same target."""
        return {"target×source_layer": self.layer, "target×head": self.head}.get(top.per)


def _all_pairs(rows: int, columns: int) -> Candidates:
    row = np.repeat(np.arange(rows, dtype=np.int32), columns)
    return Candidates(row, np.tile(np.arange(columns, dtype=np.int32), rows), np.zeros(len(row), np.float32))


def _top_per_source(rule: Rule, rows: Operand, columns: Operand) -> list[Candidates]:
    """What the rule's leaves per source may keep: the same scores, read along the sources."""
    parts = []
    for top in tops(rule, "source"):
        found = scan(columns, rows, RowBounds.of_heaps(len(columns), (top.k,)))
        parts.append(Candidates(found.column, found.row, found.score))
    return parts


def _united(parts: list[Candidates], columns: int) -> Candidates:
    """All of them, each pair once."""
    found = Candidates.joined(parts)
    if len(parts) == 1:
        return found
    _, first = np.unique(found.row.astype(np.int64) * columns + found.column, return_index=True)
    return found.where(first)
