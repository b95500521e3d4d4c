"""The search for what a rule may keep among the pairs into one set of readers, block of writers by block.

Top-k bounds outlive a block: what has been found for a target raises what later blocks must exceed, and what
was found before is judged again by the final bounds.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ingest.rules import Everything, Rule, Top
from workers.operands import Candidates, Operand, RowBounds
from workers.scan import scan
from workers.selection import Norms, filter_bounds, tops

__all__ = ["Search"]


class Search:
    """Candidates into R rows: each `read` takes one block of columns, `finish` gives what remains of each."""

    def __init__(self, rule: Rule, rows: Norms, width: int) -> None:
        self._rule, self._rows, self._width = rule, rows, width
        self._tops = tops(rule, per_source=False)
        self._heaps: dict[tuple[int, Hashable], np.ndarray] = {}
        self._found: list[tuple[Candidates, list[Hashable], Operand, Operand, list[Candidates]]] = []

    def read(
        self, rows: Operand, columns: Operand, *, layer: int, head: tuple[int, int] | None = None
    ) -> None:
        """Searches one block. layer: of the sources in it; head: what it goes through."""
        if isinstance(self._rule, Everything):
            self._found.append((_all_pairs(len(rows), len(columns)), [], rows, columns, []))
            return
        groups = [_group(top, layer, head) for top in self._tops]
        bounds = filter_bounds(self._rule, self._rows, self._width, self._stacked(groups))
        found = scan(rows, columns, bounds)
        for leaf, group in enumerate(groups):
            self._heaps[leaf, group] = bounds.heaps[leaf, :, : self._tops[leaf].k]
        self._found.append((found, groups, rows, columns, _top_per_source(self._rule, rows, columns)))

    def raise_bounds(self, leaf: int, sizes: np.ndarray) -> None:
        """Tells what is already in the top k of a leaf for whole targets: sizes (R, k) float64, zero for
        none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            proven = np.nan_to_num(sizes / self._rows.weight[:, None], posinf=0.0) * (1 - 1e-6)
        self._heaps[leaf, None] = np.sort(proven.astype(np.float32), axis=1)

    def finish(self) -> list[Candidates]:
        """For each block read, in order: the candidates by row and column that the final bounds leave."""
        remaining = []
        for found, groups, rows, columns, extra in self._found:
            if groups:
                heaps = self._stacked(groups)[:, :, :1]
                found = filter_bounds(self._rule, self._rows, self._width, heaps).remaining(
                    found, rows, columns
                )
            remaining.append(_united([found, *extra], len(columns)))
        self._found = []
        return remaining

    def least(self, *, layer: int, head: tuple[int, int] | None = None) -> dict[Top, np.ndarray]:
        """(R,) for each top-k leaf: about the size that its k-th member into each row has by now."""
        groups = [_group(top, layer, head) for top in self._tops]
        heaps = self._stacked(groups)[:, :, 0]
        return {top: heaps[leaf] * self._rows.weight for leaf, top in enumerate(self._tops)}

    def _stacked(self, groups: list[Hashable]) -> np.ndarray:
        sizes = tuple(top.k for top in self._tops)
        heaps = RowBounds.of_heaps(len(self._rows.length), sizes).heaps
        for leaf, group in enumerate(groups):
            if (leaf, group) in self._heaps:
                heaps[leaf, :, : sizes[leaf]] = self._heaps[leaf, group]
        return heaps


def _group(top: Top, layer: int, head: tuple[int, int] | None) -> Hashable:
    """Which pairs of one row and one step compete."""
    match top.per:
        case "target×source_layer":
            return layer
        case "target×head":
            return head
    return None


def _all_pairs(rows: int, columns: int) -> Candidates:
    row = np.repeat(np.arange(rows, dtype=np.int32), columns)
    return Candidates(row, np.tile(np.arange(columns, dtype=np.int32), rows), np.zeros(len(row), np.float32))


def _top_per_source(rule: Rule, rows: Operand, columns: Operand) -> list[Candidates]:
    """What the rule's leaves per source may keep: the same scores, read along the sources."""
    parts = []
    for top in tops(rule, per_source=True):
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
