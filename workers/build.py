"""The plan of a weight graph: which steps make the atlas that a spec asks for.

    nodes          a model, each set, each dictionary
    direct         into one dictionary, from everything written below
    heads          some heads of one layer, from everything below to everything above
    members        per source dictionary, only where a rule counts per source
    select, rank   per target, per source dictionary: the tables DIRECT and VIA_HEAD
    embeds, promotes

Steps are named by what they compute from (hashes of model and dictionaries), so two specs that share a model
share its results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ingest.dictionaries import DictionarySet
from ingest.models import ResidualModel
from ingest.rules import Rule, rule_to_data
from ingest.spec import Spec
from workers.edges import members_step, rank_step, select_step
from workers.heads import heads_step
from workers.local import SharedValues
from workers.nodes import dictionary_step, model_step, set_step
from workers.selection import tops
from workers.sides import DictionaryEntry
from workers.steps import Needs, Registry, Step
from workers.tokens import embeds_step, promotes_step
from workers.weights import direct_step

__all__ = ["REGISTRY", "BuildPlan", "plan"]

REGISTRY: Registry = {
    "model": (1, model_step),
    "set": (1, set_step),
    "dictionary": (1, dictionary_step),
    "direct": (3, direct_step),
    "heads": (3, heads_step),
    "members": (1, members_step),
    "select": (3, select_step),
    "rank": (1, rank_step),
    "embeds": (1, embeds_step),
    "promotes": (1, promotes_step),
}
"""What a worker must know to run these steps."""

HEADS_MEMORY = 256 << 20  # bytes of head-space vectors in one step
RATE = 2e11  # multiplications and additions a second that `Needs.seconds` assumes; only ratios matter


@dataclass(frozen=True)
class BuildPlan:
    """Steps, what they may ask for, and where their sources are."""

    steps: tuple[Step, ...]
    sources: Mapping[str, Path]
    models: Mapping[str, ResidualModel]
    registry: Registry

    def share(self, values: SharedValues) -> None:
        """Hands the opened models to the steps of this process, which would open them again."""
        for model in self.models.values():
            values.get(("model", model.hash), partial(_same, model), 0)


def _same(model: ResidualModel) -> ResidualModel:
    return model


@dataclass(frozen=True)
class Block:
    """One dictionary of one set, with what the plan must know of it."""

    entry: DictionaryEntry
    set: str
    key: str
    size: int
    readings: int
    event: int
    cut: int
    activation: str


def plan(spec: Spec, models: Mapping[str, ResidualModel], sets: Mapping[str, DictionarySet]) -> BuildPlan:
    """The steps that make the spec's atlas. models, sets: opened, by their names in the spec."""
    steps: list[Step] = []
    sources: dict[str, Path] = {}
    for name, model in models.items():
        graph = ModelPlan(spec, model, {set_name: sets[set_name] for set_name in spec.sets_of(name)})
        sources |= graph.sources
        steps += graph.steps(name)
    unique = {step.name: step for step in steps}
    return BuildPlan(tuple(unique.values()), sources, models, REGISTRY)


