"""The weight graph, direct (methods §2; Circuit Tracing, "virtual weights"; Transcoders, §3.2).

    V_ij = ω_i · ρ_j          for every source i written before the target j reads

ω (F, d) and ρ (R, d) live in the residual basis, float64 (`ingest.models`). No F × F array exists:
`workers.search` finds candidates tile by tile, `workers.exact` computes their weights, `workers.selection`
decides. A row is one reading of one target: a gated neuron has two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ingest.rules import Rule, Top, rule_from_data
from workers.pairs import Pairs, PairWriter
from workers.products import direct_pairs
from workers.search import Search
from workers.selection import local_choice
from workers.sides import DictionaryEntry, Readers, Writers, divided
from workers.steps import Context, Done, Step
from workers.survey import SOURCES, Survey, chosen, rotation
from workers.vectors import Vectors

__all__ = ["direct_step"]


def direct_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """All DIRECT pairs into one dictionary that its rule may keep, and a survey of all of them.

    params: rule, target, sources (entries, in the order that ties follow), seed. inputs: model, dictionaries.
    """
    rule = rule_from_data(step.params["rule"])
    vectors = Vectors(step, inputs, context)
    target = DictionaryEntry(**step.params["target"])
    sources = [DictionaryEntry(**entry) for entry in step.params["sources"]]
    layers = np.array([source.layer for source in sources])
    readers = vectors.readers(target)
    search = Search(rule, readers.norms, readers.rho.shape[1])
    for place, source in enumerate(sources):
        context.progress(place, len(sources), "dictionaries")
        writers = vectors.writers(source, readers.cut)
        search.read(readers.operand, writers.operand, layer=source.layer, block=place)
    survey = Survey(step.params["seed"])
    parts = []
    for place, (source, found) in enumerate(zip(sources, search.finish(), strict=True)):
        writers = vectors.writers(source, readers.cut)
        parts.append(direct_pairs(found, place, writers, readers))
        _survey(survey, writers, readers, rule, search.least(layer=source.layer, block=place))
    with PairWriter(out) as writer:
        pairs = Pairs.joined(parts).sorted()
        pairs = pairs.where(local_choice(rule, pairs, layers))
        for place, source in enumerate(sources):
            writer.write(source.hash, target.hash, pairs.where(pairs.source_dictionary == place))
    return Done({"survey": survey.rows})


def _survey(
    survey: Survey, writers: Writers, readers: Readers, rule: Rule, least: dict[Top, np.ndarray]
) -> None:
    width = readers.rho.shape[1]
    sample = chosen(survey.seed, len(writers.omega), SOURCES)
    length = writers.norms.length[sample]
    unit = divided(writers.omega[sample], length)
    survey.add(
        {"source": writers.entry.hash, "target": readers.entry.hash, "layer": -1, "head": -1},
        len(writers.omega),
        (unit, length),
        (unit @ rotation(width, survey.seed), length),
        divided(readers.rho, readers.norms.length),
        readers.norms.length,
        writers.norms.scale[sample],
        readers.norms.scale,
        rule,
        least,
        width,
    )
