"""What a query answers with: named columns, rows of plain Python values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Result"]


@dataclass(frozen=True)
class Result:
    """The answer to a query.

    `columns` are the names in the order of RETURN; `rows` are tuples of plain values. A node is a dict of its
    properties that are not null, with its label under `_label`; a relationship likewise, with its type under
    `_type`. A path is a dict of `nodes` and `relationships`, each in the path's order.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records())

    def records(self) -> list[dict[str, Any]]:
        """One dict for each row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def column(self, name: str) -> list[Any]:
        """The values of one column. Raises `KeyError` naming the columns there are."""
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; there are {', '.join(self.columns)}")
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def to_arrow(self) -> pa.Table:
        import pyarrow as pa

        return pa.table(
            [pa.array([row[i] for row in self.rows]) for i in range(len(self.columns))], self.columns
        )

    def to_pandas(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame.from_records(list(self.rows), columns=list(self.columns))
