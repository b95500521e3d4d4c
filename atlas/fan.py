"""The drawing of a feature's neighbourhood: the feature as a card, its neighbours in a fan on both sides.

    layers before            the feature            layers after

               n15[2] ●──┐                      ┌──● n18[3]
    n12[671] ●───────────┤  ┌──────┬────────┐   ├─────────● n25[77]
    n9[8] ●- - - - - - - ┴──┤reads │promotes├───┴───● n20[4]
                            └──────┴────────┘

The nearer the layer of a neighbour is to the feature's, the further its row is from the middle line. So an
edge, which runs from its row towards the middle, passes no text: the rows between belong to layers further
out, and their texts stand on the outer side of their points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atlas.svg import (
    INK,
    MUTED,
    NEGATIVE,
    POSITIVE,
    SANS,
    box,
    document,
    element,
    fit,
    label,
    number,
    quoted,
    rule,
    tip,
    wrapped,
)

__all__ = ["Card", "Edge", "Neighbour", "Sheet", "Side"]

WIDEST, THINNEST = 7.0, 0.9  # pixels of the largest edge; those that would be thinner look alike
BLOCK, CARD, GUTTER, TAB, MARGIN = 230.0, 380.0, 90.0, 42.0, 24.0  # pixels
FRAME = "#8c959f"
KEY_LINE, LINE, BETWEEN = 15.0, 13.0, 9.0
CAVEAT = (
    "Weights are input-invariant: products of the model's parameters alone, the same on every text. They say"
    " what can flow along an edge; they are neither activations nor causal effects on a prompt."
)

Tokens = list[tuple[str, float] | None]
"""Tokens with weights, the highest first; None: the gap before the lowest."""


@dataclass(frozen=True)
class Edge:
    """A kept edge between the feature and a neighbour."""

    type: str
    via: str
    """DIRECT, or the head: L24.H07."""
    reading: str
    weight: float
    z: float
    rank_in: int
    rank_out: int

    @property
    def line(self) -> str:
        through = "" if self.type == "DIRECT" else f" via {self.via}"
        into = "" if self.reading == "in" else f" → {self.reading}"
        return f"{number(self.weight)}{through}{into}"

    @property
    def colour(self) -> str:
        return POSITIVE if self.weight > 0 else NEGATIVE


@dataclass(frozen=True)
class Neighbour:
    """A feature up- or downstream, with the edges that join it to the feature in the middle."""

    key: str
    short: str
    layer: int
    promotes: tuple[str, ...]
    edges: tuple[Edge, ...]
    label: str | None = None

    @property
    def height(self) -> float:
        return KEY_LINE + LINE * (bool(self.label) + len(self.edges) + bool(self.promotes))


@dataclass(frozen=True)
class Side:
    """What is drawn of one side, and how many edges of each type there are."""

    neighbours: tuple[Neighbour, ...]
    totals: dict[str, int]

    @property
    def edges(self) -> list[tuple[Neighbour, Edge]]:
        return [(neighbour, edge) for neighbour in self.neighbours for edge in neighbour.edges]

    @property
    def said(self) -> str:
        """How many of how many."""
        drawn = [edge.type for _, edge in self.edges]
        return " and ".join(f"{drawn.count(t)} of {n:,} {t}" for t, n in self.totals.items() if n) or "none"


@dataclass(frozen=True)
class Card:
    """The feature in the middle: its name, the tokens of each reading, the tokens that it promotes."""

    key: str
    title: str
    subtitle: str
    layer: int
    reads: dict[str, Tokens]
    promotes: Tokens

    @property
    def height(self) -> float:
        left = sum(len(rows) * LINE + 32 for rows in self.reads.values())
        return max(left, len(self.promotes) * LINE + 32, 72) + 6


class Sheet:
    """The layout: where each thing stands, in pixels from the upper left corner.

    layers: of the model; by: "weight" or "z", what the width of an edge shows. A side is -1 (left, upstream)
    or 1 (right, downstream).
    """

    def __init__(self, card: Card, layers: int, up: Side, down: Side, by: str) -> None:
        self.card, self.layers, self.by = card, layers, by
        self.sides = {-1: up, 1: down}
        self.step = min(90.0, max(6.0, 720 / max(1, layers - 1)))  # from a layer to the next
        self.largest = max((abs(getattr(e, by)) for side in (up, down) for _, e in side.edges), default=0.0)
        self.readings = tuple(dict.fromkeys([*card.reads, *(e.reading for _, e in up.edges)]))
        arms = {}
        for side, count in ((-1, card.layer), (1, layers - 1 - card.layer)):
            block = BLOCK if self.sides[side].neighbours else 0.0
            arms[side] = max(count * self.step + GUTTER + block, 180.0)
        self.left = MARGIN + arms[-1]
        self.right = self.left + CARD
        self.wide = self.right + arms[1] + MARGIN
        self.ports = {side: self._ports(side) for side in (-1, 1)}
        rows = {side: self._rows(side) for side in (-1, 1)}
        reach = max([card.height / 2, *(abs(y) + n.height / 2 for side in rows for n, y in rows[side])])
        self.top = 124.0
        self.middle = self.top + reach
        self.bottom = self.middle + reach + 12
        self.rows = {side: [(n, self.middle + y) for n, y in rows[side]] for side in rows}

    def thickness(self, edge: Edge) -> float:
        """Pixels: in proportion to the size of its weight (or z)."""
        share = abs(getattr(edge, self.by)) / self.largest if self.largest else 0.0
        return max(THINNEST, WIDEST * share)

    def x(self, side: int, layer: int) -> float:
        """Where a layer is. The feature's own is on both sides, next to the card."""
        away = max(0, (layer - self.card.layer) * side)
        return (self.left if side < 0 else self.right) + side * (GUTTER + away * self.step)

    def _at_port(self, side: int, name: str) -> list[tuple[Neighbour, Edge]]:
        return [(n, e) for n, e in self.sides[side].edges if side > 0 or e.reading == name]

    def _ports(self, side: int) -> list[tuple[str, float, float]]:
        """Where edges meet the card: (name, upper end, height), from the middle line."""
        names = self.readings if side < 0 else ("writes",)
        taken = [sum(self.thickness(e) + 1 for _, e in self._at_port(side, name)) for name in names]
        heights = [max(18.0, height + 6) for height in taken]
        top = -(sum(heights) + 6 * (len(names) - 1)) / 2
        tops = [top + sum(heights[:n]) + 6 * n for n in range(len(names))]
        return list(zip(names, tops, heights, strict=True))

    def _rows(self, side: int) -> list[tuple[Neighbour, float]]:
        """Each neighbour with the middle of its row, from the middle line: the far layers first."""
        half = max((abs(top) for _, top, _ in self.ports[side]), default=0.0)
        filled = {-1: half + 4, 1: half + 4}  # above, below
        rows = []
        for neighbour in sorted(
            self.sides[side].neighbours, key=lambda n: (-abs(n.layer - self.card.layer), n.key)
        ):
            where = -1 if filled[-1] <= filled[1] else 1
            rows.append((neighbour, where * (filled[where] + neighbour.height / 2)))
            filled[where] += neighbour.height + BETWEEN
        return rows

    def draw(self) -> str:
        """The SVG."""
        legend = list(self._legend())
        both = (-1, 1)
        pieces = [*self._head(), *(piece for side in both for piece in self._axis(side))]
        pieces += [piece for side in both for piece in self._curves(side)]
        pieces += [*self._card(), *(piece for side in both for piece in self._blocks(side)), *legend]
        return document((self.wide, self.end), f"Neighbourhood of {self.card.key}", pieces)

    def _head(self) -> Iterator[str]:
        room = self.wide - 2 * MARGIN
        yield label(MARGIN, 34, fit(self.card.title, room, 17), 17, bold=True)
        yield label(MARGIN, 55, fit(self.card.subtitle, room, 12), 12, MUTED)
        y = self.top - 33
        yield label((self.left + self.right) / 2, y, f"layer {self.card.layer}", 11, INK, "middle", bold=True)

    def _axis(self, side: int) -> Iterator[str]:
        y, own = self.top - 26, self.card.layer
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * self.step >= 20)
        used = {n.layer for n in self.sides[side].neighbours}
        layers = range(own + 1) if side < 0 else range(own, self.layers)
        drawn = [layer for layer in layers if layer != own or layer in used]
        if drawn:
            ends = [self.x(side, drawn[0]), self.x(side, drawn[-1])]
            yield rule(min(ends), y, max(ends), y)
            name = "upstream, by layer" if side < 0 else "downstream, by layer"
            yield label(sum(ends) / 2, y - 26, name, 11, MUTED, "middle", SANS)
        for layer in drawn:
            x = self.x(side, layer)
            if layer in used:
                yield rule(x, y, x, self.bottom, "#eceff2")
            if layer % every == 0:
                yield label(x, y - 7, str(layer), 10, INK if layer in used else FRAME, "middle")
        if not used:
            said = "none drawn" if any(self.sides[side].totals.values()) else "no edges kept"
            near = self.left - TAB - 10 if side < 0 else self.right + TAB + 10
            yield label(near, self.middle + 4, said, 11, MUTED, "end" if side < 0 else "start", SANS)

    def _curves(self, side: int) -> Iterator[str]:
        row = {n.key: y for n, y in self.rows[side]}
        end = self.left - TAB if side < 0 else self.right + TAB
        for name, top, _ in self.ports[side]:
            at = self.middle + top + 3
            for neighbour, edge in sorted(self._at_port(side, name), key=lambda pair: row[pair[0].key]):
                thick = self.thickness(edge)
                x, to = self.x(side, neighbour.layer), at + (thick + 1) / 2
                y = row[neighbour.key] + self._start(side, neighbour, edge)
                at += thick + 1
                bend = (end - x) * 0.55
                path = f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {end - bend:.1f} {to:.1f} {end:.1f} {to:.1f}"
                dash = f"{4 + thick:.1f} {2.5 + thick / 2:.1f}"
                dashes = {} if edge.type == "DIRECT" else {"stroke_dasharray": dash}
                yield element(
                    "path", tip(self._tip(side, neighbour, edge)), d=path, fill="none",
                    stroke=edge.colour, stroke_width=thick, stroke_opacity="0.8", **dashes,
                )  # fmt: skip

    def _start(self, side: int, neighbour: Neighbour, edge: Edge) -> float:
        """Where an edge leaves its neighbour's point: several lie beside each other, in the ports' order."""
        names = [name for name, _, _ in self.ports[side]]
        edges = sorted(neighbour.edges, key=lambda e: names.index(e.reading) if side < 0 else 0)
        before = sum(self.thickness(e) for e in edges[: edges.index(edge)])
        return before + (self.thickness(edge) - sum(map(self.thickness, edges))) / 2

    def _tip(self, side: int, neighbour: Neighbour, edge: Edge) -> str:
        source, target = (neighbour.key, self.card.key)[::-side]
        numbers = f"weight {number(edge.weight)}, z {number(edge.z)}"
        ranks = f"rank_in {edge.rank_in}, rank_out {edge.rank_out}"
        return f"{source} → {target}: {edge.via}, {edge.reading}, {numbers}, {ranks}"

    def _blocks(self, side: int) -> Iterator[str]:
        anchor = "end" if side < 0 else "start"
        for neighbour, y in self.rows[side]:
            x = self.x(side, neighbour.layer)
            said = f"{neighbour.key}: {neighbour.label}" if neighbour.label else neighbour.key
            yield element("circle", tip(said), cx=x, cy=y, r=3.5, fill=INK)
            x += side * 9
            y += 11 - neighbour.height / 2
            yield label(x, y, fit(neighbour.short, BLOCK - 12, 12), 12, INK, anchor, bold=True)
            if neighbour.label:
                y += LINE
                yield label(x, y, fit(neighbour.label, BLOCK - 12, 10.5, SANS), 10.5, INK, anchor, SANS)
            for edge in neighbour.edges:
                y += LINE
                yield label(x, y, fit(edge.line, BLOCK - 12, 10.5), 10.5, edge.colour, anchor)
            if neighbour.promotes:
                yield label(x, y + LINE, _few(neighbour.promotes, BLOCK - 12, 10), 10, MUTED, anchor)

    def _card(self) -> Iterator[str]:
        card, half = self.card, self.card.height / 2
        y = self.middle - half
        column, centre = CARD / 2, self.left + CARD / 2
        yield box(self.left, y, CARD, 2 * half, "#f6f8fa", rx=6, stroke=FRAME)
        yield rule(centre, y + 8, centre, y + 2 * half - 8)
        at = y + 6
        for name, rows in card.reads.items():
            heading = "reads" if name == "in" else f"reads through {name}"
            yield from _tokens(self.left + 12, at, column - 24, heading, rows)
            at += len(rows) * LINE + 32
        yield from _tokens(self.left + column + 12, y + 6, column - 24, "promotes (logits)", card.promotes)
        for side in (-1, 1):
            for name, top, height in self.ports[side]:
                x, y = self.left - TAB if side < 0 else self.right, self.middle + top
                yield box(x, y, TAB, height, "#eaeef2", stroke=FRAME)
                yield label(x + TAB / 2, y + height / 2 + 3.5, fit(name, TAB, 10), 10, INK, "middle")

    def _legend(self) -> Iterator[str]:
        y, x = self.bottom + 26, MARGIN
        yield rule(MARGIN, y - 16, self.wide - MARGIN, y - 16)
        kinds = [
            ("DIRECT: writing vector · reading vector", POSITIVE, 3.0, False),
            ("VIA_HEAD: through the head's value and output matrices", POSITIVE, 3.0, True),
            ("positive weight", POSITIVE, 3.0, False),
            ("negative weight", NEGATIVE, 3.0, False),
        ]
        size = f"|{self.by}|"
        for share in (1.0, 0.25) if self.largest else ():
            said = f"{size} = {number(self.largest * share).lstrip('+')}"
            kinds.append((said, MUTED, WIDEST * share, False))
        for said, stroke, thick, dashed in kinds:
            needed = 34 + len(said) * 6 + 20
            if x > MARGIN and x + needed > self.wide - MARGIN:
                x, y = MARGIN, y + 18
            dashes = {"stroke_dasharray": "7 4"} if dashed else {}
            yield rule(x, y, x + 28, y, stroke, stroke_width=thick, **dashes)
            yield label(x + 34, y + 4, said, 11, INK, font=SANS)
            x += needed
        notes = (
            f"Strongest kept edges by {size}: upstream {self.sides[-1].said}; downstream"
            f" {self.sides[1].said}. Width in proportion to {size}, at least {THINNEST} px. Under a"
            " neighbour: its weights, and the tokens that it promotes most. In the card: highest and lowest"
            " tokens by weight.",
            CAVEAT,
        )
        y += 10
        for note in notes:
            for line in wrapped(note, self.wide - 2 * MARGIN, 11):
                y += 16
                yield label(MARGIN, y, line, 11, MUTED, font=SANS)
        self.end = y + 18


def _few(tokens: tuple[str, ...], room: float, size: float) -> list[str]:
    each = room / len(tokens) - size * 0.62
    return [quoted(token, each, size) for token in tokens]


def _tokens(x: float, y: float, room: float, heading: str, rows: Tokens) -> Iterator[str]:
    yield label(x, y + 14, heading, 11, MUTED, font=SANS)
    y += 16
    if not rows:
        yield label(x, y + LINE, "none kept", 10.5, MUTED, font=SANS)
    for row in rows:
        y += LINE
        if row is not None:
            text, weight = row
            yield label(x, y, quoted(text, room - 52, 10.5), 10.5, INK)
            yield label(x + room, y, number(weight), 10.5, POSITIVE if weight > 0 else NEGATIVE, "end")
        else:
            yield label(x, y - 1, "⋯", 10.5, MUTED)
