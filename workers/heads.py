"""The weight graph through attention heads (methods §2; Transcoders, §3.2).

    V^h_ij = ((ω_i C ⊙ γ1) W_V[kv(h)] W_O[h]) · ρ_j      i written before layer L's attention, j read after it

OV is never formed. With W_O = R Q, Q (d_head, d) of orthonormal rows, what the head writes for i is a_i Q,

    a_i = (ω_i C ⊙ γ1) W_V R   (d_head,)     |a_i| = |ω^h_i|, the right norm for z
    b_j = Q ρ_j                (d_head,)     V^h_ij = a_i · b_j,  |b_j| ≤ |ρ_j|

so that the filter works in d_head dimensions with the tightest norm bound, and a target the head cannot reach
strongly is skipped at once.

A target that reads not the stream but attention's output at its module, before what stands behind attention,
or the heads' outputs z side by side, is reached by the heads of its own layer with another W_O: the module's,
or the one that puts a head's output at its place in z. ρ_j is the encoder's row there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ingest.models import ResidualModel
from ingest.rules import Rule, rule_from_data
from workers.exact import dots, rounded_head_products, summation_error
from workers.operands import Candidates, Operand
from workers.pairs import Pairs, PairWriter, write_members
from workers.products import z_scores
from workers.search import Search
from workers.selection import Norms, local_choice, tops, within_top
from workers.sides import DictionaryEntry, Readers, divided, lengths
from workers.steps import Context, Done, Step
from workers.survey import SOURCES_THROUGH_HEAD, Survey, chosen, rotation
from workers.vectors import Vectors

__all__ = ["Head", "Stacked", "ThroughHead", "heads_step"]


@dataclass(frozen=True)
class Head:
    """One head's factors, float64.

    w_v (d, d_head), w_o (d_head, d) as it joins the stream; r (d_head, d_head) and q (d, d_head) with
    w_o = r qᵀ up to `residue`, a bound on the Frobenius norm of what is left.
    """

    layer: int
    number: int
    w_v: np.ndarray
    w_o: np.ndarray
    r: np.ndarray
    q: np.ndarray
    residue: float

    @classmethod
    def of(cls, model: ResidualModel, layer: int, number: int, output: str = "stream") -> Head:
        """The head of a model, with what it gives the stream, its module's output ("module") or "z"."""
        w_v = model.W_V(layer)[model.kv(number)].double().numpy()
        w_o = np.ascontiguousarray(_output(model, layer, number, output).numpy())
        q, upper = (factor.numpy() for factor in torch.linalg.qr(torch.from_numpy(w_o.T)))
        r = np.ascontiguousarray(upper.T)
        rounding = summation_error(len(w_o) + 2) * np.linalg.norm(r) * np.linalg.norm(q)
        return cls(layer, number, w_v, w_o, r, q, float(np.linalg.norm(w_o - r @ q.T) + rounding))


def _output(model: ResidualModel, layer: int, number: int, output: str) -> torch.Tensor:
    """(d_head, width) float64."""
    if output == "stream":
        return model.W_O(layer)[number]
    if output == "module":
        return model.layers[layer].W_O[number].double()
    d_head = model.facts.d_head
    places = torch.zeros(d_head, model.facts.n_heads * d_head, dtype=torch.float64)
    places[:, number * d_head : (number + 1) * d_head] = torch.eye(d_head)
    return places


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, in this thread alone."""
    return (torch.from_numpy(a) @ torch.from_numpy(np.ascontiguousarray(b))).numpy()


@dataclass(frozen=True)
class Stacked:
    """The sources of a step, one below the other.

    input_length (N,): |s|, s = ω C ⊙ γ1; first: where each dictionary of the list begins; scale: free scales.
    """

    entries: list[DictionaryEntry]
    first: np.ndarray
    input_length: np.ndarray
    scale: np.ndarray
    values: dict[int, np.ndarray]  # kv head -> (ω C ⊙ γ1) W_V (N, d_head)
    input_row: Callable[[int], np.ndarray]  # i -> s_i (d,)

    @classmethod
    def of(cls, vectors: Vectors, entries: list[DictionaryEntry], layer: int, heads: list[int]) -> Stacked:
        """Reads the sources of a layer's heads."""
        model = vectors.model
        w_v = {kv: model.W_V(layer)[kv].double().numpy() for kv in sorted({model.kv(head) for head in heads})}
        parts: dict[int, list[np.ndarray]] = {kv: [] for kv in w_v}
        size, input_length, scale = [0], [], []
        cut = model.cut("attn.in", layer)
        for entry in entries:
            writers = vectors.writers(entry, cut)
            s = model.attention_input(layer, torch.from_numpy(writers.omega)).numpy()
            input_length.append(lengths(s))
            scale.append(writers.norms.scale)
            size.append(len(s))
            for kv, factor in w_v.items():
                parts[kv].append(_product(s, factor))
        values = {kv: np.concatenate(found) for kv, found in parts.items()}
        first = np.cumsum(size)

        def input_row(i: int) -> np.ndarray:
            place = int(np.searchsorted(first, i, side="right")) - 1
            omega = vectors.writers(entries[place], cut).omega[i - first[place]]
            return model.attention_input(layer, torch.from_numpy(omega[None])).numpy()[0]

        return cls(entries, first, np.concatenate(input_length), np.concatenate(scale), values, input_row)

    def places(self, column: np.ndarray) -> np.ndarray:
        """The dictionary, as a place in the list, of each stacked source."""
        return np.searchsorted(self.first, column, side="right").astype(np.int32) - 1