class ModelPlan:
    """The steps of one model's sets."""

    def __init__(self, spec: Spec, model: ResidualModel, sets: Mapping[str, DictionarySet]) -> None:
        self.spec, self.model, self.sets = spec, model, sets
        self.blocks = [block for name, found in sets.items() for block in self._blocks(name, found)]
        self.sources: dict[str, Path] = {f"model:{model.hash}": Path(model.source)}
        self.texts = hashlib.sha256(json.dumps(model.token_texts()).encode()).hexdigest()
        if model.tokenizer:
            self.sources[f"texts:{self.texts}"] = model.tokenizer
        for block in self.blocks:
            source = sets[block.set].source
            if source is not None:
                self.sources[block.entry.source] = Path(source)

    def _blocks(self, name: str, found: DictionarySet) -> Iterator[Block]:
        layout = found.layout
        for layer in found.layers:
            yield Block(
                DictionaryEntry.of(found.hash_of(layer), found.format, layer, found.declared),
                name,
                found.key(layer),
                found.sizes[layer],
                len(layout.readings),
                max(self.model.event(site, written) for written, site, _ in layout.writes[layer]),
                self.model.cut(layout.read.site, layer),
                layout.activation,
            )

    def _step(self, kind: str, params: Mapping[str, Any], blocks: list[Block], title: str, *, flops: float =
    0,
              memory: int = 0, inputs: Mapping[str, str] | None = None) -> Step:  # fmt: skip
        """A step that reads the model and these dictionaries."""
        named = {"model": f"model:{self.model.hash}"}
        named |= {
            block.entry.source: block.entry.source for block in blocks if block.entry.source in self.sources
        }
        needs = Needs(memory=memory, seconds=0.2 + flops / RATE)
        return Step(kind, REGISTRY[kind][0], params, named | dict(inputs or {}), needs, title)

    def steps(self, name: str) -> Iterator[Step]:
        """All steps, in the order in which they should begin."""
        tokenizer = {"tokenizer": f"texts:{self.texts}"} if self.model.tokenizer else {}
        params: dict[str, Any] = {"name": name, "texts": self.texts}
        yield self._step("model", params, [], f"{name}: tokens and heads", inputs=tokenizer)
        for set_name, found in self.sets.items():
            row = {
                "name": set_name,
                "alias": found.alias,
                "kind": found.kind,
                "format": found.format,
                "hash": found.hash,
            }
            params = row | {"model": self.model.hash, "provenance": dict(found.layout.provenance)}
            yield Step("set", REGISTRY["set"][0], params, title=f"{set_name}: the set")
        for block in self.blocks:
            params = {
                "entry": block.entry.as_json(),
                "set": block.set,
                "key": block.key,
                "activation": block.activation,
            }
            yield self._step("dictionary", params, [block], f"{block.key}: features")
        yield from self._tokens()
        yield from self._edges()

    def _tokens(self) -> Iterator[Step]:
        facts = self.model.facts
        for block in self.blocks:
            flops = 2.0 * block.size * facts.d_vocab * facts.d_model
            for type_, role, rows in (("EMBEDS", "target", block.readings), ("PROMOTES", "source", 1)):
                if top := self.spec.top(type_, block.set):
                    params = {role: block.entry.as_json(), "top": top}
                    title = f"{block.key}: {type_}"
                    yield self._step(
                        type_.lower(), params, [block], title, flops=flops * rows, memory=256 << 20
                    )

    def _edges(self) -> Iterator[Step]:
        selected: list[tuple[Block, list[Block], Step]] = []
        candidates: dict[tuple[Rule, tuple[str, ...], tuple[str, ...]], CandidateSteps] = {}
        for target in self.blocks:
            groups = []
            inputs: dict[str, str] = {}
            for rule, types in self._groups(target.set).items():
                from_sets = list(dict.fromkeys(set_name for sets in types.values() for set_name in sets))
                sources = [
                    block for block in self.blocks if block.set in from_sets and block.event < target.cut
                ]
                key = (rule, tuple(types.get("DIRECT", ())), tuple(types.get("VIA_HEAD", ())))
                if key not in candidates:
                    to = [block for block in self.blocks if self._groups(block.set).get(rule) == types]
                    candidates[key] = CandidateSteps(self, rule, types, to)
                    yield from candidates[key].steps
                if not sources:
                    continue
                groups.append(
                    {"rule": rule_to_data(rule), "sources": [block.entry.as_json() for block in sources]}
                )
                place = len(groups) - 1
                for role, step in candidates[key].into(target):
                    inputs[f"{place}:{role}"] = step.name
            if groups:
                everyone = [
                    block
                    for block in self.blocks
                    if any(block.entry.as_json() in group["sources"] for group in groups)
                ]
                params = {
                    "target": target.entry.as_json(),
                    "sources": [block.entry.as_json() for block in everyone],
                    "groups": groups,
                }
                step = Step(
                    "select",
                    REGISTRY["select"][0],
                    params,
                    inputs,
                    Needs(seconds=0.5),
                    f"{target.key}: selection",
                )
                selected.append((target, everyone, step))
        yield from (step for _, _, step in selected)
        for block in self.blocks:
            into = [(target, step) for target, everyone, step in selected if block in everyone]
            if into:
                params = {
                    "model": self.model.hash,
                    "source": block.entry.as_json(),
                    "targets": [target.entry.as_json() for target, _ in into],
                }
                inputs = {f"selected:{number:05d}": step.name for number, (_, step) in enumerate(into)}
                yield Step(
                    "rank", REGISTRY["rank"][0], params, inputs, Needs(seconds=0.5), f"{block.key}: edges out"
                )

    def _groups(self, target: str) -> dict[Rule, dict[str, tuple[str, ...]]]:
        """Which sets' edges into a set are decided together: rule -> type -> source sets."""
        groups: dict[Rule, dict[str, tuple[str, ...]]] = {}
        for type_ in ("DIRECT", "VIA_HEAD"):
            for source in self.sets:
                rule = self.spec.rule(type_, source, target)
                if rule is not None:
                    types = groups.setdefault(rule, {})
                    types[type_] = (*types.get(type_, ()), source)
        return groups


