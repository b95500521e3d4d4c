"""A small atlas made directly from artifact tables: two layers, hostile token texts, edges of every type.

Its edges are random but for their structure, so every number that a look-up shows can be counted again from
the tables (`TABLES` of the built atlas) without a database.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atlas.folder import AtlasFolder
from atlas.load import RunManifest, UsedStep, load_run
from atlas.schema import artifact_schema

MODEL = "a" * 64
LAYERS, SIZE, HEADS, HEAD_COUNT = 3, 12, 2, 6
TEXTS = [
    "the", " the", " Paris", "\n", "\x1b[31mred", "[bold]not markup[/bold]", "it's", 'quo"te', "back\\slash",
    "\u202eevil", "日本", "é", "", "&<>", "a,b;c", "line\r\nbreak", "\x7fdel",
    "\ufffd", "😀", " ",
]  # fmt: skip


@dataclass(frozen=True)
class SmallAtlas:
    """The atlas and the tables it was made of (columns by name; ends as (layer, number))."""

    path: Path
    direct: list[dict]
    via_head: list[dict]
    embeds: list[dict]
    promotes: list[dict]
    manifest: RunManifest


def dictionary_hash(layer: int, set_name: str = "neurons") -> str:
    """A made-up content hash."""
    return f"{layer}{set_name.encode().hex():0<63}"[:64]


def _write(folder: AtlasFolder, step: str, tables: dict[str, list[dict]]) -> None:
    place = folder.artifact(step)
    place.mkdir(parents=True)
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows, artifact_schema(name)), place / f"{name}.parquet")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": ""} for path in place.iterdir()}
    (place / "figures.json").write_text(json.dumps({"rows": sum(map(len, tables.values()))}))
    (place / "manifest.json").write_text(json.dumps({"files": files}))


def _ranked(rows: list[dict], end: tuple[str, ...], name: str) -> None:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in (*end, "reading")), []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: -abs(row["weight"]))
        for rank, row in enumerate(group, start=1):
            row[name] = rank


def _token_ranks(rows: list[dict], end: tuple[str, ...]) -> None:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = (*(row[name] for name in end), row.get("reading"), row["weight"] > 0)
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: -abs(row["weight"]))
        for rank, row in enumerate(group, start=1):
            row["rank"] = rank


def build(
    path: Path, *, seed: int = 0, sets: tuple[str, ...] = ("neurons",), density: float = 0.3
) -> SmallAtlas:
    """Makes and loads the atlas."""
    rng = np.random.default_rng(seed)
    folder = AtlasFolder.create(path)
    facts = {"name": "smol", "hash": MODEL, "architecture": "llama", "n_layers": LAYERS, "d_model": 16}
    facts |= {
        "n_heads": HEADS,
        "n_kv_heads": 1,
        "d_head": 8,
        "d_mlp": SIZE,
        "d_vocab": len(TEXTS),
        "n_ctx": 32,
    }
    facts |= {"parallel": False, "gated": True, "activation": "silu", "dtype": "float32", "facts": "{}"}
    dictionaries, features = [], []
    ends: list[tuple[str, int, int]] = []  # (hash, layer, number)
    for name in sets:
        for layer in range(LAYERS):
            hash = dictionary_hash(layer, name)
            dictionaries.append(
                {"model": MODEL, "set": name, "key": f"smol/{name}/L{layer:02d}.mlp", "layer": layer,
                 "site": "mlp", "size": SIZE, "activation": "silu", "reads": "{}", "writes": "[]",
                 "readings": "gate,up", "hash": hash}
            )  # fmt: skip
            for number in range(SIZE):
                norms = {"write_norm": 1.0 + number, "read_norm": 2.0, "read_norm_up": 0.5}
                features.append({"dictionary": hash, "number": number, "label": None, **norms})
                ends.append((hash, layer, number))
    set_rows = [
        {"model": MODEL, "name": name, "alias": name[0], "kind": "neurons", "format": "neurons",
         "hash": name, "provenance": "{}"} for name in sets
    ]  # fmt: skip
    direct, via_head = [], []
    for a_hash, a_layer, a in ends:
        for b_hash, b_layer, b in ends:
            if a_layer >= b_layer:
                continue
            pair = {"source_dictionary": a_hash, "source": a, "target_dictionary": b_hash, "target": b}
            for reading in ("gate", "up"):
                if rng.random() < density:
                    weight = np.float32(rng.standard_normal() * 3)
                    direct.append({**pair, "reading": reading, "weight": weight, "z": np.float32(weight / 2)})
                for layer in range(a_layer + 1, b_layer + 1):
                    for head in range(HEADS):
                        if rng.random() < density / 2:
                            weight = np.float32(rng.standard_normal())
                            place = {"model": MODEL, "layer": layer, "head": head}
                            via_head.append(
                                {
                                    **pair,
                                    "reading": reading,
                                    "weight": weight,
                                    "z": np.float32(weight / 3),
                                    **place,
                                }
                            )
    for rows in (direct, via_head):
        _ranked(rows, ("target_dictionary", "target"), "rank_in")
        _ranked(rows, ("source_dictionary", "source"), "rank_out")
    embeds, promotes = [], []
    for hash, _, number in ends:
        for token in range(len(TEXTS)):
            for reading in ("gate", "up"):
                if rng.random() < 0.4:
                    ends_here = {"token": token, "target_dictionary": hash, "target": number}
                    weight = np.float32(rng.standard_normal())
                    embeds.append({"model": MODEL, **ends_here, "reading": reading, "weight": weight})
            if rng.random() < 0.4:
                promotes.append({"source_dictionary": hash, "source": number, "model": MODEL, "token": token,
                                 "weight": np.float32(rng.standard_normal())})  # fmt: skip
    _token_ranks(embeds, ("target_dictionary", "target"))
    _token_ranks(promotes, ("source_dictionary", "source"))
    steps = {
        "nodes": {
            "models": [facts],
            "tokens": [{"model": MODEL, "number": n, "text": text} for n, text in enumerate(TEXTS)],
            "heads": [
                {"model": MODEL, "layer": n // HEADS, "number": n % HEADS} for n in range(LAYERS * HEADS)
            ],
            "dictionary_sets": set_rows,
            "dictionaries": dictionaries,
            "features": features,
        },
        "direct": {"DIRECT": direct},
        "heads": {"VIA_HEAD": via_head},
        "tokens": {"EMBEDS": embeds, "PROMOTES": promotes},
    }
    used = []
    for place, (kind, tables) in enumerate(steps.items()):
        name = f"{seed:032x}{place:032x}"
        _write(folder, name, tables)
        used.append(UsedStep(name, kind, f"{kind} of the small atlas"))
    manifest = RunManifest(
        "e" * 64, "{}", "0.1.0", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", "done", tuple(used)
    )
    load_run(path, manifest)
    return SmallAtlas(path, direct, via_head, embeds, promotes, manifest)
