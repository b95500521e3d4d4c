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

__all__ = ["Answer", "Table", "visible"]


def visible(text: str) -> str:
    """A text from a vocabulary or a file, in quotes, with nothing in it that a terminal would act on.

    >>> print(visible(" the"), visible(chr(10)), visible(chr(27) + "[31m"))
    ' the' '\\n' '\\x1b[31m'
    """
    return repr(text)  # escapes what is not printable: controls, bidirectional marks, lone surrogates


@dataclass(frozen=True)
class Table(Result):
    """Rows under named columns, with a title and, for people, notes about them."""

    title: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, notes: Iterable[str] = ()
    ) -> Table:
        """A table of any rows."""
        return cls(tuple(columns), tuple(tuple(row) for row in rows), title, tuple(notes))

    def __repr__(self) -> str:
        from atlas.rendering import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from atlas.rendering import cell

        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(cell(c, v))}</td>" for c, v in zip(self.columns, row, strict=True))
            + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>{notes}"


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
            f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
            for name, value in self.facts.items()
        )
        tables = "".join(table._repr_html_() for table in self.tables.values())
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<h4>{escape(self.title)}</h4><table>{facts}</table>{tables}{notes}"
