"""What a build would take, from configuration and headers alone: no weight is read, no model is opened.

Pairs are counted exactly, by the order of writes and reads. Edges follow a stated rule for each selection:

    everything      every pair
    z > x           as many of the pairs as passed x on SmolLM2-135M's own neurons (TAIL, measured); random
                    directions would give far fewer, a trained dictionary may give more
    |V| > τ         not to be known from headers: taken as SHARE of the pairs
    top k           k for each group that the rule names, and no more than there are pairs
    any             the sum, at most all pairs
    all             the geometric mean of the least and of what independent rules would keep together

Time is operations over the rate of a matrix product measured on this machine, times what the steps were
measured to take beyond the bare product.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from atlas.answers import Answer, Table
from ingest.rules import Absolute, All_, Any_, Everything, Rule, Top, Z
from ingest.spec import Spec

if TYPE_CHECKING:
    from ingest.dictionaries import Layers, Layout
    from ingest.models import Facts
    from ingest.models.reach import Standing

__all__ = ["bf16_instructions", "estimate", "matrix_product_rate"]

TAIL: dict[str, dict[float, float]] = {
    "DIRECT": {2: 4.6e-2, 3: 3.8e-3, 4: 3.9e-4, 5: 1.2e-4, 6: 5.5e-5, 8: 1.6e-5, 10: 5.7e-6, 15: 2.3e-7},
    "VIA_HEAD": {2: 4.9e-2, 3: 5.2e-3, 4: 7.0e-4, 5: 1.8e-4, 6: 6.3e-5, 8: 1.1e-5, 10: 2.7e-6, 15: 1.7e-7},
}  # z -> share of the pairs beyond it; from 8 on counted over the whole model, below on samples of blocks
SHARE = 1e-4
BYTES = {"artifacts": 105, "database": 50, "arrays": 34}  # of an edge, measured on the demo's atlas
OVERHEAD = {"DIRECT": 1.2, "VIA_HEAD": 1.7, "EMBEDS": 1.2, "PROMOTES": 1.2}
OVERHEAD_BF16 = {"DIRECT": 0.7, "VIA_HEAD": 1.0, "EMBEDS": 0.7, "PROMOTES": 0.7}
"""Time over the bare float32 product's, where the processor multiplies bf16 and where it does not."""
LOAD_RATE = 2e5  # edges a second
LOAD_BYTES = 280  # of memory for an edge of the largest type, while it is copied into the database
STEP_BYTES = 512 << 20  # a step's tiles and candidates, beyond what is counted


@dataclass(frozen=True)
class _Block:
    """A dictionary as its headers tell."""

    set: str
    layer: int
    size: int
    readings: int
    standing: Standing


@dataclass
class _Kind:
    """What is counted for one type of edge."""

    pairs: int = 0
    edges: float = 0.0
    operations: float = 0.0


def estimate(spec: Spec, *, workers: int | None = None, rate: float | None = None) -> Answer:
    """Features, pairs, edges, bytes, memory and time of the spec's build.

    workers: threads; default, the number of cores. rate: multiplications and additions a second of one
    thread; default, measured now (a second). Raises InputError for what is wrong with the spec's models and
    sets.
    """
    import os

    from ingest.dictionaries import describe_set
    from ingest.models import describe_model
    from ingest.models.reach import check_weights, pair_notes

    workers = workers or len(os.sched_getaffinity(0))
    rate = rate or matrix_product_rate()
    facts = {name: describe_model(entry.where) for name, entry in spec.models.items()}
    layouts = {
        name: describe_set(
            entry.where,
            facts[entry.model],
            format=entry.format,
            layers=cast("Layers", entry.layers),
            declared=entry.declared,
        )
        for name, entry in spec.dictionaries.items()
    }
    kinds = {type: _Kind() for type in ("DIRECT", "VIA_HEAD", "EMBEDS", "PROMOTES")}
    sets: list[tuple[str, str, int, int]] = []
    memory = 0.0
    for model, own in facts.items():
        blocks: list[_Block] = []
        for name in spec.sets_of(model):
            check_weights(own, name, layouts[name])
            found = list(_blocks(name, layouts[name], own))
            sets.append((model, name, len(found), sum(block.size for block in found)))
            blocks += found
        _count_edges(spec, own, blocks, kinds)
        _count_tokens(spec, own, blocks, kinds)
        memory = max(memory, _memory(own, blocks, layouts, workers))
    edges = sum(round(kind.edges) for kind in kinds.values())
    most = max(round(kind.edges) for kind in kinds.values())
    overhead = OVERHEAD_BF16 if bf16_instructions() else OVERHEAD
    computing = sum(overhead[type] * kind.operations for type, kind in kinds.items()) / (rate * workers)
    loading = edges / LOAD_RATE
    rows = [
        (type, kind.pairs, round(kind.edges), *(round(kind.edges) * BYTES[place] for place in BYTES))
        for type, kind in kinds.items()
    ]
    facts_shown = {
        "features": sum(row[3] for row in sets),
        "edges": edges,
        "disk_bytes": edges * sum(BYTES.values()),
        "memory_bytes": round(max(memory, most * LOAD_BYTES)),
        "computing_seconds": computing,
        "loading_seconds": loading,
        "threads": workers,
        "operations": float(sum(kind.operations for kind in kinds.values())),
        "operations_per_second_of_a_thread": float(rate),
    }
    columns = ("type", "pairs", "edges", "artifacts_bytes", "database_bytes", "arrays_bytes")
    tables = {
        "sets": Table.of("dictionary sets", ("model", "set", "dictionaries", "features"), sets),
        "edges_by_type": Table.of("pairs and edges", columns, rows),
    }
    notes = [note for name, layout in layouts.items() for note in pair_notes(name, layout)]
    return Answer("estimate, from headers", facts_shown, tables, (_rules_note(spec), *notes))


