"""A whole atlas as a picture: how many edges join each pair of layers, and how many each head carries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from atlas.svg import (
    INK,
    MUTED,
    PALE,
    SANS,
    Picture,
    box,
    compact,
    document,
    element,
    label,
    rule,
    tip,
    width,
    wrapped,
)

if TYPE_CHECKING:
    from atlas.store import Store

__all__ = ["overview"]

MARGIN, GAP, AXIS = 28.0, 84.0, 44.0  # pixels
SCALE = ((0.0, (233, 242, 250)), (0.35, (158, 202, 225)), (0.7, (49, 130, 189)), (1.0, (8, 40, 88)))
"""Colours of the fewest … the most edges, evenly darker: read in grey as well. None at all is white."""
CAVEAT = (
    "An edge is kept by the spec's rule, from parameters alone: a dark cell has many weights that stand out,"
    " which does not say that text uses them. Colours are logarithmic, a white cell has no edge."
)


def overview(store: Store) -> Picture:
    """Heat maps of each model of an atlas: DIRECT by source and target layer, VIA_HEAD by layer and head."""
    models = store.query("MATCH (m:Model) RETURN m.name, m.n_heads ORDER BY m.name").rows
    spans = store.query("MATCH (d:Dictionary) RETURN d.model AS model, min(d.layer), max(d.layer)").rows
    layers = {name: range(first, last + 1) for name, first, last in spans}
    direct = _counts(store, "DIRECT", "a.layer AS x, b.layer AS y")
    heads = _counts(store, "VIA_HEAD", "r.head AS x, r.layer AS y")
    pieces: list[str] = []
    y, wide, edges = 0.0, 0.0, 0
    for name, n_heads in models:
        own, through = direct.get(name, {}), heads.get(name, {})
        seen = {*layers.get(name, ()), *(layer for pair in own for layer in pair), *(y for _, y in through)}
        span = range(min(seen, default=0), max(seen, default=0) + 1)  # the layers that have dictionaries
        cell = min(40.0, max(5.0, 780 / len(span)))
        counted = sum(own.values()), sum(through.values())
        edges += sum(counted)
        grids = (
            Grid(f"DIRECT: {counted[0]:,} edges", "source layer", "target layer", span, span, cell,
                 own, lambda x, y: f"L{x:02d} → L{y:02d}"),
            Grid(f"VIA_HEAD: {counted[1]:,} edges", "head", "layer of the head", range(n_heads), span, cell,
                 through, lambda x, y: f"L{y:02d}.H{x:02d}"),
        )  # fmt: skip
        pieces.append(label(MARGIN, y + 38, f"{name}: edges kept", 17, bold=True))
        x = MARGIN
        for grid in grids:
            pieces += grid.draw(x, y + 60)
            x += grid.wide + GAP
        wide = max(wide, x - GAP + MARGIN)
        y += 60 + max(grid.high for grid in grids)
    wide = max(wide, 420.0)
    for line in wrapped(CAVEAT, wide - 2 * MARGIN, 11):
        y += 16
        pieces.append(label(MARGIN, y, line, 11, MUTED, font=SANS))
    return Picture(document((wide, y + 20), "Edges kept, by layers and heads", pieces), "the atlas", edges)


def _counts(store: Store, type: str, place: str) -> dict[str, dict[tuple[int, int], int]]:
    """By model, by (x, y)."""
    counts: dict[str, dict[tuple[int, int], int]] = {}
    found = store.query(
        f"MATCH (a:Feature)-[r:{type}]->(b:Feature)"
        f" RETURN a.model AS model, {place}, count(*) AS edges ORDER BY model, x, y"
    )
    for model, x, y, edges in found.rows:
        counts.setdefault(model, {})[x, y] = edges
    return counts


@dataclass(frozen=True)
class Grid:
    """One heat map. counts: by (column, row); rows upwards, as layers are counted."""

    title: str
    across: str
    upwards: str
    columns: range
    rows: range
    cell: float
    counts: Mapping[tuple[int, int], int]
    named: Callable[[int, int], str]

    @property
    def wide(self) -> float:
        return AXIS + max(len(self.columns) * self.cell, width(self.title, 13, SANS), 230.0)

    @property
    def high(self) -> float:
        return 30 + len(self.rows) * self.cell + 100

    def draw(self, x: float, y: float) -> Iterator[str]:
        """Its elements, with the upper left corner at (x, y)."""
        most = max(self.counts.values(), default=0)
        least = min([*self.counts.values(), max(1, most // 10)])  # a small difference looks small
        yield label(x, y + 12, self.title, 13, INK, font=SANS, bold=True)
        left, top = x + AXIS, y + 30
        bottom = top + len(self.rows) * self.cell
        yield box(left, top, len(self.columns) * self.cell, bottom - top, "none", stroke=PALE)
        for (column, row), count in self.counts.items():
            at = (left + (column - self.columns.start) * self.cell,
                  bottom - (row - self.rows.start + 1) * self.cell)  # fmt: skip
            share = _share(count, least, most)
            said = tip(f"{self.named(column, row)}: {count:,} edges")
            yield box(*at, self.cell, self.cell, _colour(share), said, stroke="#ffffff", stroke_width=0.5)
            size = min(10.0, self.cell / 2.75)
            if size >= 6:
                ink = "#ffffff" if share > 0.62 else INK
                yield label(at[0] + self.cell / 2, at[1] + self.cell / 2 + size * 0.36, compact(count), size,
                            ink, "middle", SANS)  # fmt: skip
        yield from self._ticks(left, top, bottom)
        yield from self._key(left, bottom + 58, least, most)

    def _ticks(self, left: float, top: float, bottom: float) -> Iterator[str]:
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * self.cell >= 18)
        for at, column in enumerate(self.columns):
            if column % every == 0:
                yield label(left + (at + 0.5) * self.cell, bottom + 14, str(column), 10, MUTED, "middle")
        for at, row in enumerate(self.rows):
            if row % every == 0:
                yield label(left - 6, bottom - (at + 0.5) * self.cell + 3.5, str(row), 10, MUTED, "end")
        yield label(left, bottom + 32, f"{self.across} →", 11, INK, font=SANS)
        turned = label(0, 0, f"{self.upwards} →", 11, INK, font=SANS)
        yield element("g", turned, transform=f"translate({left - 30:.1f} {bottom:.1f}) rotate(-90)")

    def _key(self, x: float, y: float, least: int, most: int) -> Iterator[str]:
        """The colour scale, with the numbers of its ends and of the powers of ten between."""
        if not most:
            yield label(x, y + 10, "no edges", 11, MUTED, font=SANS)
            return
        steps, wide = 24, 180.0
        for step in range(steps):
            yield box(x + step * wide / steps, y, wide / steps + 0.3, 10, _colour((step + 0.5) / steps))
        tens = [10**power for power in range(12) if least < 10**power < most]
        inner = [ten for ten in tens if 0.2 < _share(ten, least, most) < 0.8]  # else numbers would touch
        for mark in dict.fromkeys([least, *inner, most]):
            at = x + wide * _share(mark, least, most)
            yield rule(at, y + 10, at, y + 14, MUTED)
            yield label(at, y + 25, compact(mark), 10, MUTED, "middle")
        yield label(x + wide + 14, y + 9, "edges", 10, MUTED, font=SANS)


def _share(count: int, least: int, most: int) -> float:
    """0 for the least, 1 for the most, in proportion to the logarithm."""
    return math.log(count / least) / math.log(most / least) if most > least else 1.0


def _colour(share: float) -> str:
    for (low, a), (high, b) in pairwise(SCALE):
        if share <= high:
            t = (share - low) / (high - low)
            return "#" + "".join(f"{round(p + t * (q - p)):02x}" for p, q in zip(a, b, strict=True))
    return "#" + "".join(f"{p:02x}" for p in SCALE[-1][1])
