"""The demo on Othello-GPT: an atlas of its transcoders, attention and embedding dictionaries in seconds, with
features whose names the rules of the game confirm.

Model, dictionaries and labels are files of the repository (examples/othello/models). A label is the predicate
of the board that a feature tells best, with its F1 on games that did not choose it; the tour goes from the
best of each layer to the edges of one of them, both ends named.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas.answers import Answer, Table
from atlas.api import Atlas
from atlas.errors import AtlasError
from atlas.svg import Picture

__all__ = [
    "LABEL_SOURCE",
    "Named",
    "label_files",
    "named",
    "othello_files",
    "picture_of",
    "spec_text",
    "tour",
]

LABEL_SOURCE = "rules of Othello"
SETS = {"embed": ("saes/embed", "e"), "attn_out": ("saes/attn_out", "a"), "transcoders": ("transcoders", "t")}
TELLS = 0.3  # F1
BOARD = ("flips", "mine", "theirs", "empty", "legal")  # more than the token just read

SPEC = """\
# Othello-GPT, seed 1: 6 layers that predict legal moves; 13 dictionaries of 1,024 features.
#
# What attention adds is described by its own dictionary, so features meet heads there: into it through the
# heads of its layer, out of it directly. No edge goes through a head past it, which would count twice.
atlas: 1
models:
  othello: {{path: {model}}}
dictionaries:
  embed: {{model: othello, path: {embed}, alias: e}}
  attn_out: {{model: othello, path: {attn_out}, alias: a}}
  transcoders: {{model: othello, path: {transcoders}, alias: t}}
edges:
  - types: [DIRECT]
    from: [embed, attn_out, transcoders]
    to: [transcoders]
    keep: {{any: [{{z: 6}}, {{top: 8, per: target}}]}}
  - {{types: [VIA_HEAD], from: [embed, transcoders], to: [attn_out], keep: {{top: 2, per: target×head}}}}
  - {{types: [EMBEDS, PROMOTES], keep: {{top: 16}}}}
"""


def othello_files() -> Path:
    """The folder of the model of seed 1 in this repository. Raises AtlasError where there is none."""
    folder = Path(__file__).resolve().parents[1] / "examples" / "othello" / "models" / "seed-1"
    if not (folder / "model.safetensors").is_file():
        raise AtlasError(
            f"{folder}: no Othello-GPT there; make it in a clone of the repository, in about two hours:"
            " python -m examples.othello.make --seed 1"
        )
    return folder


def spec_text(folder: Path) -> str:
    """The spec of the demo's atlas, YAML."""
    import json

    places = {name: json.dumps(str(folder / place)) for name, (place, _) in SETS.items()}
    return SPEC.format(model=json.dumps(str(folder)), **places)


def label_files(folder: Path) -> list[Path]:
    """Of the sets in the atlas."""
    return [folder / "labels" / f"{name}.csv" for name in SETS]


@dataclass(frozen=True)
class Named:
    """A feature and what it tells."""

    key: str
    predicate: str
    kind: str
    layer: int
    f1: float
    precision: float
    recall: float
    chance: float


def named(folder: Path, set: str) -> list[Named]:
    """The labels of a set, as the files have them, the best F1 first."""
    file = folder / "labels" / f"{set}.csv"
    with file.open(encoding="utf-8", newline="") as opened:
        rows = [
            Named(row["key"], row["predicate"], row["kind"], int(row["layer"]),
                  *(float(row[name]) for name in ("f1", "precision", "recall", "chance")))
            for row in csv.DictReader(opened)
        ]  # fmt: skip
    return sorted(rows, key=lambda one: (-one.f1, one.key))


def tour(atlas: Atlas, folder: Path) -> Iterator[Answer | Table | str]:
    """What the demo shows."""
    for name in SETS:
        rows = [
            (one.key, one.predicate, one.f1, one.precision, one.recall, one.chance)
            for one in _best_of_layers(named(folder, name))
        ]
        yield Table.of(
            f"{name}: the feature of each layer that tells most exactly what the rules say of the board",
            ("feature", "tells", "F1", "precision", "recall", "F1 by chance"),
            rows,
        )
    chosen = _chosen(atlas, folder)
    yield atlas.feature(chosen.key).page(5)
    yield from _edges(atlas, chosen.key)
    yield _heads(atlas)


def picture_of(atlas: Atlas, folder: Path) -> Picture:
    """The neighbourhood of the feature that the tour looks at."""
    return atlas.feature(_chosen(atlas, folder).key).picture()


def _best_of_layers(labels: Sequence[Named]) -> list[Named]:
    """The best of each layer that tells more than the token just read; of all where none does."""
    best: dict[int, Named] = {}
    for one in sorted(labels, key=lambda one: (one.kind not in BOARD or one.f1 < TELLS, -one.f1, one.key)):
        best.setdefault(one.layer, one)
    return [best[layer] for layer in sorted(best)]


def _chosen(atlas: Atlas, folder: Path) -> Named:
    """Of the transcoders' features in the middle layers the best that tells of the board, with edges on both
    sides."""
    labels = named(folder, "transcoders")
    last = max(one.layer for one in labels)
    for one in labels:
        if one.kind in BOARD and 0 < one.layer < last:
            feature = atlas.feature(one.key)
            if feature.upstream(3).rows and feature.downstream(3).rows:
                return one
    raise AtlasError(f"{atlas.uri}: no labelled feature has edges on both sides; build the demo anew")


def _edges(atlas: Atlas, key: str) -> Iterator[Table]:
    """The strongest edges with the names of both ends."""
    columns = ("weight", "z", "feature", "tells")
    for title, pattern in (
        ("what feeds it", "(o:Feature)-[e:DIRECT]->(f:Feature)"),
        ("what it feeds", "(f:Feature)-[e:DIRECT]->(o:Feature)"),
    ):
        found = atlas.query(
            f"MATCH {pattern} WHERE f.key = $key RETURN e.weight, e.z, o.key, o.label"
            " ORDER BY abs(e.z) DESC, o.key LIMIT 8",
            {"key": key},
        )
        yield Table.of(f"{title}: {key}", columns, found.rows)


def _heads(atlas: Atlas) -> Table:
    """For each layer's heads, the strongest pair of named features."""
    found = atlas.query(
        """
        MATCH (a:Feature)-[e:VIA_HEAD]->(b:Feature)
        WHERE a.label IS NOT NULL AND b.label IS NOT NULL AND e.rank_in <= 1
        RETURN e.layer, e.head, a.label, b.label, e.weight, e.z
        ORDER BY abs(e.z) DESC LIMIT 8
        """
    )
    rows = [(f"L{layer}.H{head}", *rest) for layer, head, *rest in found.rows]
    title = "strongest pairs through a head, by z, of those with both ends named"
    return Table.of(title, ("head", "from", "into", "weight", "z"), rows)
