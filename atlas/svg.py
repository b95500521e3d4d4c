"""Pieces of an SVG: elements as text, every value escaped, nothing taken from outside the file.

No style sheet, no script, no identifier: several pictures can stand in one notebook page without touching
each other. Texts from a vocabulary are shortened and measured here, so that a layout can rely on their width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import combining, east_asian_width
from xml.sax.saxutils import escape, quoteattr

from atlas.errors import AtlasError
from atlas.folder import write_atomically

__all__ = ["INK", "MINUS", "MONO", "MUTED", "NEGATIVE", "PALE", "POSITIVE", "SANS", "Picture", "box",
           "compact", "document", "element", "fit", "label", "number", "printable", "quoted", "rule", "tip",
           "width", "wrapped"]  # fmt: skip

MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,Liberation Mono,monospace"
SANS = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,DejaVu Sans,sans-serif"
INK, MUTED, PALE = "#1f2328", "#656d76", "#d8dee4"
POSITIVE, NEGATIVE = "#0072b2", "#d55e00"  # blue and vermilion of Okabe and Ito: told apart by every eye
MINUS = "\N{MINUS SIGN}"
EM = {MONO: 0.61, SANS: 0.56}  # width of a character; DejaVu, the widest of the fonts named, for MONO


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows and a file keeps."""

    svg: str
    title: str
    edges: int
    """Edges that are drawn, or counted in a heat map."""

    def __repr__(self) -> str:
        return f"Picture of {self.title}"

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, out: str | Path) -> Path:
        """Writes it. Raises AtlasError where that is not possible; then `out` is as it was."""
        path = Path(out)
        if path.is_dir():
            raise AtlasError(f"{path}: is a folder; expected the name of a file, as near.svg")
        if not path.parent.is_dir():
            raise AtlasError(f"{path}: there is no folder {path.parent}")
        write_atomically(path, self.svg)
        return path


def printable(text: str) -> str:
    """Text without controls, bidirectional marks and what XML has no character for: they are spelt out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def element(tag: str, content: str | Iterable[str] = "", **attributes: str | float) -> str:
    """One element. content: markup that is already escaped; `stroke_width` becomes stroke-width."""
    said = "".join(
        f" {name.replace('_', '-')}={quoteattr(value if isinstance(value, str) else _short(value))}"
        for name, value in attributes.items()
    )
    inside = content if isinstance(content, str) else "".join(content)
    return f"<{tag}{said}>{inside}</{tag}>" if inside else f"<{tag}{said}/>"


def label(
    x: float,
    y: float,
    text: str | Sequence[str],
    size: float = 11,
    fill: str = INK,
    anchor: str = "start",
    font: str = MONO,
    bold: bool = False,
) -> str:
    """A line of text, perhaps of parts. anchor: start, middle or end of it, which stands at (x, y)."""
    parts = [printable(part) for part in ([text] if isinstance(text, str) else text)]
    more: dict[str, str] = {"font_weight": "600"} if bold else {}
    if any("  " in part for part in parts):  # a token of three spaces keeps them, in every reader
        more |= {"xml:space": "preserve", "style": "white-space:pre"}
    if len(parts) == 1:
        content = escape(parts[0])
    else:  # a part written from right to left must not turn its neighbours around
        content = " ".join(element("tspan", escape(part), unicode_bidi="isolate") for part in parts)
    return element("text", content, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor,
                   font_family=font, **more)  # fmt: skip


def rule(x1: float, y1: float, x2: float, y2: float, stroke: str = PALE, **more: str | float) -> str:
    """A straight line."""
    return element("line", "", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)


def box(
    x: float, y: float, wide: float, high: float, fill: str, content: str = "", **more: str | float
) -> str:
    """A rectangle."""
    return element("rect", content, x=x, y=y, width=wide, height=high, fill=fill, **more)


def tip(text: str) -> str:
    """What the element that it is put into shows on hovering."""
    return element("title", escape(printable(text)))


def document(size: tuple[float, float], title: str, pieces: Iterable[str]) -> str:
    """The whole file, on a white ground of its own."""
    wide, high = map(math.ceil, size)
    ground = box(0, 0, wide, high, "#ffffff")
    return element(
        "svg",
        [tip(title), ground, *(f"\n{piece}" for piece in pieces), "\n"],
        xmlns="http://www.w3.org/2000/svg",
        width=wide,
        height=high,
        viewBox=f"0 0 {wide} {high}",
        style="max-width:100%;height:auto",
        role="img",
    )


def width(text: str, size: float, font: str = MONO) -> float:
    """Pixels that a text takes, at most."""
    cells = sum(
        0.0 if combining(c) else 1.7 if east_asian_width(c) in "WF" or ord(c) > 0x2FFF else 1.0 for c in text
    )
    return cells * EM[font] * size


def fit(text: str, room: float, size: float, font: str = MONO) -> str:
    """A text cut so that it takes `room` pixels at most, the cut shown."""
    text = printable(text)
    if width(text, size, font) <= room:
        return text
    while text and width(text + "…", size, font) > room:
        text = text[:-1]
    return text + "…"


def quoted(text: str, room: float, size: float) -> str:
    """The same for a token in quotes: the closing quote stays."""
    short = fit(text, room, size)
    return short if short == text else fit(text, room - width(text[-1], size), size) + text[-1]


def wrapped(text: str, room: float, size: float, font: str = SANS) -> list[str]:
    """A text in lines."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size, font) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def number(value: float) -> str:
    """A weight as the tables show it, with its sign."""
    from atlas.rendering import cell

    return cell("weight", float(value)).replace("-", MINUS)


def compact(count: int) -> str:
    """A count in at most four characters: 999, 1.2k, 45k, 3.1M.

    >>> [compact(n) for n in (0, 999, 1234, 99_600, 999_999, 3_100_000)]
    ['0', '999', '1.2k', '100k', '1.0M', '3.1M']
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * factor and count >= 1000:
            value = count / factor
            return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    return str(count)


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
