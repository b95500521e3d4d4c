"""GraphML, written as it comes: nodes, then edges, whatever their number.

Read back by networkx (`read_graphml` gives a MultiDiGraph: parallel edges have ids) and by other programs
that know the format. What XML cannot hold (most control characters) is written as its escape, `\\x1b`; an
absent value is no element.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from atlas.columns import Column

__all__ = ["GraphMLWriter"]

_ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back as the same number
    text = _ILLEGAL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(value))
    return escape(text, {"\r": "&#13;"})


class GraphMLWriter:
    """Writes one file. Nodes come before the edges between them; attributes are declared beforehand."""

    def __init__(
        self, path: Path, nodes: Mapping[str, Sequence[Column]], edges: Mapping[str, Sequence[Column]]
    ) -> None:
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._count = 0
        self._names: dict[tuple[str, str], str] = {}
        self._file.write(
            '<?xml version="1.0" encoding="UTF-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n'
        )
        for domain, tables in (("node", nodes), ("edge", edges)):
            self._declare(domain, "labels" if domain == "node" else "type", "string")
            for column in (column for columns in tables.values() for column in columns):
                self._declare(domain, column.name, column.kind.neo4j)
        self._file.write('<graph edgedefault="directed">\n')

    def _declare(self, domain: str, name: str, type: str) -> None:
        if (domain, name) in self._names:
            return
        key = self._names[domain, name] = f"d{len(self._names)}"
        self._file.write(f'<key id="{key}" for="{domain}" attr.name={quoteattr(name)} attr.type="{type}"/>\n')

    def node(self, key: str, label: str, values: Mapping[str, Any]) -> None:
        """One node; `key` is its id in the file."""
        self._element("node", f"id={_attribute(key)}", {"labels": label, **values})

    def edge(self, source: str, target: str, type: str, values: Mapping[str, Any]) -> None:
        """One edge between two nodes' keys."""
        place = f'id="e{self._count}" source={_attribute(source)} target={_attribute(target)}'
        self._count += 1
        self._element("edge", place, {"type": type, **values})

    def _element(self, tag: str, place: str, values: Mapping[str, Any]) -> None:
        data = "".join(
            f'<data key="{self._names[tag, name]}">{_xml_text(value)}</data>'
            for name, value in values.items()
            if value is not None
        )
        self._file.write(f"<{tag} {place}>{data}</{tag}>\n")

    def __enter__(self) -> GraphMLWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.write("</graph>\n</graphml>\n")


def _attribute(text: str) -> str:
    return quoteattr(_ILLEGAL.sub(lambda match: match[0].encode("unicode_escape").decode(), text))