def _rules_note(spec: Spec) -> str:
    said = [
        "Pairs are exact. Edges by rule: z as on SmolLM2-135M's neurons; top k by its number of groups; |V| >"
        f" τ as {SHARE:g} of the pairs; any as the sum; all between the least and independent rules.",
        "Time: operations over this machine's matrix product, and what the steps take beyond it; opening the"
        " models comes on top.",
    ]
    if any(_has_absolute(request.keep) for request in spec.edges):
        said.append("An absolute threshold cannot be judged from headers: its edges are a guess.")
    return " ".join(said)


def _has_absolute(rule: Rule) -> bool:
    if isinstance(rule, Any_ | All_):
        return any(map(_has_absolute, rule.rules))
    return isinstance(rule, Absolute)


def _blocks(name: str, layout: Layout, facts: Facts) -> Iterator[_Block]:
    from ingest.models.reach import Standing

    for layer, size in layout.sizes.items():
        standing = Standing.of(facts, name, layout, layer)
        yield _Block(name, layer, size, len(layout.readings), standing)


def _count_edges(spec: Spec, facts: Facts, blocks: list[_Block], kinds: Mapping[str, _Kind]) -> None:
    """Pairs of each target with all sources that are decided together, and what their rule keeps of them."""
    from ingest.models.reach import head_layers, sources_of

    by_standing = {block.standing: block for block in blocks}
    for target in blocks:
        groups: dict[tuple[Rule, str], dict[str, list[_Block]]] = {}
        for source in (by_standing[one] for one in sources_of(target.standing, list(by_standing))):
            for type in ("DIRECT", "VIA_HEAD") if target.standing.reads_stream else ("VIA_HEAD",):
                rule = spec.rule(type, source.set, target.set)
                if rule is not None:
                    apart = source.set if source.standing.redescribes else ""
                    groups.setdefault((rule, apart), {}).setdefault(type, []).append(source)
        rows = target.size * target.readings
        for (rule, _), sources in groups.items():
            heads = {
                source: len(head_layers(facts, source.standing, target.standing)) * facts.n_heads
                for source in sources.get("VIA_HEAD", ())
            }
            pairs = {
                "DIRECT": rows * sum(source.size for source in sources.get("DIRECT", ())),
                "VIA_HEAD": rows * sum(source.size * count for source, count in heads.items()),
            }
            kept = _kept(rule, pairs, rows, sources, heads, facts.n_heads)
            for type, count in pairs.items():
                kinds[type].pairs += count
                kinds[type].edges += min(kept[type], count)
            kinds["DIRECT"].operations += 2.0 * pairs["DIRECT"] * facts.d_model
            kinds["VIA_HEAD"].operations += 2.0 * pairs["VIA_HEAD"] * facts.d_head


