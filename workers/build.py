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
from ingest.models.reach import Standing, check_weights, pair_notes, sources_of
from ingest.rules import rule_to_data
from ingest.spec import Spec
from workers.candidates import Block, CandidateSteps, Group
from workers.edges import members_step, rank_step, select_step
from workers.heads import heads_step
from workers.local import SharedValues
from workers.nodes import dictionary_step, model_step, set_step
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

RATE = 2e11  # multiplications and additions a second that `Needs.seconds` assumes; only ratios matter


@dataclass(frozen=True)
class BuildPlan:
    """Steps, what they may ask for, and where their sources are; notes are for the user."""

    steps: tuple[Step, ...]
    sources: Mapping[str, Path]
    models: Mapping[str, ResidualModel]
    registry: Registry
    notes: tuple[str, ...] = ()

    def share(self, values: SharedValues) -> None:
        """Hands the opened models to the steps of this process, which would open them again."""
        for model in self.models.values():
            values.get(("model", model.hash), partial(_same, model), 0)


def _same(model: ResidualModel) -> ResidualModel:
    return model


def plan(spec: Spec, models: Mapping[str, ResidualModel], sets: Mapping[str, DictionarySet]) -> BuildPlan:
    """The steps that make the spec's atlas. models, sets: opened, by their names in the spec.

    Raises InputError for a set that can be no part of a weight graph on its model.
    """
    steps: list[Step] = []
    sources: dict[str, Path] = {}
    for name, model in models.items():
        graph = ModelPlan(spec, model, {set_name: sets[set_name] for set_name in spec.sets_of(name)})
        sources |= graph.sources
        steps += graph.steps(name)
    unique = {step.name: step for step in steps}
    notes = tuple(note for name, found in sets.items() for note in pair_notes(name, found.layout))
    return BuildPlan(tuple(unique.values()), sources, models, REGISTRY, notes)


class ModelPlan:
    """The steps of one model's sets."""

    def __init__(self, spec: Spec, model: ResidualModel, sets: Mapping[str, DictionarySet]) -> None:
        self.spec, self.model, self.sets = spec, model, sets
        for name, found in sets.items():
            check_weights(model.facts, name, found.layout)
        self.blocks = [block for name, found in sets.items() for block in self._blocks(name, found)]
        by_standing = {block.standing: block for block in self.blocks}
        self.into = {
            block.key: [by_standing[one] for one in sources_of(block.standing, list(by_standing))]
            for block in self.blocks
        }
        self._apart = {block.set for block in self.blocks if block.standing.redescribes}
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
                Standing.of(self.model.facts, name, layout, layer),
                layout.activation,
            )

    def step(self, kind: str, params: Mapping[str, Any], blocks: list[Block], title: str, *, flops: float =
    0,
              memory: int = 0, inputs: Mapping[str, str] | None = None) -> Step:  # fmt: skip
        """A step that reads the model and these dictionaries."""
        named = {"model": f"model:{self.model.hash}"}
        named |= {
            block.entry.source: block.entry.source for block in blocks if block.entry.source in self.sources
        }
        needs = Needs(memory=memory, seconds=0.2 + flops / RATE)
        return Step(kind, REGISTRY[kind][0], params, named | dict(inputs or {}), needs, title)

    def plain_step(self, kind: str, params: Mapping[str, Any], inputs: Mapping[str, str], title: str) -> Step:
        """A step that reads other steps' results alone."""
        return Step(kind, REGISTRY[kind][0], params, inputs, Needs(seconds=0.5), title)

    def steps(self, name: str) -> Iterator[Step]:
        """All steps, in the order in which they should begin."""
        tokenizer = {"tokenizer": f"texts:{self.texts}"} if self.model.tokenizer else {}
        params: dict[str, Any] = {"name": name, "texts": self.texts}
        yield self.step("model", params, [], f"{name}: tokens and heads", inputs=tokenizer)
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
            yield self.step("dictionary", params, [block], f"{block.key}: features")
        yield from self._tokens()
        yield from self._edges()

    def _tokens(self) -> Iterator[Step]:
        facts = self.model.facts
        for block in self.blocks:
            flops = 2.0 * block.size * facts.d_vocab * facts.d_model
            for type_, role, rows in (("EMBEDS", "target", block.readings), ("PROMOTES", "source", 1)):
                reads = type_ == "PROMOTES" or block.standing.reads_stream
                if reads and (top := self.spec.top(type_, block.set)):
                    params = {role: block.entry.as_json(), "top": top}
                    title = f"{block.key}: {type_}"
                    yield self.step(
                        type_.lower(), params, [block], title, flops=flops * rows, memory=256 << 20
                    )

    def _edges(self) -> Iterator[Step]:
        selected: list[tuple[Block, list[Block], Step]] = []
        candidates: dict[tuple[Group, tuple[str, ...], tuple[str, ...]], CandidateSteps] = {}
        for target in self.blocks:
            groups: list[dict[str, Any]] = []
            inputs: dict[str, str] = {}
            for group, types in self._groups(target.set).items():
                from_sets = list(dict.fromkeys(set_name for sets in types.values() for set_name in sets))
                sources = [block for block in self.into[target.key] if block.set in from_sets]
                key = (group, tuple(types.get("DIRECT", ())), tuple(types.get("VIA_HEAD", ())))
                if key not in candidates:
                    to = [block for block in self.blocks if self._groups(block.set).get(group) == types]
                    candidates[key] = CandidateSteps(self, group, types, to)
                    yield from candidates[key].steps
                found = dict(candidates[key].into(target))
                if not sources or not found:
                    continue
                place = len(groups)
                groups.append(
                    {
                        "rule": rule_to_data(group.rule),
                        "sources": [block.entry.as_json() for block in sources],
                    }
                )
                inputs |= {f"{place}:{role}": step.name for role, step in found.items()}
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
                step = self.plain_step("select", params, inputs, f"{target.key}: selection")
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
                yield self.plain_step("rank", params, inputs, f"{block.key}: edges out")

    def _groups(self, target: str) -> dict[Group, dict[str, tuple[str, ...]]]:
        """Which sets' edges into a set are decided together: group -> type -> source sets."""
        groups: dict[Group, dict[str, tuple[str, ...]]] = {}
        for type_ in ("DIRECT", "VIA_HEAD"):
            for source in self.sets:
                rule = self.spec.rule(type_, source, target)
                if rule is not None:
                    types = groups.setdefault(Group(rule, source if source in self._apart else ""), {})
                    types[type_] = (*types.get(type_, ()), source)
        return groups
