"""What the atlas answers with: facts, tables and notes, the same for people and for programs.

An `Answer` knows its content and nothing of terminals; `atlas/rendering.py` draws it, `to_json` gives the
same to a program. In a notebook it shows itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from atlas.store.result import Result
from ingest.errors import printable

__all__ = ["Answer", "Table", "brief", "printable", "visible"]


def visible(text: str) -> str:
    """A text from a vocabulary or a file, in quotes, with nothing in it that a terminal would act on.

    >>> print(visible(" the"), visible(chr(10)), visible(chr(27) + "[31m"))
    ' the' '\\n' '\\x1b[31m'
    """
    return repr(text)  # escapes what is not printable: controls, bidirectional marks, lone surrogates


def brief(text: str, most: int = 60) -> str:
    """A label in a line: its beginning, with nothing in it that a terminal would act on.

    >>> print(brief("about" + chr(10) + "colours"), brief("a" * 99, 5))
    about\\ncolours aaaa…
    """
    said = printable(text)
    return said if len(said) <= most else said[: most - 1] + "…"


@dataclass(frozen=True)
class Table(Result):
    """Rows under named columns, with a title and, for people, notes about them.

    below: columns of labels, with the column under whose values people see them, and the rows' JSON beside.
    """

    title: str = ""
    notes: tuple[str, ...] = ()
    below: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        notes: Iterable[str] = (),
        below: Mapping[str, str] | None = None,
    ) -> Table:
        """A table of any rows."""
        given = tuple((below or {}).items())
        return cls(tuple(columns), tuple(tuple(row) for row in rows), title, tuple(notes), given)

    def __repr__(self) -> str:
        from atlas.rendering import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from atlas.rendering import cell

        labels = dict(self.below)
        shown = [
            i for i, column in enumerate(self.columns)
            if column not in labels or any(row[i] is not None for row in self.rows)
        ]  # fmt: skip
        head = "".join(f"<th>{escape(self.columns[i])}</th>" for i in shown)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell(self.columns[i], row[i]))}</td>" for i in shown) + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p>{escape(printable(note))}</p>" for note in self.notes)
        return (
            f"<table><caption>{escape(printable(self.title))}</caption><tr>{head}</tr>{body}</table>{notes}"
        )


@dataclass(frozen=True, repr=False)
class Answer:
    """Facts and tables under names. `facts` and `tables` together are the JSON object."""

    title: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The whole content as plain data: facts by name, a list of objects for each table, `notes`."""
        tables = {name: table.records() for name, table in self.tables.items()}
        notes = [*self.notes, *(note for table in self.tables.values() for note in table.notes)]
        return {**self.facts, **tables, "notes": notes}

    def __repr__(self) -> str:
        from atlas.rendering import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        facts = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(printable(str(value)))}</td></tr>"
            for name, value in self.facts.items()
        )
        tables = "".join(table._repr_html_() for table in self.tables.values())
        notes = "".join(f"<p>{escape(printable(note))}</p>" for note in self.notes)
        return f"<h4>{escape(printable(self.title))}</h4><table>{facts}</table>{tables}{notes}"
