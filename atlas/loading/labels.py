"""Imported labels on the rows of features: which label a feature shows, and which labels found no feature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atlas.errors import AtlasError

__all__ = ["labels_without_features", "shown_labels"]

_FILLS = ("label", "label_source", "label_score")


def shown_labels(labels: pa.Table, rows: Mapping[str, tuple[int, int]], own: pa.ChunkedArray) -> dict:
    """`label`, `label_source` and `label_score` of the features, by column; nothing where no label fits.

    labels: the artifacts' rows, an import after the other. rows: the first row and the number of features of
    each dictionary, by hash. own: the labels that came with the dictionaries, which an imported one replaces;
    so does the last import an earlier one. Raises `AtlasError` for a number that the dictionary does not
    have.
    """
    first = labels.filter(pc.and_(pc.equal(labels["rank"], 1), _held(labels, rows)))
    if len(first) == 0:
        return {}
    owners = first["dictionary"].cast(pa.string()).to_numpy()
    starts, sizes = (np.array([rows[owner][part] for owner in owners], np.int64) for part in (0, 1))
    numbers = first["number"].to_numpy()
    bad = np.flatnonzero((numbers < 0) | (numbers >= sizes))
    if len(bad):
        row = int(bad[0])
        raise AtlasError(
            f"a label of {owners[row]}: feature {numbers[row]}, but it has 0 to {sizes[row] - 1}; import the"
            " labels again"
        )
    places = starts + numbers
    filled, last = np.unique(places[::-1], return_index=True)  # the first from behind: the last import's
    chosen = np.zeros(len(own), np.int64)
    chosen[filled] = len(places) - 1 - last
    absent = np.ones(len(own), bool)
    absent[filled] = False
    indices = pa.array(chosen, mask=absent)
    found = {name: first[name].combine_chunks().take(indices) for name in _FILLS}
    found["label_source"] = found["label_source"].cast(pa.string())
    found["label"] = pc.coalesce(found["label"], own.combine_chunks())
    return {name: pa.chunked_array([values]) for name, values in found.items()}


def labels_without_features(labels: pa.Table, rows: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """A line for each source some of whose labels belong to dictionaries that are not loaded."""
    held = _held(labels, rows)
    sources = labels["label_source"].cast(pa.string())
    every = {entry["values"]: entry["counts"] for entry in pc.value_counts(sources).to_pylist()}
    left = pc.value_counts(sources.filter(pc.invert(held))).to_pylist()
    return tuple(
        f"labels of {entry['values']}: {entry['counts']:,} of {every[entry['values']]:,} belong to"
        " dictionaries that this atlas does not hold; they wait for them (atlas label list says which)"
        for entry in sorted(left, key=lambda entry: entry["values"])
    )


def _held(labels: pa.Table, rows: Mapping[str, tuple[int, int]]) -> pa.ChunkedArray:
    return pc.is_in(labels["dictionary"].cast(pa.string()), value_set=pa.array(list(rows), pa.string()))
