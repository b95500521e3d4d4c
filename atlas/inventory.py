"""What an atlas holds: models, sets, counts, sizes, runs, and what its selection of edges dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas.answers import Answer, Table
from atlas.folder import AtlasFolder
from atlas.schema import SCHEMA_VERSION
from atlas.store import Store

__all__ = ["dropped", "info", "runs"]

SURVEYS, SELECTIONS = ("direct", "heads"), ("select",)  # kinds of steps whose figures tell


def info(store: Store) -> Answer:
    """Models, sets, rows of each kind, sizes on disk, runs, and the selection in a line for each type of
    edge.
    """
    folder = AtlasFolder.open(store.uri)
    current = folder.current() or ""
    facts = {
        "atlas": str(folder.path),
        "schema": SCHEMA_VERSION,
        "generation": current,
        "database_bytes": _bytes(folder.generation(current)),
        "arrays_bytes": _bytes(folder.arrays(current)),
        "artifacts_bytes": _bytes(folder.artifacts),
    }
    counts = store.counts()
    models = store.query(
        "MATCH (m:Model) RETURN m.name AS name, m.architecture AS architecture, m.n_layers AS layers,"
        " m.d_model AS d_model, m.n_heads AS heads, m.d_vocab AS tokens, m.dtype AS dtype ORDER BY name"
    )
    sets = store.query(
        "MATCH (d:Dictionary) RETURN d.model AS model, d.`set` AS name, count(*) AS dictionaries,"
        " sum(d.size) AS features ORDER BY model, name"
    )
    about = {
        (model, name): (alias, kind)
        for model, name, alias, kind in store.query(
            "MATCH (s:DictionarySet) RETURN s.model, s.name, s.alias, s.kind"
        ).rows
    }
    set_rows = [(*row[:2], *about.get(row[:2], (None, None)), *row[2:]) for row in sets.rows]
    holds = [(name, count) for name, count in counts.items() if count]
    return Answer(
        f"atlas {folder.path.name}",
        facts,
        {
            "models": Table.of("models", models.columns, models.rows),
            "sets": Table.of(
                "dictionary sets", ("model", "set", "alias", "kind", "dictionaries", "features"), set_rows
            ),
            "holds": Table.of("nodes and relationships", ("of", "rows"), holds),
            "selection": _by_type(store),
            "runs": runs(folder.path),
        },
    )


def runs(atlas: str | Path) -> Table:
    """The runs that are loaded, in the order in which they came."""
    folder = AtlasFolder.open(atlas)
    rows: list[tuple[Any, ...]] = []
    current = folder.current()
    for run in folder.contents(current)["runs"] if current else ():
        rows.append(
            (run["run"], run["status"], run["started"], run["ended"], len(run["steps"]), run["code_version"])
        )
    return Table.of("runs", ("run", "status", "started", "ended", "steps", "code_version"), rows)


def dropped(store: Store) -> Answer:
    """For each pair of layers and each head: how many pairs there were, how many edges are kept, and of how
    much.

    kept share: of the sum of |weight| over all pairs. floor: edges that the same rule keeps when the writing
    vectors are turned at random. z_sd: the spread of z (1: like random directions). Pairs, sums and floor
    rest on a sample where a block is large.
    """
    columns = ("pairs", "edges", "kept_share", "floor", "z_sd", "sampled")
    blocks = _blocks(store)
    direct = [(*key[1:], *block.row()) for key, block in sorted(blocks.items()) if key[0] == "DIRECT"]
    heads = [(*key[1:], *block.row()) for key, block in sorted(blocks.items()) if key[0] == "VIA_HEAD"]
    return Answer(
        "what the selection of edges kept and dropped",
        {},
        {
            "direct": Table.of("DIRECT, by layers", ("source_layer", "target_layer", *columns), direct),
            "via_head": Table.of("VIA_HEAD, by head", ("layer", "head", *columns), heads),
        },
        (NOTE,),
    )


NOTE = (
    "kept_share: of the sum of |weight| over all pairs. floor: what the same thresholds keep of randomly"
    " rotated writing vectors; of a top k, the pairs that would outrank its k-th. z_sd: spread of z; 1 is"
    " that of random directions. Where sampled < pairs, they rest on a sample."
)


@dataclass
class _Block:
    """Figures of the pairs between some sources and targets, summed."""

    pairs: int = 0
    sampled: int = 0
    total: float = 0.0
    floor: float = 0.0
    squares: float = 0.0  # Σ z² of the sample
    edges: int = 0
    kept: float = 0.0
    histogram: dict[str, float] = field(default_factory=dict)

    def survey(self, row: dict[str, Any]) -> None:
        self.pairs += row["pairs"]
        self.sampled += row["sampled"]
        self.total += row["total"]
        self.floor += row["floor"]
        self.squares += row["z_sd"] ** 2 * row["sampled"]

    def row(self) -> tuple[Any, ...]:
        share = self.kept / self.total if self.total else None
        spread = (self.squares / self.sampled) ** 0.5 if self.sampled else None
        return self.pairs, self.edges, share, round(self.floor), spread, self.sampled


def _by_type(store: Store) -> Table:
    sums: dict[str, _Block] = {}
    for (type, *_), block in _blocks(store).items():
        whole = sums.setdefault(type, _Block())
        for name in ("pairs", "sampled", "total", "floor", "squares", "edges", "kept"):
            setattr(whole, name, getattr(whole, name) + getattr(block, name))
    columns = ("type", "pairs", "edges", "kept_share", "floor", "z_sd", "sampled")
    rows = [(type, *block.row()) for type, block in sorted(sums.items())]
    return Table.of("what the selection kept (atlas info --dropped: by layers and heads)", columns, rows,
                    notes=(NOTE,) if rows else ())  # fmt: skip


def _blocks(store: Store) -> dict[tuple[str, int, int], _Block]:
    """By (DIRECT, source layer, target layer) and (VIA_HEAD, layer, head)."""
    blocks: dict[tuple[str, int, int], _Block] = {}
    layer_of = dict(store.query("MATCH (d:Dictionary) RETURN d.hash, d.layer").rows)
    seen: set[tuple[Any, ...]] = set()
    for row in _figures(store, SURVEYS, "survey"):
        identity = (row["source"], row["target"], row["layer"], row["head"])
        if identity in seen or row["target"] not in layer_of:
            continue  # two rules looked at the same pairs
        seen.add(identity)
        blocks.setdefault(_place(row, layer_of, layer_of.get(row.get("target"), -1)), _Block()).survey(row)
    for row in _figures(store, SELECTIONS, "kept"):
        block = blocks.setdefault(_place(row, layer_of, layer_of.get(row.get("target"), -1)), _Block())
        block.edges += row["edges"]
        block.kept += row["total"]
    return blocks


def _place(row: dict[str, Any], layer_of: dict[str, int], target_layer: int) -> tuple[str, int, int]:
    if row["head"] >= 0:
        return "VIA_HEAD", row["layer"], row["head"]
    return "DIRECT", layer_of.get(row["source"], -1), target_layer


def _figures(store: Store, kinds: tuple[str, ...], name: str) -> Iterator[dict[str, Any]]:
    found = store.query(
        "MATCH (s:Step) WHERE s.kind IN $kinds RETURN s.figures ORDER BY s.id", {"kinds": list(kinds)}
    )
    for (figures,) in found.rows:
        yield from json.loads(figures or "{}").get(name, ())


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
