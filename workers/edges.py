"""From candidate pairs to edges: the rule decides, ranks are given, tables are written.

    members   of one source dictionary: who is in the top k per source, which only someone who sees all
    targets knows select    of one target dictionary: the rule evaluated on every candidate; rank_in
    rank      of one source dictionary: rank_out; DIRECT.parquet, VIA_HEAD.parquet

rank_in and rank_out count within one type and reading, by |weight|, ties by (source, target, reading, layer,
head).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingest.rules import rule_from_data
from workers.pairs import READINGS, Pairs, PairWriter, read_pairs, write_members
from workers.selection import keeps, ranks, tops, within_top
from workers.sides import DictionaryEntry
from workers.steps import Context, Done, Step
from workers.tables import repeated, write_table

__all__ = ["members_step", "rank_step", "select_step"]


def _places(entries: list[dict[str, Any]]) -> dict[str, int]:
    return {entry["hash"]: place for place, entry in enumerate(entries)}


def _candidates(
    inputs: Mapping[str, Path], prefix: str, sources: dict[str, int], targets: dict[str, int]
) -> Pairs:
    """Of all inputs whose role begins so, by identity."""
    folders = [folder for role, folder in sorted(inputs.items()) if role.startswith(prefix)]
    return Pairs.joined(
        pairs for folder in folders for pairs in read_pairs(folder, sources, targets)
    ).sorted()


def members_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """Pairs of one source dictionary that are in a top k per source, one folder for each such leaf of the
    rule.

    params: rule, source, sources, targets (entries). inputs: the candidates, by roles that begin with
    `pairs`.
    """
    rule = rule_from_data(step.params["rule"])
    source = DictionaryEntry(**step.params["source"])
    targets = [DictionaryEntry(**entry) for entry in step.params["targets"]]
    pairs = _candidates(inputs, "pairs", {source.hash: 0}, _places(step.params["targets"]))
    for number, top in enumerate(tops(rule, "source")):
        chosen = pairs.where(within_top(top, pairs, np.zeros(1, int)))
        write_members(out / str(number), chosen, [source], targets)
    return Done()


def select_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """The kept pairs into one target dictionary, with rank_in.

    params: target, sources (all of them), groups: list of {rule, sources}. inputs: the candidates of group g
    by roles that begin with `g:pairs`, its members by `g:members`.
    """
    target = step.params["target"]["hash"]
    everyone = _places(step.params["sources"])
    kept = []
    for number, group in enumerate(step.params["groups"]):
        context.check_cancelled()
        rule, sources = rule_from_data(group["rule"]), _places(group["sources"])
        layers = np.array([entry["layer"] for entry in group["sources"]])
        pairs = _candidates(inputs, f"{number}:pairs", sources, {target: 0})
        members = {}
        for leaf, top in enumerate(tops(rule, "source")):
            members[top] = _among(pairs, inputs, f"{number}:members", str(leaf), sources, target)
        for leaf, top in enumerate(tops(rule, "block")):
            through = _among(pairs, inputs, f"{number}:pairs:heads", f"block{leaf}", sources, target)
            members[top] = np.where(pairs.head < 0, within_top(top, pairs, layers), through)
        pairs = pairs.where(keeps(rule, pairs, layers, members))
        there = np.array([everyone[entry["hash"]] for entry in group["sources"]], np.int32)
        kept.append(replace(pairs, source_dictionary=there[pairs.source_dictionary]))
    pairs = Pairs.joined(kept).sorted()
    size = np.abs(pairs.weight)
    pairs = replace(pairs, rank_in=ranks(size, (pairs.target, pairs.reading, pairs.head >= 0)))
    with PairWriter(out) as writer:
        for source, place in everyone.items():
            writer.write(source, target, pairs.where(pairs.source_dictionary == place))
    return Done({"kept": _counts(pairs, target, step.params["sources"])})


def _among(
    pairs: Pairs, inputs: Mapping[str, Path], prefix: str, folder: str, sources: dict[str, int], target: str
) -> np.ndarray:
    """Mask of the pairs that stand in a folder of members, in any of the inputs whose role begins so."""
    folders = [path / folder for role, path in sorted(inputs.items()) if role.startswith(prefix)]
    members = Pairs.joined(found for path in folders for found in read_pairs(path, sources, {target: 0}))
    both = Pairs.joined([members, pairs])
    order = np.lexsort((np.arange(len(both)) >= len(members), *both.identity[::-1]))
    same = np.zeros(len(both), bool)
    if len(both):
        same[1:] = np.all([key[order][1:] == key[order][:-1] for key in both.identity], axis=0)
    mask = np.zeros(len(both), bool)
    mask[order] = same
    return mask[len(members) :]


def _counts(pairs: Pairs, target: str, sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Edges and Σ|V| of each block: of a source dictionary (direct), of a head."""
    rows = []
    for layer, head, place in _blocks(pairs):
        block = (
            (pairs.layer == layer) & (pairs.head == head) & ((pairs.source_dictionary == place) | (head >= 0))
        )
        rows.append(
            {
                "source": sources[place]["hash"] if head < 0 else "",
                "target": target,
                "layer": layer,
                "head": head,
                "edges": int(block.sum()),
                "total": float(np.abs(pairs.weight[block]).sum(dtype=np.float64)),
            }
        )
    return rows


def _blocks(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    place = np.where(pairs.head < 0, pairs.source_dictionary, 0)
    for layer, head, where in np.unique(np.stack([pairs.layer, pairs.head, place], axis=1), axis=0):
        yield int(layer), int(head), int(where)


def rank_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """DIRECT.parquet and VIA_HEAD.parquet of one source dictionary.

    params: model (hash), source, targets (entries). inputs: the kept pairs, by roles that begin with
    `selected`.
    """
    source, targets = step.params["source"]["hash"], _places(step.params["targets"])
    pairs = _candidates(inputs, "selected", {source: 0}, targets)
    through = pairs.head >= 0
    groups = (pairs.source, pairs.reading, through)
    rank_out = ranks(np.abs(pairs.weight), groups)
    hashes = pa.array(list(targets))
    figures = {}
    for table, mask in (("DIRECT", ~through), ("VIA_HEAD", through)):
        part, n = pairs.where(mask), int(mask.sum())
        columns = {
            "source_dictionary": repeated(source, n),
            "source": part.source.astype(np.int64),
            "target_dictionary": pa.DictionaryArray.from_arrays(pa.array(part.target_dictionary), hashes),
            "target": part.target.astype(np.int64),
            "reading": pa.DictionaryArray.from_arrays(
                pa.array(part.reading.astype(np.int32)), list(READINGS)
            ),
            "weight": part.weight,
            "z": part.z.astype(np.float32),
            "rank_in": part.rank_in,
            "rank_out": rank_out[mask],
            "model": repeated(step.params["model"], n),
            "layer": part.layer.astype(np.int32),
            "head": part.head.astype(np.int32),
        }
        write_table(out, table, [pa.table(columns)])
        figures[table] = n
    return Done(figures)
