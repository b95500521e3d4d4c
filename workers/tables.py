"""Tables of the schema as a step leaves them: Parquet, byte for byte the same whenever it is written
again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atlas.schema import artifact_schema

__all__ = ["repeated", "write_table"]

ROWS = 1 << 20  # of a row group


def repeated(value: str, count: int) -> pa.DictionaryArray:
    """A dictionary-encoded column that holds one value."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value]))


def write_table(folder: Path, table: str, parts: Iterable[pa.Table]) -> int:
    """Writes `<table>.parquet` from parts with the schema's columns; returns the rows written."""
    schema = artifact_schema(table)
    rows = 0
    with pq.ParquetWriter(
        folder / f"{table}.parquet", schema, compression="zstd", compression_level=1
    ) as writer:
        for part in parts:
            writer.write_table(part.select(schema.names).cast(schema), row_group_size=ROWS)
            rows += part.num_rows
    return rows
