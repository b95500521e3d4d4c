"""Pairs of features with their exact weights: what the filter's candidates become, and how steps hand them
on.

A pair is (source, target, reading, layer, head); a direct one has layer and head -1. Steps keep them in one
Arrow file, a record batch for each block of one source dictionary and one target dictionary, and read back
only the blocks they need, mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import pyarrow as pa

__all__ = ["READINGS", "PairWriter", "Pairs", "packed", "read_pairs", "write_members"]

READINGS = ("in", "gate", "up")

_SCHEMA = pa.schema(
    [
        ("source", pa.int32()),
        ("target", pa.int32()),
        ("reading", pa.int8()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
        ("weight", pa.float32()),
        ("z", pa.float64()),
        ("size", pa.float64()),
        ("rank_in", pa.int32()),
    ]
)
_FILE, _BLOCKS = "pairs.arrow", "pairs.json"


@dataclass(frozen=True)
class Pairs:
    """Arrays of one length n.

    source_dictionary, source, target_dictionary, target, reading (place in READINGS), layer, head: which
    pair; the dictionaries are places in the step's lists. weight float32: V, exact (`workers.exact`). z
    float64: V √d / (|ω||ρ|). size float64: |V| after latents of free scale are brought to unit writing norm,
    what rules compare. rank_in int32: 1, 2 … among the target's kept pairs of its type and reading, 0 before
    that is known.
    """

    source_dictionary: np.ndarray
    source: np.ndarray
    target_dictionary: np.ndarray
    target: np.ndarray
    reading: np.ndarray
    layer: np.ndarray
    head: np.ndarray
    weight: np.ndarray
    z: np.ndarray
    size: np.ndarray
    rank_in: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def where(self, keep: np.ndarray) -> Pairs:
        """Those that `keep`, a mask or indices, names."""
        return Pairs(*(getattr(self, field.name)[keep] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Iterable[Pairs]) -> Pairs:
        """One from many, in order."""
        parts = list(parts)
        if not parts:
            return cls.empty()
        return cls(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(cls)))

    @classmethod
    def empty(cls) -> Pairs:
        """No pairs."""
        places = [np.empty(0, np.int32)] * 2
        columns = {
            name: np.empty(0, kind.to_pandas_dtype())
            for name, kind in zip(_SCHEMA.names, _SCHEMA.types, strict=True)
        }
        return cls(places[0], columns.pop("source"), places[1], **columns)

    @property
    def identity(self) -> tuple[np.ndarray, ...]:
        """What orders pairs, the first key first: source, target, reading, layer, head."""
        source, target = (self.source_dictionary, self.source), (self.target_dictionary, self.target)
        return (*source, *target, self.reading, self.layer, self.head)

    def sorted(self) -> Pairs:
        """By identity, one of each."""
        key = packed(self.identity)
        if key is None:
            order = np.lexsort(self.identity[::-1])
            ordered = self.where(order)
            new = np.any([part[1:] != part[:-1] for part in ordered.identity], axis=0)
        else:
            order = np.argsort(key)
            ordered, key = self.where(order), key[order]
            new = key[1:] != key[:-1]
        return ordered if new.all() else ordered.where(np.concatenate([[True], new]))


def packed(keys: Sequence[np.ndarray]) -> np.ndarray | None:
    """One int64 that orders as the keys do, the first key first; None where 63 bits do not hold them."""
    total = np.zeros(len(keys[0]), np.int64)
    size = 1
    for key in keys if len(total) else ():
        low = int(key.min())
        span = int(key.max()) - low + 1
        size *= span
        if size >= 1 << 63:
            return None
        total = total * span + (key - low) if span > 1 else total
    return total


class Hashed(Protocol):
    """A dictionary, by its hash."""

    @property
    def hash(self) -> str: ...


class PairWriter:
    """Writes blocks of pairs into a step's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = pa.OSFile(str(folder / _FILE), "wb")
        self._writer = pa.ipc.new_file(self._file, _SCHEMA)
        self._blocks: list[tuple[str, str]] = []

    def write(self, source: str, target: str, pairs: Pairs) -> None:
        """Adds the pairs of one source dictionary and one target dictionary (hashes)."""
        if len(pairs):
            columns = [pa.array(getattr(pairs, name)) for name in _SCHEMA.names]
            self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
            self._blocks.append((source, target))

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._file.close()
        (self._folder / _BLOCKS).write_text(json.dumps(self._blocks))


def write_members(folder: Path, members: Pairs, sources: Sequence[Hashed], targets: Sequence[Hashed]) -> None:
    """Makes a folder of those pairs that are in a top k which spans several targets."""
    folder.mkdir()
    with PairWriter(folder) as writer:
        for i, source in enumerate(sources):
            of_source = members.where(members.source_dictionary == i)
            for j, target in enumerate(targets):
                writer.write(source.hash, target.hash, of_source.where(of_source.target_dictionary == j))


def read_pairs(folder: Path, sources: Mapping[str, int], targets: Mapping[str, int]) -> Iterator[Pairs]:
    """The blocks whose ends are among `sources` and `targets` (hash -> place in a list), in the order
    written."""
    blocks = json.loads((folder / _BLOCKS).read_text())
    wanted = [n for n, (source, target) in enumerate(blocks) if source in sources and target in targets]
    if not wanted:
        return
    with pa.memory_map(str(folder / _FILE)) as file:
        reader = pa.ipc.open_file(file)
        for n in wanted:
            batch = reader.get_batch(n)
            columns = {name: np.array(batch.column(name).to_numpy()) for name in _SCHEMA.names}
            source, target = (
                np.full(batch.num_rows, place, np.int32)
                for place in (sources[blocks[n][0]], targets[blocks[n][1]])
            )
            yield Pairs(source_dictionary=source, target_dictionary=target, **columns)