def _kept(
    rule: Rule,
    pairs: Mapping[str, int],
    rows: int,
    sources: Mapping[str, list[_Block]],
    heads: Mapping[_Block, int],
    in_layer: int,
) -> dict[str, float]:
    """Edges that a rule keeps of these pairs into one dictionary. rows: its features times readings;
    in_layer: heads of a layer."""
    every = sum(pairs.values())
    match rule:
        case Everything():
            return {type: float(count) for type, count in pairs.items()}
        case Z(z=z):
            return {type: count * tail(type, z) for type, count in pairs.items()}
        case Absolute():
            return {type: count * SHARE for type, count in pairs.items()}
        case Top(k=k, per=per):
            if per == "target×type":
                return {type: min(k * rows, count) for type, count in pairs.items()}
            if per == "block":  # every head's k spread over the targets comes to a layer's heads for each
                blocks = {"DIRECT": len(sources.get("DIRECT", ())), "VIA_HEAD": in_layer}
                return {type: float(min(k * blocks[type], count)) for type, count in pairs.items()}
            groups = {
                "target": rows,
                "target×source_layer": rows * len({s.layer for own in sources.values() for s in own}),
                "target×head": rows * (1 + max(heads.values(), default=0)),
                "source": sum(source.size for source in {s for own in sources.values() for s in own}),
            }[per]
            total = min(groups * k, every)
            return {type: total * count / every if every else 0.0 for type, count in pairs.items()}
        case Any_(rules=rules):
            parts = [_kept(inner, pairs, rows, sources, heads, in_layer) for inner in rules]
            return {type: min(sum(part[type] for part in parts), count) for type, count in pairs.items()}
        case All_(rules=rules):
            parts = [_kept(inner, pairs, rows, sources, heads, in_layer) for inner in rules]
            return {type: _all_of([part[type] for part in parts], count) for type, count in pairs.items()}


def _all_of(kept: list[float], pairs: int) -> float:
    """Between rules that agree (the least) and rules that know nothing of each other: the geometric mean."""
    independent = pairs * math.prod(part / pairs for part in kept) if pairs else 0.0
    return math.sqrt(min(kept) * independent)


def tail(type: str, z: float) -> float:
    """The share of pairs beyond z on SmolLM2's neurons: logarithms on straight lines between the points.

    Beyond the last point the last line goes on.
    """
    points = [(0.0, 1.0), *sorted(TAIL[type].items())]
    (a, p), (b, q) = next(
        ((low, high) for low, high in itertools.pairwise(points) if z <= high[0]), (points[-2], points[-1])
    )
    return math.exp(math.log(p) + math.log(q / p) * (z - a) / (b - a))


def _count_tokens(spec: Spec, facts: Facts, blocks: list[_Block], kinds: Mapping[str, _Kind]) -> None:
    for block in blocks:
        for type, readings in (("EMBEDS", block.readings), ("PROMOTES", 1)):
            top = spec.top(type, block.set)
            rows = block.size * readings
            if top and (type == "PROMOTES" or block.standing.reads_stream):
                kinds[type].pairs += rows * facts.d_vocab
                kinds[type].edges += rows * min(2 * top, facts.d_vocab)
                kinds[type].operations += 2.0 * rows * facts.d_vocab * facts.d_model


def _memory(facts: Facts, blocks: list[_Block], layouts: Mapping[str, Layout], workers: int) -> float:
    """Peak while computing: the model in float32; for each thread a step's vectors and its dictionaries."""
    mlp = (3 if facts.gated else 2) * facts.d_model * facts.d_mlp
    attention = 2 * facts.d_model * facts.d_head * (facts.n_heads + facts.n_kv_heads)
    model = 4 * (facts.n_layers * (mlp + attention) + 2 * facts.d_vocab * facts.d_model)
    largest = max((bytes for layout in layouts.values() for bytes in layout.bytes.values()), default=0)
    below = sum(block.size for block in blocks)
    together = max(1, min(facts.n_heads, STEP_BYTES // max(1, below * facts.d_head * 10)))
    heads = 12 * below * facts.d_head * together
    return model + workers * (2 * largest + heads + STEP_BYTES)


def bf16_instructions() -> list[str]:
    """The instructions by which the processor multiplies bf16 natively, as the kernel names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]


def matrix_product_rate(seconds: float = 0.6, size: int = 1024) -> float:
    """Multiplications and additions a second of a float32 matrix product, for one thread, measured now."""
    import os

    import numpy as np

    a = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    best, begin = math.inf, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best / len(os.sched_getaffinity(0))
