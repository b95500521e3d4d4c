"""One space of integer ids for an atlas, given out in blocks that are never given to anybody else.

A block belongs to (label, owner): the features of a dictionary by its hash, the tokens and heads of a model
by its hash, and single nodes (a model, a step, a run) by theirs. `id = base + number`. An owner that was
removed and is loaded again gets its old ids back: an id means one node for as long as the atlas exists.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from atlas.errors import AtlasError
from atlas.folder import write_atomically

__all__ = ["Blocks"]

_SCHEMA = pa.schema(
    [
        pa.field("label", pa.string(), nullable=False),
        pa.field("owner", pa.string(), nullable=False),
        pa.field("base", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
    ]
)


@dataclass
class Blocks:
    """The blocks of `ids.parquet`, and those that this load adds."""

    path: Path
    _blocks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _added: bool = False

    @classmethod
    def read(cls, path: Path) -> Blocks:
        """The blocks given out so far; none if the file is not there yet."""
        if not path.exists():
            return cls(path)
        try:
            rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
        except pa.ArrowInvalid as error:
            raise AtlasError(
                f"{path}: damaged ({error}); ids cannot be given out safely without it"
            ) from error
        return cls(path, {(row["label"], row["owner"]): (row["base"], row["size"]) for row in rows})

    @property
    def end(self) -> int:
        """The first id that nobody has."""
        return max((base + size for base, size in self._blocks.values()), default=0)

    def base(self, label: str, owner: str, size: int = 1) -> int:
        """First id of the owner's block, which is made if the owner has none.

        Raises `AtlasError` if the owner has a block of another size.
        """
        if (label, owner) not in self._blocks:
            self._blocks[label, owner] = (self.end, size)
            self._added = True
        base, had = self._blocks[label, owner]
        if had != size:
            raise AtlasError(
                f"{label} {owner}: {size} rows, but {had} when it was first loaded; the hash is not its own"
            )
        return base

    def save(self) -> None:
        """Writes `ids.parquet` if blocks were added. Before a switch, never after."""
        if not self._added:
            return
        rows = [
            {"label": label, "owner": owner, "base": base, "size": size}
            for (label, owner), (base, size) in self._blocks.items()
        ]
        content = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), content)
        write_atomically(self.path, content.getvalue())
        self._added = False
