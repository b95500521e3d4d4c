"""Answers as text for people: tables of at most 100 columns, numbers right-aligned, weights with their signs.

Nothing from an atlas is taken as markup, and nothing in it reaches a terminal as a control character.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from atlas.answers import Answer, Table, printable, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

__all__ = ["WIDTH", "as_text", "cell", "draw"]

WIDTH = 100
"""Columns of text where the output is no terminal."""

SIGNED = frozenset({"weight", "z", "product", "twera", "effect"})
"""Columns whose sign is part of the answer: shown with + too."""

LONG = frozenset({"promotes", "run", "how to get it", "title", "facts", "provenance", "notes", "spec",
                  "label", "files", "author"})  # fmt: skip
"""Columns that may be cut where the width does not suffice."""

WRAPPED = frozenset({"how to get it"})
"""Columns that go on in the next line instead."""

LEAST = 12
"""Characters that are left of a text that is cut."""

LABEL = 60
"""Columns of a label in a table; JSON has all of it."""

QUOTED = frozenset({"token", "text", "lowest", "highest", "promotes"})
"""Columns of text as a model's vocabulary has it: spaces and control characters matter."""

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def cell(column: str, value: Any) -> str:
    """One value as a person reads it."""
    column = column.rpartition(".")[2]  # of a query: f.key is a key
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if column.endswith("bytes"):
            return _size(value)
        return str(value) if column in ("number", "id", "layer") else f"{value:,}"
    if isinstance(value, float):
        if column.endswith("share"):
            return f"{100 * value:#.3g}".removesuffix(".") + " %"
        if column.endswith("seconds"):
            return _duration(value)
        return _plain(value, "+" if _signed(column) else "")
    if isinstance(value, Mapping):
        name = value.get("key", value.get("_type"))
        return (
            str(name)
            if "_label" in value and name
            else printable(json.dumps(_jsonable(value), ensure_ascii=False))
        )
    if isinstance(value, list | tuple):
        return ", ".join(cell(column, item) for item in value)
    return visible(str(value)) if column in QUOTED else printable(str(value))


def _signed(column: str) -> bool:
    return column in SIGNED or column.startswith("weight_")


def _jsonable(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): item if isinstance(item, int | float | str | list | dict | None) else str(item)
            for key, item in value.items()}  # fmt: skip


def _plain(value: float, sign: str) -> str:
    """Four significant digits, without an exponent where that is as short."""
    if value == 0 or not math.isfinite(value):
        return str(value).removesuffix(".0")
    power = math.floor(math.log10(abs(value)))
    if -3 <= power < 5:
        return f"{value:{sign},.{max(0, 3 - power)}f}"
    return f"{value:{sign}.3e}"


