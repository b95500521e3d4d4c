"""Node rows of a generation, from the artifacts: ids given, keys written, properties derived."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.loading.artifact_files import ArtifactFile, distinct_rows
from atlas.loading.ids import Blocks
from atlas.loading.labels import labels_without_features, shown_labels
from atlas.loading.runs import RunManifest
from atlas.schema import NODES, artifact_schema

__all__ = ["Block", "NodeRows", "head_rows", "node_rows"]


@dataclass(frozen=True)
class Block:
    """Where the numbers 0 .. size - 1 of one owner lie among the ids."""

    base: int
    size: int
    model: str = ""
    """Hash of the model it belongs to."""


@dataclass(frozen=True)
class NodeRows:
    """The tables of nodes, by label, and what edges need to find them.

    features by dictionary hash, tokens by model hash; heads by model hash, with the heads of a layer.
    """

    tables: dict[str, pa.Table]
    steps: dict[str, int]
    features: dict[str, Block]
    tokens: dict[str, Block]
    heads: dict[str, tuple[Block, int]]
    used: pa.Table
    """(:Run)-[:USED]->(:Step), with the columns `from` and `to`."""
    notes: tuple[str, ...] = ()
    """For the user: what was given and could not be shown."""


def node_rows(
    folder: AtlasFolder,
    runs: Sequence[RunManifest],
    files: Mapping[str, list[ArtifactFile]],
    blocks: Blocks,
) -> NodeRows:
    """All nodes of these runs but the heads, which `head_rows` completes when their edges are known.

    Raises `AtlasError` for rows that contradict each other, numbers that are not 0, 1, 2 …, values that are
    missing or not finite.
    """
    step_ids, step_table = _steps(folder, runs, blocks)
    run_table, used = _runs(runs, step_ids, blocks)
    read = {table: _gather(table, own, step_ids) for table, own in files.items() if table.islower()}

    models = distinct_rows(read["models"], ["hash"], "the model")
    names = dict(zip(models["hash"].to_pylist(), models["name"].to_pylist(), strict=True))
    _unique(models["name"].to_pylist(), "models", "name the other differently, or remove its runs")
    tables = {"Step": step_table, "Run": run_table}
    tables["Model"] = _rows(
        "Model", models, id=_single_ids(blocks, "Model", models["hash"]), key=models["name"]
    )

    sets = distinct_rows(read["dictionary_sets"], ["model", "name"], "the dictionary set")
    set_models = [_known_model(names, hash) for hash in sets["model"].to_pylist()]
    set_keys = [f"{model}/{name}" for model, name in zip(set_models, sets["name"].to_pylist(), strict=True)]
    owners = [
        f"{hash}/{name}"
        for hash, name in zip(sets["model"].to_pylist(), sets["name"].to_pylist(), strict=True)
    ]
    tables["DictionarySet"] = _rows(
        "DictionarySet", sets, id=_single_ids(blocks, "DictionarySet", owners), key=set_keys, model=set_models
    )
    kinds = dict(zip(set_keys, sets["kind"].to_pylist(), strict=True))

    dictionaries = distinct_rows(read["dictionaries"], ["hash"], "the dictionary")
    _unique(dictionaries["key"].to_pylist(), "dictionaries", "remove the runs of the other, or replace them")
    tables["Dictionary"] = _rows(
        "Dictionary",
        dictionaries,
        id=_single_ids(blocks, "Dictionary", dictionaries["hash"]),
        model=[_known_model(names, hash) for hash in dictionaries["model"].to_pylist()],
    )

    features, tables["Feature"], notes = _features(
        read["features"], read["labels"], dictionaries, names, kinds, blocks
    )
    tokens, tables["Token"] = _tokens(read["tokens"], models, blocks)
    heads, tables["Head"] = _heads(read["heads"], models, blocks)
    return NodeRows(tables, step_ids, features, tokens, heads, used, notes)


def head_rows(heads: pa.Table, edges: np.ndarray, total_weight: np.ndarray) -> pa.Table:
    """The heads with the totals of their edges: edges, total_weight (n_heads,) in the order of the rows."""
    place = {name: heads.column_names.index(name) for name in ("edges", "total_weight")}
    heads = heads.set_column(place["edges"], "edges", pa.array(edges, pa.int64()))
    return heads.set_column(place["total_weight"], "total_weight", pa.array(total_weight, pa.float64()))


def _rows(label: str, given: pa.Table, /, **derived: Any) -> pa.Table:
    """A table with the label's columns in their order, taken from `derived` or else from `given`.

    Nullable columns that neither has are left out: they are added to the database empty.
    """
    columns = {}
    for column in NODES[label].columns:
        values = derived.get(column.name)
        if values is None and column.name in given.column_names:
            values = given[column.name]
        if values is None:
            if not column.nullable:
                raise KeyError(f"{label}.{column.name} has no source")
            continue
        kind = column.kind.database_arrow_type()
        columns[column.name] = (
            values.cast(kind) if isinstance(values, pa.ChunkedArray) else pa.array(values, kind)
        )
    return pa.table(columns)


def _gather(table: str, files: list[ArtifactFile], step_ids: Mapping[str, int]) -> pa.Table:
    """The rows of all files of one table, each with the id of its step; none where no run is left."""
    parts = []
    for file in files:
        rows = file.read()
        parts.append(rows.append_column("step", pa.array(np.full(len(rows), step_ids[file.step]))))
    if parts:
        return pa.concat_tables(parts).unify_dictionaries()
    return artifact_schema(table).empty_table().append_column("step", pa.array([], pa.int64()))


def _single_ids(blocks: Blocks, label: str, owners: Any) -> list[int]:
    return [
        blocks.base(label, owner) for owner in (owners if isinstance(owners, list) else owners.to_pylist())
    ]


def _unique(names: list[str], what: str, remedy: str) -> None:
    for name in {name for name in names if names.count(name) > 1}:
        raise AtlasError(f"two {what} with different content are called {name}: {remedy}")


def _known_model(names: Mapping[str, str], hash: str) -> str:
    if hash not in names:
        raise AtlasError(f"artifacts name the model {hash}, which no step of the runs describes")
    return names[hash]


def _steps(
    folder: AtlasFolder, runs: Sequence[RunManifest], blocks: Blocks
) -> tuple[dict[str, int], pa.Table]:
    steps = {step.name: step for run in runs for step in run.steps}
    ids = {name: blocks.base("Step", name) for name in steps}
    figures = []
    for name in steps:
        path = folder.artifact(name) / "figures.json"
        figures.append(json.dumps(json.loads(path.read_text()), sort_keys=True) if path.exists() else "{}")
    return ids, _rows(
        "Step",
        pa.table({}),
        id=list(ids.values()),
        key=list(steps),
        kind=[step.kind for step in steps.values()],
        title=[step.title for step in steps.values()],
        figures=figures,
    )


def _runs(runs: Sequence[RunManifest], steps: Mapping[str, int], blocks: Blocks) -> tuple[pa.Table, pa.Table]:
    ids = [blocks.base("Run", run.run) for run in runs]
    fields = ("spec", "code_version", "started", "ended", "status")
    table = _rows(
        "Run",
        pa.table({}),
        id=ids,
        key=[run.run for run in runs],
        **{field: [getattr(run, field) for run in runs] for field in fields},
    )
    pairs = [(id, steps[step.name]) for id, run in zip(ids, runs, strict=True) for step in run.steps]
    pairs = sorted(set(pairs))
    used = pa.table(
        {
            "from": pa.array([a for a, _ in pairs], pa.int64()),
            "to": pa.array([b for _, b in pairs], pa.int64()),
        }
    )
    return table, used


def _numbered(rows: pa.Table, owner: str, expected: Mapping[str, int], what: str) -> list[str]:
    """The owners in the order of the rows, checked: each has the numbers 0, 1, 2 … once each, as many
    as expected.
    """
    counts = pc.value_counts(rows[owner].combine_chunks()).to_pylist()
    start = 0
    numbers = rows["number"].to_numpy()
    for name, count in ((entry["values"], entry["counts"]) for entry in counts):
        if name not in expected:
            raise AtlasError(f"artifacts hold {what} of {name}, which no step of the runs describes")
        if count != expected[name] or not np.array_equal(numbers[start : start + count], np.arange(count)):
            raise AtlasError(f"{what} of {name}: expected the numbers 0 to {expected[name] - 1}, once each")
        start += count
    return [entry["values"] for entry in counts]


def _features(
    rows: pa.Table,
    labels: pa.Table,
    dictionaries: pa.Table,
    names: Mapping[str, str],
    kinds: Mapping[str, str],
    blocks: Blocks,
) -> tuple[dict[str, Block], pa.Table, tuple[str, ...]]:
    described = {row["hash"]: row for row in dictionaries.to_pylist()}
    if len(rows) == 0:
        return {}, _empty("Feature"), labels_without_features(labels, {})
    rows = rows.set_column(0, "dictionary", rows["dictionary"].cast(pa.string()))
    rows = distinct_rows(rows, ["dictionary", "number"], "the feature")
    sizes = {hash: row["size"] for hash, row in described.items()}
    present = _numbered(rows, "dictionary", sizes, "the features")
    found = {}
    for hash in sorted(present, key=lambda hash: described[hash]["key"]):  # ids follow the readable keys
        base = blocks.base("Feature", hash, sizes[hash])
        found[hash] = Block(base, sizes[hash], described[hash]["model"])
    counts = [sizes[hash] for hash in present]
    repeat = np.repeat(np.arange(len(present)), counts)
    own = [described[hash] for hash in present]

    def each(values: list[Any]) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(values).take(pa.array(repeat))])

    numbers = rows["number"]
    bases = np.repeat([found[hash].base for hash in present], counts)
    set_keys = [f"{names[d['model']]}/{d['set']}" for d in own]
    for key in set_keys:
        if key not in kinds:
            raise AtlasError(
                f"artifacts hold a dictionary of the set {key}, which no step of the runs describes"
            )
    keys = pc.binary_join_element_wise(each([d["key"] for d in own]), numbers.cast(pa.string()), "/")
    starts = np.cumsum([0, *counts])[:-1].tolist()
    places = dict(zip(present, zip(starts, counts, strict=True), strict=True))
    table = _rows(
        "Feature",
        rows,
        id=bases + numbers.to_numpy(),
        key=keys,
        model=each([names[d["model"]] for d in own]),
        set=each([d["set"] for d in own]),
        layer=each([d["layer"] for d in own]),
        site=each([d["site"] for d in own]),
        kind=each([kinds[key] for key in set_keys]),
        **shown_labels(labels, places, rows["label"]),
    )
    return found, table, labels_without_features(labels, places)


def _tokens(rows: pa.Table, models: pa.Table, blocks: Blocks) -> tuple[dict[str, Block], pa.Table]:
    if len(rows) == 0:
        return {}, _empty("Token")
    rows = rows.set_column(0, "model", rows["model"].cast(pa.string()))
    rows = distinct_rows(rows, ["model", "number"], "the token")
    sizes = dict(zip(models["hash"].to_pylist(), models["d_vocab"].to_pylist(), strict=True))
    present = _numbered(rows, "model", sizes, "the tokens")
    found = {hash: Block(blocks.base("Token", hash, sizes[hash]), sizes[hash], hash) for hash in present}
    return found, _of_models("Token", rows, models, [(hash, found[hash]) for hash in present], "{}/")


def _heads(rows: pa.Table, models: pa.Table, blocks: Blocks) -> tuple[dict[str, tuple[Block, int]], pa.Table]:
    if len(rows) == 0:
        return {}, _empty("Head")
    rows = rows.set_column(0, "model", rows["model"].cast(pa.string()))
    rows = distinct_rows(rows, ["model", "layer", "number"], "the head")
    found = {}
    described = {row["hash"]: row for row in models.to_pylist()}
    present = pc.unique(rows["model"]).to_pylist()
    start = 0
    ids, keys, model_names = [], [], []
    for hash in present:
        if hash not in described:
            raise AtlasError(f"artifacts hold heads of {hash}, which no step of the runs describes")
        model, n_heads = described[hash]["name"], described[hash]["n_heads"]
        size = described[hash]["n_layers"] * n_heads
        own = rows.slice(start, size)
        numbers = own["layer"].to_numpy() * n_heads + own["number"].to_numpy()
        if not np.array_equal(numbers, np.arange(size)) or set(own["model"].to_pylist()) != {hash}:
            raise AtlasError(
                f"the heads of {model}: expected {n_heads} in each of {described[hash]['n_layers']} layers"
            )
        block = Block(blocks.base("Head", hash, size), size, hash)
        found[hash] = (block, n_heads)
        ids.append(block.base + numbers)
        pairs = zip(own["layer"].to_pylist(), own["number"].to_pylist(), strict=True)
        keys += [f"{model}/L{layer:02d}.H{number:02d}" for layer, number in pairs]
        model_names += [model] * size
        start += size
    if start != len(rows):
        raise AtlasError("the heads of a model: there are more than its layers have")
    zero = np.zeros(len(rows))
    table = _rows(
        "Head", rows, id=np.concatenate(ids), key=keys, model=model_names, edges=zero, total_weight=zero
    )
    return found, table


def _of_models(
    label: str, rows: pa.Table, models: pa.Table, blocks: list[tuple[str, Block]], prefix: str
) -> pa.Table:
    names = dict(zip(models["hash"].to_pylist(), models["name"].to_pylist(), strict=True))
    repeat = np.repeat(np.arange(len(blocks)), [block.size for _, block in blocks])
    prefixes = pa.array([prefix.format(names[hash]) for hash, _ in blocks]).take(pa.array(repeat))
    numbers = rows["number"].combine_chunks()
    return _rows(
        label,
        rows,
        id=np.repeat([block.base for _, block in blocks], [block.size for _, block in blocks])
        + numbers.to_numpy(),
        key=pa.chunked_array([pc.binary_join_element_wise(prefixes, numbers.cast(pa.string()), "")]),
        model=pa.chunked_array([pa.array([names[hash] for hash, _ in blocks]).take(pa.array(repeat))]),
    )


def _empty(label: str) -> pa.Table:
    return pa.table(
        {
            column.name: pa.array([], column.kind.database_arrow_type())
            for column in NODES[label].columns
            if not column.nullable
        }
    )