class ThroughHead:
    """The stacked sources as one head passes them on."""

    def __init__(self, head: Head, kv: int, stacked: Stacked) -> None:
        self.head, self.stacked = head, stacked
        value = stacked.values[kv]
        self.a = _product(value, head.r)  # (N, d_head)
        self.norms = Norms(lengths(self.a), stacked.scale)
        width, d_head = head.w_v.shape
        width = max(width, head.w_o.shape[1])
        long, short = summation_error(width + 8), summation_error(d_head + 8)
        size, r_norm = lengths(value), float(np.linalg.norm(head.r))
        # How far a · b may be off the exact product, by what it is multiplied with (see `workers.exact`):
        self.error_of_value = long * stacked.input_length * float(np.linalg.norm(head.w_v))  # |r b|
        self.error_of_b = self.norms.length * long * np.sqrt(d_head) * 1.01 + size * head.residue  # |ρ|
        self.error_of_a = short * (size * r_norm * 1.01 + self.norms.length)  # |b|
        self._beyond = 1e-12 * r_norm  # of |ρ|, on |r b|: b itself is rounded

    def error(
        self, row: np.ndarray, column: np.ndarray, b: np.ndarray, read_length: np.ndarray
    ) -> np.ndarray:
        """A bound on |fl(a · b) - V| of each pair, first-order terms and a quarter. b (R, d_head)."""
        through = lengths(_product(b, self.head.r.T)) + self._beyond * read_length
        return 1.25 * (
            self.error_of_value[column] * through[row]
            + self.error_of_b[column] * read_length[row]
            + self.error_of_a[column] * lengths(b)[row]
        )

    def operand(self, device: str) -> Operand:
        """For the filter."""
        return Operand(self.a, self.norms.length, self.norms.weight, device)

    def pairs(self, found: Candidates, b: np.ndarray, readers: Readers) -> Pairs:
        """The candidates (row = reader, column = stacked source) with their exact weights. b: ρ Q
        (R, d_head)."""
        head, row, column = self.head, found.row, found.column
        place = self.stacked.places(column)
        number = column - self.stacked.first[place].astype(np.int32)

        value = dots(self.a, b, column, row)
        error = self.error(row, column, b, readers.norms.length)
        weight = rounded_head_products(
            self.stacked.input_row, head.w_v, head.w_o, readers.rho, column, row, value, error
        )
        n, width = len(row), readers.rho.shape[1]
        return Pairs(
            source_dictionary=place,
            source=number,
            target_dictionary=np.zeros(n, np.int32),
            target=readers.target[row],
            reading=readers.reading[row],
            layer=np.full(n, head.layer, np.int16),
            head=np.full(n, head.number, np.int16),
            weight=weight,
            z=z_scores(weight, self.norms.length[column], readers.norms.length[row], width),
            size=np.abs(weight.astype(np.float64)) * self.stacked.scale[column] * readers.norms.scale[row],
            rank_in=np.zeros(n, np.int32),
        )


