"""Loading against a bare COPY: `python -m benchmarks.load`.

Makes the artifacts of a made-up model of the demo's size (30 layers, 46,080 features, 49,152 tokens),
then measures, each in a process of its own, in turns:

- **load**: `load_run` from finished artifacts to CURRENT switched: ids mapped, sorted, deduplicated, checked
  finite, adjacency arrays written;
- **copy**: the database's own COPY of the mapped tables (written beforehand, not timed), the same columns.

Prints both, their ratio (copy / load, 1 is as fast as COPY alone; the aim is 0.6), edges a second, and
peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atlas.folder import AtlasFolder
from atlas.load import RunManifest, UsedStep, load_run
from atlas.loading.artifact_files import artifact_files
from atlas.loading.edges import edge_rows
from atlas.loading.ids import Blocks
from atlas.loading.nodes import node_rows
from atlas.schema import artifact_schema
from atlas.store.embedded_writer import EmbeddedWriter

LAYERS, HEADS, WIDTH, VOCABULARY = 30, 9, 1536, 49152
MODEL = "sha256:model"
EDGE_TYPES = ("EMBEDS", "PROMOTES", "DIRECT", "VIA_HEAD")


def _names(values: list[str], codes: np.ndarray) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(values))


def _write(folder: AtlasFolder, step: str, tables: dict[str, dict]) -> None:
    path = folder.artifact(step)
    path.mkdir(parents=True)
    (path / "figures.json").write_text("{}")
    for name, columns in tables.items():
        schema = artifact_schema(name)
        n = len(columns[schema.names[0]])
        arrays = []
        for field in schema:
            values = columns.get(field.name, [None] * n)
            values = values if isinstance(values, pa.Array) else pa.array(values)
            arrays.append(values.cast(field.type))
        pq.write_table(
            pa.Table.from_arrays(arrays, schema=schema), path / f"{name}.parquet", row_group_size=200_000
        )


def _values(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {
        "weight": rng.standard_normal(n).astype(np.float32),
        "z": rng.standard_normal(n).astype(np.float32),
        "rank_in": rng.integers(1, 200, n),
        "rank_out": rng.integers(1, 200, n),
        "rank": rng.integers(1, 17, n),
    }


def make_artifacts(folder: AtlasFolder, direct: int, via_head: int, tokens: int) -> RunManifest:
    """Artifacts as a build leaves them: edges in one step for each target layer."""
    rng = np.random.default_rng(0)
    dictionaries = [f"sha256:neurons-{layer}" for layer in range(LAYERS)]
    facts = {
        "name": ["m"], "hash": [MODEL], "architecture": ["llama"], "n_layers": [LAYERS], "d_model": [576],
        "n_heads": [HEADS], "n_kv_heads": [3], "d_head": [64], "d_mlp": [WIDTH], "d_vocab": [VOCABULARY],
        "n_ctx": [2048], "parallel": [False], "gated": [True], "activation": ["silu"], "dtype": ["Q4_1"],
        "facts": ["{}"],
    }  # fmt: skip
    head = np.arange(LAYERS * HEADS)
    feature = np.arange(LAYERS * WIDTH)
    text = [f" token{i}" for i in range(VOCABULARY)]
    one = {"model": [MODEL] * VOCABULARY, "number": np.arange(VOCABULARY), "text": text}
    _write(
        folder,
        "model",
        {
            "models": facts,
            "tokens": one,
            "heads": {"model": [MODEL] * len(head), "layer": head // HEADS, "number": head % HEADS},
        },
    )
    sets = {
        "model": [MODEL], "name": ["neurons"], "kind": ["neurons"], "format": ["neurons"],
        "hash": ["sha256:n"], "provenance": ["{}"],
    }  # fmt: skip
    same = ("reads", "writes", "readings", "activation")
    described = {
        "model": [MODEL] * LAYERS,
        "set": ["neurons"] * LAYERS,
        "key": [f"m/neurons/L{layer:02d}.mlp" for layer in range(LAYERS)],
        "layer": list(range(LAYERS)),
        "site": ["mlp"] * LAYERS,
        "size": [WIDTH] * LAYERS,
        "hash": dictionaries,
    } | {name: ["x"] * LAYERS for name in same}
    norms = {name: rng.random(len(feature)) for name in ("write_norm", "read_norm", "read_norm_up")}
    features = {"dictionary": _names(dictionaries, feature // WIDTH), "number": feature % WIDTH} | norms
    _write(folder, "sets", {"dictionary_sets": sets, "dictionaries": described, "features": features})
    steps = ["model", "sets"]
    for layer in range(1, LAYERS):
        tables = {}
        share = layer / (LAYERS * (LAYERS - 1) / 2)
        for type, total in (("DIRECT", direct), ("VIA_HEAD", via_head)):
            tables[type] = _feature_edges(rng, layer, int(total * share), dictionaries, type == "VIA_HEAD")
        _write(folder, f"edges{layer:02d}", tables)
        steps.append(f"edges{layer:02d}")
    for type in ("EMBEDS", "PROMOTES"):
        _write(folder, type.lower(), {type: _token_edges(rng, tokens // 2, dictionaries, type)})
        steps.append(type.lower())
    used = tuple(UsedStep(step, "synthetic") for step in steps)
    return RunManifest("run", "{}", "0", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "done", used)


def _distinct(key: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.unique(key))


def _feature_edges(
    rng: np.random.Generator, layer: int, n: int, dictionaries: list[str], through_head: bool
) -> dict[str, object]:
    choices = layer * WIDTH * WIDTH * 2 * (LAYERS * HEADS if through_head else 1)
    key = _distinct(rng.integers(0, choices, n), rng)
    if through_head:
        key, head = key // (LAYERS * HEADS), key % (LAYERS * HEADS)
    key, reading = key // 2, key % 2
    source, target = key // WIDTH, key % WIDTH
    columns: dict[str, object] = {
        "source_dictionary": _names(dictionaries, source // WIDTH),
        "source": source % WIDTH,
        "target_dictionary": _names(dictionaries, np.full(len(key), layer)),
        "target": target,
        "reading": _names(["gate", "up"], reading),
    }
    if through_head:
        between = source // WIDTH + 1
        columns |= {
            "model": _names([MODEL], np.zeros(len(key), int)),
            "layer": between + head // HEADS % np.maximum(layer - between + 1, 1),
            "head": head % HEADS,
        }
        identity = np.stack(
            [source, target, reading, np.asarray(columns["layer"]), np.asarray(columns["head"])]
        )
        columns = _only(columns, np.unique(identity, axis=1, return_index=True)[1])
    return columns | _values(rng, len(np.asarray(columns["source"])))


def _only(columns: dict[str, object], rows: np.ndarray) -> dict[str, object]:
    return {
        name: values.take(pa.array(rows)) if isinstance(values, pa.Array) else np.asarray(values)[rows]
        for name, values in columns.items()
    }


def _token_edges(rng: np.random.Generator, n: int, dictionaries: list[str], type: str) -> dict[str, object]:
    key = _distinct(rng.integers(0, LAYERS * WIDTH * VOCABULARY * 2, n), rng)
    key, reading = key // 2, key % 2
    if type == "PROMOTES":
        key = _distinct(key, rng)
        reading = reading[: len(key)]
    feature, token = key // VOCABULARY, key % VOCABULARY
    end = "target" if type == "EMBEDS" else "source"
    columns = {
        "model": _names([MODEL], np.zeros(len(key), int)),
        "token": token,
        f"{end}_dictionary": _names(dictionaries, feature // WIDTH),
        end: feature % WIDTH,
        "reading": _names(["gate", "up"], reading),
    }
    return columns | _values(rng, len(key))


def write_mapped(folder: AtlasFolder, manifest: RunManifest, out: Path, memory: int) -> None:
    """The tables that a load gives to COPY, as files."""
    out.mkdir()
    files = artifact_files(folder, [step.name for step in manifest.steps])
    blocks = Blocks(out / "ids.parquet")
    nodes = node_rows(folder, [manifest], files, blocks)
    for label, rows in (*nodes.tables.items(), ("USED", nodes.used)):
        pq.write_table(rows, out / f"{label}.parquet", compression="none")
    for type in EDGE_TYPES:
        edges = edge_rows(type, files[type], nodes)
        edges.write(out / f"{type}.parquet", slice(0, len(edges)))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _child(what: str, work: Path, memory: int) -> None:
    manifest = RunManifest.from_json(json.loads((work / "manifest.json").read_text()))
    start = time.perf_counter()
    if what == "load":
        report = load_run(work / "x.atlas", manifest, memory=memory)
        edges = sum(report.counts[type] for type in EDGE_TYPES)
    else:
        writer = EmbeddedWriter(work / "copy.db", memory)
        names = [path.stem for path in sorted((work / "mapped").glob("*.parquet"))]
        names.sort(key=lambda name: (name.isupper(), name == "VIA_HEAD"))  # nodes before relationships
        for name in names:
            writer.copy(name, [work / "mapped" / f"{name}.parquet"])
        writer.finish({})
        edges = sum(pq.read_metadata(work / "mapped" / f"{type}.parquet").num_rows for type in EDGE_TYPES)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "edges": edges, "peak": _peak(), "processor": time.process_time()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--direct", type=int, default=2_000_000)
    parser.add_argument("--via-head", type=int, default=3_000_000)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="EMBEDS and PROMOTES together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=4096, help="bound on the database's buffers, MB")
    parser.add_argument("--child", choices=("load", "copy"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        _child(asked.child, asked.work, asked.memory << 20)
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = AtlasFolder.create(work / "x.atlas")
        manifest = make_artifacts(folder, asked.direct, asked.via_head, asked.tokens)
        manifest.write(folder)
        shutil.copy(folder.runs / "run.json", work / "manifest.json")
        write_mapped(folder, manifest, work / "mapped", asked.memory << 20)
        figures: dict[str, list[dict]] = {"load": [], "copy": []}
        for _ in range(asked.rounds):
            for what, found in figures.items():
                (work / "x.atlas" / "CURRENT").unlink(missing_ok=True)
                (work / "copy.db").unlink(missing_ok=True)
                command = [sys.executable, "-m", "benchmarks.load", "--child", what, "--work", str(work)]
                command += ["--memory", str(asked.memory)]
                found.append(
                    json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                )
        for what, found in figures.items():
            seconds = statistics.median(one["seconds"] for one in found)
            peak = max(one["peak"] for one in found)
            processor = statistics.median(one["processor"] for one in found)
            rate = f"{found[0]['edges'] / seconds:9,.0f} edges/s of {found[0]['edges']:,}"
            print(f"{what:5} {seconds:6.1f} s ({processor:.1f} s of processor)  {rate}  peak {peak:,.0f} MB")
        pairs = zip(figures["copy"], figures["load"], strict=True)
        ratios = [copy["seconds"] / load["seconds"] for copy, load in pairs]
        print(f"copy / load: {statistics.median(ratios):.2f} (median of {len(ratios)}; aim 0.6 or more)")


if __name__ == "__main__":
    main()
