"""L0 against what a dictionary leaves unexplained and what it keeps of the model's predictions, as a picture.

A dictionary is a point with its standard error; better is lower left above, and upper left below. What costs
nothing, L0 0, explains nothing; so of two sets the one nearer the corner stands ahead at every L0 between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from atlas.svg import INK, MUTED, PALE, SANS, Picture, document, element, label, rule, tip
from workers.evaluation import Evaluation, LayerFigures
from workers.measures import Estimate

__all__ = ["pareto"]

# Of Okabe and Ito, told apart by every eye; sets beyond them begin again with an open mark.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDE, HIGH, GAP = 560.0, 250.0, 62.0
LEFT, TOP = 64.0, 66.0


@dataclass(frozen=True)
class _Mark:
    x: float
    y: float
    error: float
    text: str
    about: str
    number: int  # of the set


def pareto(found: Evaluation) -> Picture:
    """Both figures of every layer over L0 (logarithmic)."""
    names = [one.name for one in found.sets]
    panels: tuple[tuple[str, Callable[[LayerFigures], Estimate]], ...] = (
        ("variance unexplained (FVU)", lambda one: one.fvu),
        ("cross-entropy recovered", lambda one: one.recovered),
    )
    drawn = [(title, list(_marks(found, figure))) for title, figure in panels]
    xs = [mark.x for _, marks in drawn for mark in marks]
    low, high = _octaves(xs)
    pieces = list(_head(found, names))
    for number, (title, marks) in enumerate(drawn):
        top = TOP + number * (HIGH + GAP) + 14 * ((len(names) - 1) // 3)
        pieces.extend(_panel(title, marks, low, high, top))
    bottom = TOP + 2 * HIGH + GAP + 44 + 14 * ((len(names) - 1) // 3)
    pieces.append(
        label(LEFT + WIDE / 2, bottom, "L0: features that fire on a token", 12, MUTED, "middle", SANS)
    )
    title = f"{found.model}: L0 against variance unexplained and cross-entropy recovered"
    return Picture(document((LEFT + WIDE + 40, bottom + 16), title, pieces), title, len(xs))


def _marks(found: Evaluation, figure: Callable[[LayerFigures], Estimate]) -> Iterator[_Mark]:
    for number, one in enumerate(found.sets):
        for layer in one.layers:
            estimate = figure(layer)
            if layer.l0 is None or not layer.l0.value or estimate.value is None:
                continue
            error = estimate.se or 0.0
            where = f"{one.name}, layer {layer.layer}"
            about = f"{where}: L0 {layer.l0.value:.1f}, {estimate.value:.4f} ± {error:.4f}"
            yield _Mark(layer.l0.value, estimate.value, error, str(layer.layer), about, number)


def _head(found: Evaluation, names: Sequence[str]) -> Iterator[str]:
    yield label(LEFT, 22, f"{found.model}, {found.contexts} contexts, {found.tokens:,} tokens", 13, INK,
                font=SANS, bold=True)  # fmt: skip
    for number, name in enumerate(names):
        x, y = LEFT + (number % 3) * (WIDE / 3), 40.0 + 14 * (number // 3)
        yield _dot(x + 5, y - 4, number, "")
        yield label(x + 14, y, name, 12, INK, font=SANS)


def _panel(title: str, marks: Sequence[_Mark], low: float, high: float, top: float) -> Iterator[str]:
    ends = [mark.y + sign * mark.error for mark in marks for sign in (-1, 1)] or [0.0, 1.0]
    bottom_value, top_value, ticks = _scale(min(ends), max(ends))

    def across(x: float) -> float:
        return LEFT + WIDE * (math.log2(x) - low) / (high - low)

    def up(y: float) -> float:
        return top + HIGH * (top_value - y) / (top_value - bottom_value)

    yield label(LEFT, top - 6, title, 12, MUTED, font=SANS)
    for tick in ticks:
        yield rule(LEFT, up(tick), LEFT + WIDE, up(tick))
        yield label(LEFT - 6, up(tick) + 4, f"{tick:.6g}", 11, MUTED, "end", SANS)
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = across(2.0**power)
        yield rule(x, top, x, top + HIGH, PALE, stroke_dasharray="2 3")
        yield label(x, top + HIGH + 15, f"{2.0**power:g}", 11, MUTED, "middle", SANS)
    for mark in marks:
        x, y = across(mark.x), up(mark.y)
        colour = COLOURS[mark.number % len(COLOURS)]
        if mark.error:
            yield rule(x, up(mark.y - mark.error), x, up(mark.y + mark.error), colour, stroke_width=1.2)
        yield _dot(x, y, mark.number, mark.about)
        yield label(x + 7, y - 5, mark.text, 10, colour, font=SANS)


def _dot(x: float, y: float, number: int, about: str) -> str:
    colour, opened = COLOURS[number % len(COLOURS)], number // len(COLOURS) % 2
    fill = "#ffffff" if opened else colour
    inside = tip(about) if about else ""
    return element("circle", inside, cx=x, cy=y, r=4.5, fill=fill, stroke=colour, stroke_width=1.5)


def _octaves(xs: Sequence[float]) -> tuple[float, float]:
    """log2 of the axis' ends, room on both sides."""
    if not xs:
        return 0.0, 5.0
    return math.log2(min(xs)) - 0.5, math.log2(max(xs)) + 0.5


def _scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Ends of an axis and about five round values between."""
    span = max(high - low, 1e-3)
    low, high = low - 0.08 * span, high + 0.08 * span
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    ticks = [round(at * step, 9) for at in range(first, math.floor(high / step) + 1)]
    return low, high, ticks