class CandidateSteps:
    """The steps that find the candidates of one rule, between some sets."""

    def __init__(
        self, graph: ModelPlan, rule: Rule, types: Mapping[str, tuple[str, ...]], to: list[Block]
    ) -> None:
        self._graph, self._rule, self._to = graph, rule, to
        self._from = {type_: [b for b in graph.blocks if b.set in sets] for type_, sets in types.items()}
        self._direct = {target.key: step for target in to if (step := self._direct_step(target))}
        self._heads = list(self._head_steps())
        self._members = list(self._member_steps())
        self.steps = [
            *self._direct.values(),
            *(step for step, _, _ in self._heads),
            *(step for step, _ in self._members),
        ]

    def into(self, target: Block) -> Iterator[tuple[str, Step]]:
        """(role, step) of all that has candidates into a target."""
        if target.key in self._direct:
            yield "pairs:direct", self._direct[target.key]
        for number, (step, _, targets) in enumerate(self._heads):
            if target in targets:
                yield f"pairs:heads:{number:05d}", step
        for number, (step, targets) in enumerate(self._members):
            if target in targets:
                yield f"members:{number:05d}", step

    def _params(self, **params: Any) -> dict[str, Any]:
        return {"rule": rule_to_data(self._rule), "seed": self._graph.spec.seed} | params

    def _direct_step(self, target: Block) -> Step | None:
        sources = [block for block in self._from.get("DIRECT", ()) if block.event < target.cut]
        if not sources:
            return None
        pairs = sum(block.size for block in sources) * target.size * target.readings
        params = self._params(
            target=target.entry.as_json(), sources=[block.entry.as_json() for block in sources]
        )
        width = self._graph.model.facts.d_model
        return self._graph._step(
            "direct",
            params,
            [target, *sources],
            f"{target.key}: direct",
            flops=2.0 * pairs * width,
            memory=256 << 20,
        )

    def _head_steps(self) -> Iterator[tuple[Step, list[Block], list[Block]]]:
        facts = self._graph.model.facts
        for layer in range(facts.n_layers):
            cut, event = self._graph.model.cut("attn.in", layer), self._graph.model.event("attn", layer)
            sources = [block for block in self._from.get("VIA_HEAD", ()) if block.event < cut]
            targets = [block for block in self._to if event < block.cut]
            if not sources or not targets:
                continue
            written = sum(block.size for block in sources)
            read = sum(block.size * block.readings for block in targets)
            most = max(1, HEADS_MEMORY // (written * facts.d_head * 10))
            together = -(-facts.n_heads // -(-facts.n_heads // most))  # as even as can be
            for first in range(0, facts.n_heads, together):
                heads = list(range(first, min(first + together, facts.n_heads)))
                params = self._params(
                    layer=layer,
                    heads=heads,
                    sources=[block.entry.as_json() for block in sources],
                    targets=[block.entry.as_json() for block in targets],
                )
                span = f"H{heads[0]}" + (f"–{heads[-1]}" if len(heads) > 1 else "")
                flops = (
                    2.0 * len(heads) * facts.d_head * (written * read + (written + read) * facts.d_model * 4)
                )
                memory = 12 * written * facts.d_head * len(heads) + (256 << 20)
                step = self._graph._step("heads", params, [*sources, *targets], f"heads L{layer}.{span}",
                                         flops=flops, memory=memory)  # fmt: skip
                yield step, sources, targets

    def _member_steps(self) -> Iterator[tuple[Step, list[Block]]]:
        if not tops(self._rule, "source"):
            return
        for source in self._graph.blocks:
            inputs: dict[str, str] = {}
            for target in self._to:
                if (
                    target.key in self._direct
                    and source.event < target.cut
                    and source in self._from.get("DIRECT", ())
                ):
                    inputs[f"pairs:direct:{len(inputs):05d}"] = self._direct[target.key].name
            for step, sources, _ in self._heads:
                if source in sources:
                    inputs[f"pairs:heads:{len(inputs):05d}"] = step.name
            if inputs:
                targets = [target for target in self._to if source.event < target.cut]
                params = {
                    "rule": rule_to_data(self._rule),
                    "source": source.entry.as_json(),
                    "targets": [target.entry.as_json() for target in targets],
                }
                title = f"{source.key}: strongest per source"
                yield (
                    Step("members", REGISTRY["members"][0], params, inputs, Needs(seconds=0.5), title),
                    targets,
                )
