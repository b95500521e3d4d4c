"""Artifacts of a small made-up model, written as a build would leave them: for tests of loading and asking.

Nothing here is computed from weights: the edges are random, so that every pair of layers, head, reading
and sign occurs in a few hundred of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atlas.folder import AtlasFolder
from atlas.load import RunManifest, UsedStep
from atlas.schema import artifact_schema


def table(name: str, columns: dict[str, Any]) -> pa.Table:
    """An artifact table from plain columns; nullable ones may be left out."""
    schema = artifact_schema(name)
    rows = len(next(iter(columns.values())))
    arrays = []
    for column in schema:
        values = columns.get(column.name, [None] * rows if column.nullable else None)
        if pa.types.is_dictionary(column.type):
            arrays.append(pa.array(values, pa.string()).cast(column.type))
        else:
            arrays.append(pa.array(values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def write_artifact(
    folder: AtlasFolder, step: str, tables: dict[str, pa.Table], row_group_size: int = 1000
) -> None:
    """A finished step's folder."""
    path = folder.artifact(step)
    path.mkdir(parents=True, exist_ok=True)
    (path / "figures.json").write_text(json.dumps({"rows": sum(len(t) for t in tables.values())}))
    for name, rows in tables.items():
        loose = pa.Table.from_arrays(
            rows.columns, rows.column_names
        )  # so that a test may write a null anywhere
        pq.write_table(loose, path / f"{name}.parquet", row_group_size=row_group_size)


