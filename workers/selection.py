"""Which pairs a rule keeps (methods §2, "Selecting edges").

    absolute τ    size > τ                size = |V_ij| s_i r_j
    z             |V_ij| √d / (|ω_i||ρ_j|) > z
    top k, per    the k largest size of each group, ties by the smaller (source, target, reading, layer, head)

V_ij is the stored float32 weight. s_i = 1/|ω_i| and r_j = |ω_j| bring latents of free scale to unit writing
norm (1 for neurons, whose scale is the model's own, unless they are plain ReLUs); through a head |ω^h_i|
stands for |ω_i| in z, not in s_i. A group per target holds one reading of it: weights into a gate and into
what it gates do not compare. A weight of exactly zero is no edge.

The filter sees `x_ij = V_ij / (|ω_i||ρ_j|)`, the cosine of two vectors: `filter_bounds` states the rule so
that no pair it keeps is missed; `local_choice` then drops what no part of the rule can keep, `keeps`
evaluates the rule itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingest.rules import Absolute, All_, Any_, Everything, Rule, Top, Z
from workers.compiled import compiled
from workers.operands import RowBounds
from workers.pairs import Pairs, packed

__all__ = ["Norms", "conjunctions", "filter_bounds", "keeps", "local_choice", "ranks", "tops", "within_top"]

SLACK = 1e-6  # relative; covers the float32 rounding of a weight and the float64 rounding of norms


@dataclass(frozen=True)
class Norms:
    """Lengths and free scales of one side, float64 (N,): |ω| or |ρ|, and s or r."""

    length: np.ndarray
    scale: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """What a cosine is multiplied by, on this side, to become a size."""
        return self.length * self.scale


def tops(rule: Rule, over: str) -> list[Top]:
    """The rule's top-k leaves, in order and each once, by what their groups span.

    over: "target", groups within one target's pairs; "source"; "block"; or "all" of these.
    """
    match rule:
        case Any_(rules=rules) | All_(rules=rules):
            return list(dict.fromkeys(top for inner in rules for top in tops(inner, over)))
        case Top(per=per) if over in ("all", per if per in ("source", "block") else "target"):
            return [rule]
    return []


def conjunctions(rule: Rule) -> list[list[Rule]]:
    """The rule as "any of: all of these leaves"."""
    match rule:
        case Any_(rules=rules):
            return [leaves for inner in rules for leaves in conjunctions(inner)]
        case All_(rules=rules):
            product: list[list[Rule]] = [[]]
            for inner in rules:
                product = [left + right for left in product for right in conjunctions(inner)]
            return product
    return [[rule]]


def filter_bounds(
    rule: Rule, rows: Norms, width: int, heaps: np.ndarray, least: Sequence[float] = ()
) -> RowBounds:
    """Bounds on the cosine that no pair which the rule keeps falls short of.

    rows: of the targets; width: d; heaps: for the rule's top-k leaves per target (`RowBounds`); least: for
    those per block, a size that k pairs of the block have.
    """
    count = len(rows.length)
    never, always = np.full(count, np.inf), np.zeros(count)
    with np.errstate(divide="ignore"):
        per_weight = 1 / rows.weight

    def level(leaves: list[Rule]) -> tuple[float, float]:
        z = max((leaf.z for leaf in leaves if isinstance(leaf, Z)), default=0.0)
        tau = max((leaf.tau for leaf in leaves if isinstance(leaf, Absolute)), default=0.0)
        return z / np.sqrt(width) * (1 - SLACK), tau * (1 - SLACK)

    static = [leaves for leaves in conjunctions(rule) if not any(isinstance(leaf, Top) for leaf in leaves)]
    levels = [level(leaves) for leaves in static] + [(0.0, size * (1 - SLACK)) for size in least]
    if not levels:
        return RowBounds(never, never, False, heaps)
    if len(levels) == 1:
        floor, tau = levels[0]
        weighted = tau * per_weight if tau else always
        return RowBounds(np.full(count, floor), weighted, True, heaps)
    # Several: each is represented by one of its leaves, which only lets more through.
    by_z = [floor for floor, tau in levels if floor or not tau]
    by_size = [tau for floor, tau in levels if not floor and tau]
    return RowBounds(
        np.full(count, min(by_z, default=np.inf)),
        min(by_size) * per_weight if by_size else never,
        False,
        heaps,
    )


def _leaf_mask(leaf: Rule, pairs: Pairs) -> np.ndarray:
    match leaf:
        case Absolute(tau=tau):
            return pairs.size > tau
        case Z(z=z):
            return np.abs(pairs.z) > z
        case Everything():
            return np.ones(len(pairs), bool)
    raise TypeError(f"{leaf} is no leaf with a threshold")


@compiled()
def _ranks(group, groups, size):
    """1, 2 … within each group by falling size, ties in the order given: a counting sort, then group by
    group."""
    first = np.zeros(groups + 1, np.int64)
    for g in group:
        first[g + 1] += 1
    for g in range(groups):
        first[g + 1] += first[g]
    fill = first[:-1].copy()
    member = np.empty(group.shape[0], np.int64)
    for n in range(group.shape[0]):
        member[fill[group[n]]] = n
        fill[group[n]] += 1
    rank = np.empty(group.shape[0], np.int32)
    for g in range(groups):
        one = member[first[g] : first[g + 1]]
        for place, n in enumerate(np.argsort(-size[one], kind="mergesort")):
            rank[one[n]] = place + 1
    return rank


def ranks(size: np.ndarray, groups: tuple[np.ndarray, ...]) -> np.ndarray:
    """1, 2 … of each pair within its group, by falling size, ties in the order given (so: by identity)."""
    key = packed(groups)
    if key is None or (len(key) and key.max() > 4 * len(key) + (1 << 20)):
        parts = np.stack(groups, axis=1) if key is None else key
        key = np.unique(parts, axis=0, return_inverse=True)[1].reshape(-1)
    return _ranks(key, int(key.max()) + 1 if len(key) else 0, size.astype(np.float64))


def within_top(top: Top, pairs: Pairs, source_layer: np.ndarray) -> np.ndarray:
    """Mask of the pairs among the k largest of their group. source_layer: layer of each place in the
    source list."""
    row = (pairs.target_dictionary, pairs.target, pairs.reading)
    groups = {
        "target": row,
        "target×type": (*row, pairs.head >= 0),
        "target×source_layer": (*row, source_layer[pairs.source_dictionary]),
        "target×head": (*row, pairs.layer, pairs.head),
        "source": (pairs.source_dictionary, pairs.source),
        "block": (
            *(np.where(pairs.head < 0, at, -1) for at in (pairs.source_dictionary, pairs.target_dictionary)),
            pairs.layer,
            pairs.head,
        ),
    }[top.per]
    return (ranks(pairs.size, groups) <= top.k) & (pairs.size > 0)


def local_choice(rule: Rule, pairs: Pairs, source_layer: np.ndarray) -> np.ndarray:
    """Mask of the pairs that the rule may keep, judged among these alone; they are sorted by identity."""
    if isinstance(rule, Everything):
        return np.ones(len(pairs), bool)
    mask = np.zeros(len(pairs), bool)
    for leaves in conjunctions(rule):
        if not any(isinstance(leaf, Top) for leaf in leaves):
            mask |= np.logical_and.reduce([_leaf_mask(leaf, pairs) for leaf in leaves])
    for top in tops(rule, "all"):
        mask |= within_top(top, pairs, source_layer)
    return mask & (pairs.weight != 0)


def keeps(
    rule: Rule, pairs: Pairs, source_layer: np.ndarray, members: dict[Top, np.ndarray] | None = None
) -> np.ndarray:
    """Mask of the pairs that the rule keeps.

    pairs: of one target dictionary, every candidate among them. members: masks of the leaves per source and
    per block, which only someone who sees all targets can know.
    """
    match rule:
        case Any_(rules=rules):
            return np.logical_or.reduce([keeps(inner, pairs, source_layer, members) for inner in rules])
        case All_(rules=rules):
            return np.logical_and.reduce([keeps(inner, pairs, source_layer, members) for inner in rules])
        case Top() if members and rule in members:
            return members[rule]
        case Top():
            return within_top(rule, pairs, source_layer)
        case Everything():
            return np.ones(len(pairs), bool)
    return _leaf_mask(rule, pairs) & (pairs.weight != 0)