def _size(bytes: int) -> str:
    for unit, factor in _SIZES:
        if bytes >= factor:
            return f"{bytes / factor:.3g} {unit}"
    return f"{bytes} B"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def draw(console: Console, shown: Answer | Table) -> None:
    """Writes an answer or a table to a console."""
    from rich.text import Text

    if isinstance(shown, Table):
        _draw_table(console, shown)
        return
    if shown.title:
        console.print(Text(printable(shown.title), style="bold"))
    if shown.facts:
        from rich.table import Table as RichTable

        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in _flat(shown.facts):
            grid.add_row(Text("  " + name), Text(cell(name, value)))
        console.print(grid)
    for table in shown.tables.values():
        if shown.title or shown.facts:
            console.print()
        _draw_table(console, table)
    for note in shown.notes:
        console.print(Text(printable(note), style="dim"))


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Facts of facts on lines of their own."""
    found: list[tuple[str, Any]] = []
    for name, value in facts.items():
        label = f"{before}{name.replace('_', ' ')}"
        found += _flat(value, f"{label} ") if isinstance(value, Mapping) else [(label, value)]
    return found


def _draw_table(console: Console, table: Table) -> None:
    from rich.text import Text

    if table.title:
        console.print(Text(printable(table.title), style="bold"))
    if not table.rows:
        console.print(Text("  none", style="dim"))
    elif (grid := _grid(table, console.width)) is not None:
        console.print(grid)
    else:
        _draw_records(console, table)
    for note in table.notes:
        console.print(Text(printable(note), style="dim"))


def _grid(table: Table, width: int) -> RichTable | None:
    """Rows under columns; None where they cannot fit. Numbers keep their width, texts are cut, long ones
    first.
    """
    from rich import box
    from rich.cells import cell_len, set_cell_size
    from rich.table import Table as RichTable
    from rich.text import Text

    table, labels = _labels_apart(table)
    cells = [_column_cells(name, [row[i] for row in table.rows]) for i, name in enumerate(table.columns)]
    numeric = [any(isinstance(row[i], int | float) for row in table.rows) for i in range(len(table.columns))]
    widths = [max(map(cell_len, (name, *column))) for name, column in zip(table.columns, cells, strict=True)]
    spare = width - 2 * len(widths) - 1 - sum(widths)
    order = sorted(range(len(widths)), key=lambda i: (table.columns[i] not in LONG, -widths[i]))
    for i in order if spare < 0 else ():
        if not numeric[i] and spare < 0:
            least = (
                max(LEAST, cell_len(table.columns[i]))
                if table.columns[i] in LONG
                else max(LEAST, widths[i] // 2)
            )
            cut = min(-spare, max(widths[i] - least, 0))
            widths[i], spare = widths[i] - cut, spare + cut
    if spare < 0:
        return None
    for i, said in labels.items():  # labels have what room is left
        more = min(spare, max(0, min(LABEL, max(map(cell_len, said))) - widths[i]))
        widths[i], spare = widths[i] + more, spare - more
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", collapse_padding=True)
    for name, right, wide in zip(table.columns, numeric, widths, strict=True):
        most = wide if name in WRAPPED else None
        side: Literal["left", "right"] = "right" if right else "left"
        grid.add_column(Text(name), justify=side, no_wrap=most is None, min_width=wide, max_width=most)
    previous: str | None = None
    for number, line in enumerate(zip(*cells, strict=True)):
        if table.columns[0] == "path":  # a line of air between paths
            if previous not in (None, line[0]):
                grid.add_row()
            previous = line[0]
        shown = [
            text if cell_len(text) <= wide or name in WRAPPED else set_cell_size(text, wide - 1) + "…"
            for name, text, wide in zip(table.columns, line, widths, strict=True)
        ]
        texts = list(map(Text, shown))
        for i, said in labels.items():
            if text := said[number]:
                short = text if cell_len(text) <= widths[i] else set_cell_size(text, widths[i] - 1) + "…"
                texts[i].append(f"\n{short}", style="italic dim")
        grid.add_row(*texts)
    return grid


def _labels_apart(table: Table) -> tuple[Table, dict[int, list[str]]]:
    """The table without its labels, and by the place of the column that they stand under, what they say."""
    below = dict(table.below)
    kept = [i for i, name in enumerate(table.columns) if name not in below]
    names = [table.columns[i] for i in kept]
    labels = {
        names.index(below[name]): [printable(row[i] or "") for row in table.rows]
        for i, name in enumerate(table.columns)
        if name in below and any(row[i] for row in table.rows)
    }
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(tuple(names), rows, table.title, table.notes), labels


def _draw_records(console: Console, table: Table) -> None:
    """One block of lines for each row: what is too wide for columns."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for number, row in enumerate(table.rows, start=1):
        console.print(Text(f"row {number}", style="bold"))
        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in zip(table.columns, row, strict=True):
            if value is not None or name not in dict(table.below):
                grid.add_row(Text(f"  {name}"), Text(cell(name, value)))
        console.print(grid)


def _column_cells(name: str, values: Sequence[Any]) -> list[str]:
    """The values of a column; its numbers to one number of decimals, where their sizes allow it."""
    numbers = [abs(value) for value in values if isinstance(value, float) and value]
    if not numbers or not all(isinstance(value, float) or value is None for value in values):
        return [cell(name, value) for value in values]
    extreme = not all(map(math.isfinite, numbers)) or max(numbers) >= 1e6
    if extreme or name.endswith(("share", "seconds")) or min(numbers) < 1e-6 * max(numbers):
        return [cell(name, value) for value in values]
    largest, smallest = (math.floor(math.log10(number)) for number in (max(numbers), min(numbers)))
    decimals = max(0, 3 - largest, min(1 - smallest, 6))
    sign = "+" if _signed(name) else ""
    return [cell(name, None) if value is None else f"{value:{sign},.{decimals}f}" for value in values]


def as_text(shown: Answer | Table, width: int = WIDTH) -> str:
    """An answer as plain text."""
    from rich.console import Console

    buffer = io.StringIO()
    draw(Console(file=buffer, width=width, color_system=None, force_terminal=False), shown)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
