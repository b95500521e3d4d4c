"""The steps that find the candidates of one rule: into each dictionary, through the heads of each layer, and
per source where a rule counts so. Which dictionaries have edges into which is ingest.models.reach's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ingest.models.reach import Standing, head_layers
from ingest.rules import Rule, rule_to_data
from workers.selection import tops
from workers.sides import DictionaryEntry
from workers.steps import Step

if TYPE_CHECKING:
    from workers.build import ModelPlan

__all__ = ["Block", "CandidateSteps", "Group"]

HEADS_MEMORY = 256 << 20  # bytes of head-space vectors in one step


@dataclass(frozen=True)
class Block:
    """One dictionary of one set, with what the plan must know of it."""

    entry: DictionaryEntry
    set: str
    key: str
    size: int
    readings: int
    standing: Standing
    activation: str


class Group(NamedTuple):
    """What decides together which edges into a set are kept: a rule, and the set whose edges are apart from
    all others (one that describes the residual stream again), or ""."""

    rule: Rule
    apart: str


class CandidateSteps:
    """The steps that find the candidates of one group, between some sets."""

    def __init__(
        self, graph: ModelPlan, group: Group, types: Mapping[str, tuple[str, ...]], to: list[Block]
    ) -> None:
        self._graph, self._rule, self._apart, self._to = graph, group.rule, bool(group.apart), to
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
        sources = [block for block in self._graph.into[target.key] if block in self._from.get("DIRECT", ())]
        if not sources or not target.standing.reads_stream:
            return None
        pairs = sum(block.size for block in sources) * target.size * target.readings
        params = self._params(
            target=target.entry.as_json(), sources=[block.entry.as_json() for block in sources]
        )
        width = self._graph.model.facts.d_model
        return self._graph.step(
            "direct",
            params,
            [target, *sources],
            f"{target.key}: direct",
            flops=2.0 * pairs * width,
            memory=256 << 20,
        )

    def _head_steps(self) -> Iterator[tuple[Step, list[Block], list[Block]]]:
        facts = self._graph.model.facts
        from_ = self._from.get("VIA_HEAD", ())
        passed: dict[int, set[tuple[str, str]]] = {}  # layer -> keys of sources and targets
        for target in self._to:
            for source in self._graph.into[target.key]:
                for layer in head_layers(facts, source.standing, target.standing) if source in from_ else ():
                    passed.setdefault(layer, set()).add((source.key, target.key))
        for layer, pairs in sorted(passed.items()):
            # Every one of the sources has an edge through a head of the layer into every one of the targets.
            sources = [block for block in from_ if block.key in {source for source, _ in pairs}]
            for output in ("stream", "module", "z"):
                targets = [
                    block
                    for block in self._to
                    if block.standing.heads == output and block.key in {target for _, target in pairs}
                ]
                if targets:
                    yield from self._layer_steps(layer, sources, targets, output)

    def _layer_steps(
        self, layer: int, sources: list[Block], targets: list[Block], output: str
    ) -> Iterator[tuple[Step, list[Block], list[Block]]]:
        facts = self._graph.model.facts
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
            params |= ({"output": output} if output != "stream" else {}) | (
                {"apart": True} if self._apart else {}
            )
            span = f"H{heads[0]}" + (f"–{heads[-1]}" if len(heads) > 1 else "")
            flops = 2.0 * len(heads) * facts.d_head * (written * read + (written + read) * facts.d_model * 4)
            memory = 12 * written * facts.d_head * len(heads) + (256 << 20)
            step = self._graph.step("heads", params, [*sources, *targets], f"heads L{layer}.{span}",
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
                    and source in self._graph.into[target.key]
                    and source in self._from.get("DIRECT", ())
                ):
                    inputs[f"pairs:direct:{len(inputs):05d}"] = self._direct[target.key].name
            for step, sources, _ in self._heads:
                if source in sources:
                    inputs[f"pairs:heads:{len(inputs):05d}"] = step.name
            if inputs:
                targets = [target for target in self._to if source in self._graph.into[target.key]]
                params = {
                    "rule": rule_to_data(self._rule),
                    "source": source.entry.as_json(),
                    "targets": [target.entry.as_json() for target in targets],
                }
                title = f"{source.key}: strongest per source"
                yield self._graph.plain_step("members", params, inputs, title), targets
