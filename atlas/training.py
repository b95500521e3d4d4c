"""A training run from its spec to files: what `atlas train` does, and what a script may.

Everything that can be wrong is found before the first token is run: sites, layers, layouts that cannot hold
what is trained. Each finished set is a folder of its own under `out`, in it `training.json`: the spec, the
documents' part, the hashes of model and dictionaries, and the figures of the run on held-out text.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atlas.answers import Answer, Table
from atlas.building import check_device
from atlas.training_folders import check_room, is_of, make_room, unfinished
from atlas.training_starts import starts_of
from ingest.contexts import Contexts, make_contexts
from ingest.corpora import open_corpus
from ingest.dictionaries import Dictionary, ScalarThreshold, TopK, open_set
from ingest.dictionaries.encode import decode, encode, pre_activations
from ingest.dictionaries.hooks import read_hook, write_hook
from ingest.dictionaries.types import At, Read
from ingest.dictionaries.writing import write_circuit_tracer, write_saelens
from ingest.errors import InputError
from ingest.models import Facts, ResidualModel, describe_model, open_model
from ingest.models.tokenizer import open_tokenizer
from ingest.training_spec import SetSection, TrainingSpec
from workers.training.coder import BatchTopKGate, GateSpec, JumpReLUGate, ReLUGate, TopKGate
from workers.training.run import Progress, TrainingPlan, fingerprint, train
from workers.training.stream import Harvest, Source
from workers.training.trainee import Job, Trainee

__all__ = ["Trained", "TrainedDictionary", "run_training", "training_plan"]

HELD_OUT_CONTEXTS = 64


@dataclass(frozen=True)
class TrainedDictionary:
    """Figures of one finished dictionary, as read back from its file, on held-out text."""

    set: str
    layer: int
    fvu: float
    l0: float
    dead: int  # latents that fired on none of `rows`
    latents: int
    rows: int
    hash: str
    revived: int  # latents that were begun anew while training


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folders: tuple[Path, ...]
    dictionaries: tuple[TrainedDictionary, ...]
    notes: tuple[str, ...]
    harvested: int  # tokens
    met: int  # tokens, by each dictionary
    seconds: float

    def answer(self) -> Answer:
        """For people, or as JSON."""
        columns = ("set", "layer", "FVU", "L0", "dead", "latents", "begun anew", "hash")
        rows = [
            (
                one.set,
                one.layer,
                round(one.fvu, 4),
                round(one.l0, 2),
                one.dead,
                one.latents,
                one.revived,
                one.hash,
            )
            for one in self.dictionaries
        ]
        count = self.dictionaries[0].rows
        note = f"on {count:,} tokens of held-out documents, the dictionaries read back from their files"
        return Answer(
            "trained",
            {
                "folders": [str(folder) for folder in self.folders],
                "tokens harvested": self.harvested,
                "tokens met by each": self.met,
                "seconds": round(self.seconds, 1),
            },
            {"dictionaries": Table.of("dictionaries", columns, rows, notes=[note])},
            self.notes,
        )


def training_plan(
    spec: TrainingSpec,
    facts: Facts,
    *,
    device: str = "cpu",
    threads: int = 1,
    autocast: bool = False,
    bf16: bool = False,
) -> TrainingPlan:
    """Every dictionary of the spec, checked against the model. Raises InputError."""
    jobs: list[Job] = []
    for name, entry in spec.dictionaries.items():
        read, write = _sites(spec, name, entry, facts)
        layers = range(facts.n_layers) if entry.layers == "all" else entry.layers
        layers = [0] if read.site == "embed" else layers
        for layer in layers:
            if layer >= facts.n_layers:
                raise InputError(
                    f"{spec.place('dictionaries', name, 'layers')}: layer {layer}; the model has layers 0 to"
                    f" {facts.n_layers - 1}"
                )
            jobs.append(
                Job(
                    name, layer, read, write, entry.latents, _gate(entry), entry.skip, entry.rate,
                    entry.optimiser, spec.seed * 1000 + layer, entry.revive_after, entry.loss.gradients,
                )
            )  # fmt: skip
    return TrainingPlan(
        jobs=tuple(jobs),
        tokens=spec.tokens,
        reuse=spec.reuse,
        buffer=spec.buffer,
        batch=spec.batch,
        seed=spec.seed,
        revive_after=spec.revive_after,
        gradient_tokens=spec.gradient_tokens,
        autocast=autocast,
        bf16=bf16,
        device=device,
        threads=threads,
    )


def run_training(
    spec: TrainingSpec,
    out: Path,
    *,
    device: str = "cpu",
    threads: int = 1,
    autocast: bool = False,
    bf16: bool = False,
    watch: Callable[[Progress], None] | None = None,
    every: float = 60.0,
) -> Trained:
    """Trains, writes and measures the dictionaries of a spec. A run that was stopped goes on from
    `out/checkpoint.pt`; every set is there whole, with its record, or not at all. Raises InputError."""
    begun = time.monotonic()
    check_device(device)
    plan = training_plan(
        spec, describe_model(spec.model), device=device, threads=threads, autocast=autocast, bf16=bf16
    )
    checkpoint = out / "checkpoint.pt"
    check_room(out, spec.dictionaries, resuming=checkpoint.exists())
    model = open_model(spec.model)
    starts = starts_of(spec, plan.jobs, model)
    jobs = tuple(
        dataclasses.replace(job, start=starts[job.name].hash if job.name in starts else None)
        for job in plan.jobs
    )
    plan = dataclasses.replace(plan, jobs=jobs)
    contexts = _contexts(spec, model, "train")
    held_out = _contexts(spec, model, "held-out", HELD_OUT_CONTEXTS)
    of = fingerprint(plan, model, contexts)
    there = {name for name, entry in spec.dictionaries.items() if is_of(out / name, of, entry)}
    make_room(out)
    run = train(model, contexts, plan, checkpoint, watch, every, starts=starts)
    harvest = Harvest(
        model, held_out, tuple({source for job in plan.jobs for source in job.sources}), extreme=float("inf")
    )
    rows = harvest.rows(0, len(held_out))
    folders: list[Path] = []
    figures: list[TrainedDictionary] = []
    notes = (
        [f"the corpus has {len(contexts)} contexts: it was read {run.passes:.1f} times"]
        if run.passes > 1
        else []
    )
    with unfinished(out) as beside:
        for name, entry in spec.dictionaries.items():
            mine = [trainee for trainee in run.trainees if trainee.job.set == name]
            folder, said = _written(beside / name, entry, mine, model, rows.values)
            notes += [note for note in said if note not in notes]
            opened = open_set(folder, name=name, model=model)
            for trainee in mine:
                job, dictionary = trainee.job, opened.load(trainee.job.layer)
                x, y = (rows.values[source] for source in job.sources)
                figures.append(_measured(trainee, dictionary, x, y))
            record = {"run": of} | _record(
                spec, plan, model, contexts, run.harvested, run.met, [f for f in figures if f.set == name]
            )
            (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            folders.append(out / name)
        for name in spec.dictionaries:
            if name not in there:
                (beside / name).rename(out / name)
        checkpoint.unlink(missing_ok=True)
    return Trained(
        tuple(folders), tuple(figures), tuple(notes), run.harvested, run.met, time.monotonic() - begun
    )


# --- before -------------------------------------------------------------------------------------------------


def _sites(
    spec: TrainingSpec, name: str, entry: SetSection, facts: Facts
) -> tuple[Read, tuple[str, At] | None]:
    reads, writes, layouts = (spec.place("dictionaries", name, key) for key in ("reads", "writes", "layout"))
    found = read_hook(entry.reads, facts, reads)
    if found.layer not in (None, 0) or (found.layer == 0 and found.read.site != "embed"):
        raise InputError(f"{reads}: {entry.reads} names a layer; say it with layers")
    layout = _layout(entry)
    if entry.writes is None:
        write_hook(entry.reads, facts, reads)  # an autoencoder needs a place that can be written
        if layout != "saelens":
            raise InputError(f"{layouts}: {layout} holds transcoders; expected saelens for an autoencoder")
        return found.read, None
    written = write_hook(entry.writes, facts, writes)
    if layout == "circuit-tracer" and (found.read.site, written.site) != ("mlp.in", "mlp"):
        raise InputError(
            f"{layouts}: circuit-tracer holds what reads mlp.in and writes mlp.out; expected saelens"
        )
    return found.read, (written.site, written.at)


def _layout(entry: SetSection) -> str:
    if entry.layout is not None:
        return entry.layout
    return "saelens" if entry.writes is None else "circuit-tracer"


def _gate(entry: SetSection) -> GateSpec:
    kind, number = entry.gate
    match kind:
        case "topk":
            return TopKGate(int(number))
        case "batchtopk":
            return BatchTopKGate(int(number))
        case "jumprelu":
            return JumpReLUGate(number)
    return ReLUGate(number)


def _contexts(spec: TrainingSpec, model: ResidualModel, part: str, limit: int | None = None) -> Contexts:
    corpus = open_corpus(spec.corpus)
    tokenizer = None
    if not corpus.of_tokens:
        tokenizer = open_tokenizer(model, Path(spec.tokenizer) if spec.tokenizer else None)
    return make_contexts(
        corpus,
        tokenizer,
        spec.context,
        part=part,
        share=spec.held_out,
        limit=limit,
        seed=spec.seed,
        pad=spec.pad,
    )


# --- after --------------------------------------------------------------------------------------------------


def _written(
    folder: Path,
    entry: SetSection,
    trainees: Sequence[Trainee],
    model: ResidualModel,
    rows: Mapping[Source, torch.Tensor],
) -> tuple[Path, tuple[str, ...]]:
    dictionaries = [trainee.dictionary() for trainee in trainees]
    extra = {"model_name": model.name, "model_hash": model.hash}
    saelens = _layout(entry) == "saelens"
    thresholds, said = None, tuple[str, ...]()
    # SAELens has no transcoder with a TopK, circuit-tracer itself none at all.
    if entry.write_as or (saelens and entry.writes is not None and entry.gate[0] == "topk"):
        thresholds = {
            found.layer: _threshold(found, rows[trainee.job.sources[0]])
            for found, trainee in zip(dictionaries, trainees, strict=True)
        }
        if saelens:
            dictionaries = [
                dataclasses.replace(found, gate=ScalarThreshold(float(thresholds[found.layer])))
                for found in dictionaries
            ]
            said = (
                f"{folder.name}: SAELens has no transcoder with a TopK: written with one threshold, at which"
                f" the mean L0 on held-out text is {int(entry.gate[1])}",
            )
    given: dict[str, Any] = {"dtype": entry.precision, "extra": extra, "facts": model.facts}
    if saelens:
        written = write_saelens(folder, dictionaries, **given)
    else:
        how: Any = {"topk": "jumprelu", "thresholds": thresholds} if thresholds else {}
        written = write_circuit_tracer(folder, dictionaries, **given, **how)
    return written.folder, (*said, *written.notes)


def _threshold(dictionary: Dictionary, x: torch.Tensor) -> torch.Tensor:
    """The one threshold that lets through as many latents of these rows as TopK does, on average."""
    assert isinstance(dictionary.gate, TopK)
    k, above = dictionary.gate.k, []
    for lo in range(0, len(x), 2048):
        pre = pre_activations(dictionary, x[lo : lo + 2048])["in"]
        above.append(pre.topk(min(4 * k, dictionary.size)).values.relu().flatten())
    values = torch.cat(above).sort(descending=True).values
    return values[min(k * len(x), len(values) - 1)]


def _measured(
    trainee: Trainee, dictionary: Dictionary, x: torch.Tensor, y: torch.Tensor
) -> TrainedDictionary:
    left, fired, count = 0.0, torch.zeros(dictionary.size, dtype=torch.bool), 0.0
    for lo in range(0, len(x), 2048):
        part, target = x[lo : lo + 2048], y[lo : lo + 2048]
        activations = encode(dictionary, part)
        left += float((target - decode(dictionary, activations, part)[0]).double().pow(2).sum())
        fired |= (activations != 0).any(0)
        count += float((activations != 0).sum())
    total = float((y - y.mean(0)).double().pow(2).sum())
    return TrainedDictionary(
        set=trainee.job.set,
        layer=trainee.job.layer,
        fvu=left / total,
        l0=count / len(x),
        dead=int((~fired).sum()),
        latents=dictionary.size,
        rows=len(x),
        hash=dictionary.hash,
        revived=trainee.revived,
    )


def _record(
    spec: TrainingSpec,
    plan: TrainingPlan,
    model: ResidualModel,
    contexts: Contexts,
    harvested: int,
    met: int,
    figures: Sequence[TrainedDictionary],
) -> dict[str, Any]:
    name = figures[0].set
    entry = spec.dictionaries[name]
    return {
        "model": {"name": model.name, "hash": model.hash},
        "set": entry.model_dump(),
        "documents": {
            "part": "train", "held_out_share": spec.held_out, "count": len(contexts.documents),
            "context_length": contexts.length, "seed": spec.seed,
        },
        "rows_harvested": harvested,
        "rows_met": met,
        "batch": plan.batch,
        "held_out": [
            {"layer": one.layer, "fvu": one.fvu, "l0": one.l0, "dead": one.dead, "latents": one.latents,
             "rows": one.rows, "hash": one.hash, "revived": one.revived}
            for one in figures
        ],
    }  # fmt: skip