@dataclass
class Synthetic:
    """A model of `n_layers` layers with `n_heads` heads, one dictionary of `size` features a layer,
    random edges.

    `edges` holds the columns of each type as numpy arrays: source, target (numbered over all layers:
    layer · size + number), layer, head, reading, weight, z, ranks.
    """

    name: str = "toy"
    n_layers: int = 4
    n_heads: int = 2
    size: int = 12
    d_vocab: int = 30
    n_edges: int = 400
    seed: int = 0
    selection: str = "a"
    edges: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        return f"sha256:{self.name}"

    def dictionary(self, layer: int) -> str:
        return f"sha256:{self.name}-neurons-{layer}"

    def step(self, kind: str) -> str:
        return f"{kind}-{self.name}-{self.seed}" + (f"-{self.selection}" if kind.startswith("edges") else "")

    @property
    def steps(self) -> tuple[UsedStep, ...]:
        kinds = (
            "model",
            "dictionaries",
            "plan",
            *(f"edges{layer}" for layer in range(self.n_layers)),
            "edges-tokens",
        )
        return tuple(UsedStep(self.step(kind), kind, f"{kind} of {self.name}") for kind in kinds)

    def manifest(self, run: str | None = None, **changes: Any) -> RunManifest:
        given = {"ended": "2026-01-01T00:01:00Z", "status": "done", "spec": '{"atlas":1}', **changes}
        return RunManifest(
            run=run or f"run-{self.name}-{self.selection}",
            code_version="0.1.0",
            started="2026-01-01T00:00:00Z",
            steps=given.pop("steps", self.steps),
            **given,
        )

    def write(self, path: Path) -> AtlasFolder:
        """Writes all artifacts of the model into an atlas's folder, which is made."""
        folder = AtlasFolder.create(path)
        rng = np.random.default_rng([self.seed, *self.name.encode(), *self.selection.encode()])
        write_artifact(folder, self.step("model"), self._model_tables())
        write_artifact(folder, self.step("dictionaries"), self._dictionary_tables())
        write_artifact(folder, self.step("plan"), {})
        self.edges = {"DIRECT": self._feature_edges(rng, False), "VIA_HEAD": self._feature_edges(rng, True)}
        self.edges |= {"EMBEDS": self._token_edges(rng, True), "PROMOTES": self._token_edges(rng, False)}
        for layer in range(self.n_layers):
            write_artifact(
                folder,
                self.step(f"edges{layer}"),
                {
                    type: self._artifact(type, self.edges[type]["target"] // self.size == layer)
                    for type in ("DIRECT", "VIA_HEAD")
                },
            )
        everything = np.s_[:]
        tokens = {type: self._artifact(type, everything) for type in ("EMBEDS", "PROMOTES")}
        write_artifact(folder, self.step("edges-tokens"), tokens)
        return folder

    def _model_tables(self) -> dict[str, pa.Table]:
        facts = {
            "name": self.name, "hash": self.hash, "architecture": "toy",
            "n_layers": self.n_layers,
            "d_model": 8, "n_heads": self.n_heads, "n_kv_heads": self.n_heads, "d_head": 4,
            "d_mlp": self.size,
            "d_vocab": self.d_vocab, "n_ctx": 64, "parallel": False, "gated": True, "activation": "silu",
            "dtype": "float32", "facts": "{}",
        }  # fmt: skip
        heads = [(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]
        return {
            "models": table("models", {name: [value] for name, value in facts.items()}),
            "tokens": table(
                "tokens",
                {
                    "model": [self.hash] * self.d_vocab,
                    "number": range(self.d_vocab),
                    "text": [self.token_text(i) for i in range(self.d_vocab)],
                },
            ),
            "heads": table(
                "heads",
                {
                    "model": [self.hash] * len(heads),
                    "layer": [a for a, _ in heads],
                    "number": [b for _, b in heads],
                },
            ),
        }

    def token_text(self, number: int) -> str:
        hostile = (
            "it's",
            'a "quote"',
            "back\\slash",
            "line\nbreak",
            "🙂 é",
            "",
            " leading",
            "NUL\x00byte",
            "null",
            "{x}",
        )
        return hostile[number] if number < len(hostile) else f" word{number}"

    def _dictionary_tables(self) -> dict[str, pa.Table]:
        layers = range(self.n_layers)
        sets = {
            "model": [self.hash], "name": ["neurons"], "alias": ["n"], "kind": ["neurons"],
            "format": ["neurons"], "hash": [f"sha256:{self.name}-neurons"], "provenance": ["{}"],
        }  # fmt: skip
        dictionaries = {
            "model": [self.hash] * self.n_layers,
            "set": ["neurons"] * self.n_layers,
            "key": [f"{self.name}/neurons/L{layer:02d}.mlp" for layer in layers],
            "layer": layers,
            "site": ["mlp"] * self.n_layers,
            "size": [self.size] * self.n_layers,
            "activation": ["gated silu"] * self.n_layers,
            "reads": ["{}"] * self.n_layers,
            "writes": ["{}"] * self.n_layers,
            "readings": ["gate,up"] * self.n_layers,
            "hash": [self.dictionary(layer) for layer in layers],
        }
        number = np.arange(self.n_layers * self.size)
        features = {
            "dictionary": [self.dictionary(int(layer)) for layer in number // self.size],
            "number": number % self.size,
            "write_norm": 1.0 + number,
            "read_norm": 2.0 + number,
            "read_norm_up": 3.0 + number,
        }
        return {
            "dictionary_sets": table("dictionary_sets", sets),
            "dictionaries": table("dictionaries", dictionaries),
            "features": table("features", features),
        }

    def _values(self, rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
        weight = rng.standard_normal(n).astype(np.float32)
        weight[rng.random(n) < 0.2] = np.float32(0.25)  # ties
        return {"weight": weight}

    def _feature_edges(self, rng: np.random.Generator, through_head: bool) -> dict[str, np.ndarray]:
        n = self.n_edges
        source = rng.integers(0, (self.n_layers - 1) * self.size, n)
        layer = source // self.size
        target_layer = layer + 1 + (rng.random(n) * (self.n_layers - 1 - layer)).astype(np.int64)
        columns = {
            "source": source,
            "target": target_layer * self.size + rng.integers(0, self.size, n),
            "reading": rng.integers(0, 2, n),
            "layer": layer + 1 + (rng.random(n) * (target_layer - layer)).astype(np.int64),
            "head": rng.integers(0, self.n_heads, n),
        }
        identity = list(columns) if through_head else ["source", "target", "reading"]
        _, first = np.unique(np.stack([columns[name] for name in identity]), axis=1, return_index=True)
        columns = {name: columns[name][np.sort(first)] for name in identity}
        columns |= self._values(rng, len(first))
        columns["z"] = (columns["weight"] * np.float32(3)).astype(np.float32)
        columns["rank_in"] = rng.integers(1, 50, len(first))
        columns["rank_out"] = rng.integers(1, 50, len(first))
        return columns

    def _token_edges(self, rng: np.random.Generator, embeds: bool) -> dict[str, np.ndarray]:
        n = self.n_edges // 2
        token = rng.integers(0, self.d_vocab, n)
        feature = rng.integers(0, self.n_layers * self.size, n)
        columns = {"source": token, "target": feature} if embeds else {"source": feature, "target": token}
        if embeds:
            columns["reading"] = rng.integers(0, 2, n)
        _, first = np.unique(np.stack(list(columns.values())), axis=1, return_index=True)
        columns = {name: values[np.sort(first)] for name, values in columns.items()}
        return columns | self._values(rng, len(first)) | {"rank": rng.integers(1, 17, len(first))}

    def _artifact(self, type: str, rows: Any) -> pa.Table:
        own = {name: values[rows] for name, values in self.edges[type].items()}
        n = len(own["weight"])
        columns: dict[str, Any] = {"model": [self.hash] * n}
        for end in ("source", "target"):
            if (type, end) in (("EMBEDS", "source"), ("PROMOTES", "target")):
                columns["token"] = own.pop(end)
            else:
                ids = own.pop(end)
                columns[f"{end}_dictionary"] = [self.dictionary(int(layer)) for layer in ids // self.size]
                columns[end] = ids % self.size
        if "reading" in own:
            columns["reading"] = [("gate", "up")[code] for code in own.pop("reading")]
        return table(type, columns | own)