def heads_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """All VIA_HEAD pairs of some heads of one layer that their rule may keep, and a survey of all of them.

    params: rule, layer, heads, sources, targets (entries, in the order that ties follow), seed; output, where
    the targets read no stream; apart, where the source is no part of what others write. inputs: model,
    dictionaries.
    """
    rule = rule_from_data(step.params["rule"])
    vectors = Vectors(step, inputs, context)
    layer, numbers = step.params["layer"], step.params["heads"]
    sources = [DictionaryEntry(**entry) for entry in step.params["sources"]]
    targets = [DictionaryEntry(**entry) for entry in step.params["targets"]]
    layers = np.array([source.layer for source in sources])
    model = vectors.model
    stacked = Stacked.of(vectors, sources, layer, numbers)
    output = step.params.get("output", "stream")
    through = [ThroughHead(Head.of(model, layer, h, output), model.kv(h), stacked) for h in numbers]
    operands = [each.operand(context.device) for each in through]
    q = np.concatenate([each.head.q for each in through], axis=1)  # (d, heads × d_head)
    sample = chosen(step.params["seed"], len(stacked.scale), SOURCES_THROUGH_HEAD)
    turned = [_turned(each, sample, step.params["seed"], vectors) for each in through]
    survey = Survey(step.params["seed"])
    surveyed = sources[0].hash if step.params.get("apart") else ""  # "": all that is written below
    shared: dict[Hashable, np.ndarray] = {}
    strongest = {top: Pairs.empty() for top in tops(rule, "block")}
    with PairWriter(out) as writer:
        for done, target in enumerate(targets):
            context.progress(done, len(targets), "dictionaries")
            readers = vectors.readers(target)
            b = _product(readers.rho, q).reshape(len(readers.rho), len(numbers), -1)
            search = Search(rule, readers.norms, readers.rho.shape[1], shared)
            blocks: list[tuple[int, int]] = []
            for place, number in enumerate(numbers):
                context.check_cancelled()
                rows = Operand(b[:, place], readers.norms.length, readers.norms.weight, context.device)
                for first, last, source_layer in _blocks(rule, stacked, layers):
                    search.read(
                        rows,
                        operands[place].part(first, last),
                        layer=source_layer,
                        head=(layer, number),
                    )
                    blocks.append((place, first))
            parts = []
            for (place, first), found in zip(blocks, search.finish(), strict=True):
                moved = Candidates(found.row, found.column + np.int32(first), found.score)
                parts.append(through[place].pairs(moved, np.ascontiguousarray(b[:, place]), readers))
            for place, each in enumerate(through):
                length = each.norms.length[sample]
                survey.add(
                    {"source": surveyed, "target": target.hash, "layer": layer, "head": numbers[place]},
                    len(stacked.scale),
                    (divided(each.a[sample], length), length),
                    turned[place],
                    divided(b[:, place], readers.norms.length),
                    readers.norms.length,
                    stacked.scale[sample],
                    readers.norms.scale,
                    rule,
                    search.least(layer=-1, head=(layer, numbers[place])),
                    readers.rho.shape[1],
                )
            pairs = Pairs.joined(parts).sorted()
            pairs = pairs.where(local_choice(rule, pairs, layers))
            for place, source in enumerate(sources):
                writer.write(source.hash, target.hash, pairs.where(pairs.source_dictionary == place))
            for top, known in strongest.items():
                here = replace(pairs, target_dictionary=np.full(len(pairs), done, np.int32))
                both = Pairs.joined([known, here]).sorted()
                strongest[top] = both.where(within_top(top, both, layers))
    for number, members in enumerate(strongest.values()):
        write_members(out / f"block{number}", members, sources, targets)
    return Done({"survey": survey.rows})


def _blocks(rule: Rule, stacked: Stacked, layers: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, last, layer) of the sources searched together: all, or a layer each where layers compete
    alone."""
    if not any(top.per == "target×source_layer" for top in tops(rule, "target")):
        return [(0, int(stacked.first[-1]), -1)]
    edges = [0, *(n for n in range(1, len(layers)) if layers[n] != layers[n - 1]), len(layers)]
    return [
        (int(stacked.first[low]), int(stacked.first[high]), int(layers[low])) for low, high in pairwise(edges)
    ]


def _turned(
    through: ThroughHead, sample: np.ndarray, seed: int, vectors: Vectors
) -> tuple[np.ndarray, np.ndarray]:
    """What the head passes on of rotated writing vectors: (unit vectors (S, d_head), lengths (S,))."""
    model, head, stacked = vectors.model, through.head, through.stacked
    places = stacked.places(sample)
    cut = model.cut("attn.in", head.layer)
    omega = np.array([
        vectors.writers(stacked.entries[place], cut).omega[i - stacked.first[place]]
        for place, i in zip(places, sample, strict=True)
    ])  # fmt: skip
    s = model.attention_input(head.layer, torch.from_numpy(omega @ rotation(omega.shape[1], seed))).numpy()
    a = s @ head.w_v @ head.r
    return divided(a, lengths(a)), lengths(a)
