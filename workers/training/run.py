"""The training run: rounds of harvesting and of steps, all dictionaries on the same rows; checkpoints between
rounds.

Dictionaries do not meet: each has its own optimiser, and each batch is a step of every one of them, side by
side where there are threads. The rate rises over the first `warm` of the steps and falls to nothing over the
last `fall`. A run's files are a function of the plan, the model and the corpus, whether it was stopped and
resumed or not.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ingest.contexts import Contexts
from ingest.dictionaries import Dictionary
from ingest.errors import InputError
from ingest.models.residual import ResidualModel
from workers.training.metric import gradient_moments, root_of
from workers.training.stream import Harvest, Stream, steps_of
from workers.training.trainee import Job, Trainee

__all__ = ["Progress", "TrainingPlan", "TrainingRun", "fingerprint", "train"]


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, on how much, how."""

    jobs: tuple[Job, ...]
    tokens: int  # rows harvested, each met `reuse` times
    reuse: float = 3.0
    buffer: int = 131_072  # rows held
    batch: int = 4096  # rows a step
    seed: int = 0
    warm: float = 0.02
    fall: float = 0.3
    revive_after: int = 200_000  # rows without firing
    contexts_at_once: int = 32
    autocast: bool = False  # the model's products in bfloat16
    bf16: bool = False  # latents chosen by bfloat16 pre-activations
    extreme: float = 20.0
    gradient_tokens: int = 50_000  # run forward and back at the beginning, where a job asks for gradients
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Progress:
    """A run at one moment."""

    doing: str  # harvesting, gradients or training
    rows: int  # met by each dictionary so far
    total: int
    rows_per_second: float
    trainees: tuple[Trainee, ...]


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A finished run."""

    trainees: tuple[Trainee, ...]
    harvested: int  # rows
    met: int  # rows by each dictionary
    passes: float  # over the corpus
    harvest_seconds: float  # of this process
    step_seconds: float


def train(
    model: ResidualModel,
    contexts: Contexts,
    plan: TrainingPlan,
    checkpoint: Path | None = None,
    watch: Callable[[Progress], None] | None = None,
    every: float = 60.0,
    tell_every: float = 0.5,
    starts: Mapping[str, Dictionary] | None = None,
) -> TrainingRun:
    """Trains every job of the plan. `checkpoint`: a file to resume from and to write between rounds, at most
    once in `every` seconds; it stays, for whoever wrote the results to delete. `watch` is told at most once
    in `tell_every` seconds. starts: by a job's name, the dictionary that it goes on from.

    Raises InputError for a checkpoint of another plan, model or corpus.
    """
    sources = tuple(dict.fromkeys(source for job in plan.jobs for source in job.sources))
    harvest = Harvest(model, contexts, sources, plan.contexts_at_once, plan.autocast, plan.extreme)
    scored = int(contexts.scored(contexts.tokens[:1]).sum())
    half = max(1, round(plan.buffer / 2 / scored))
    rounds = max(1, round(plan.tokens / (half * scored)) - 1)
    stream = Stream(harvest, half, plan.seed)
    run = fingerprint(plan, model, contexts)
    saved = _resumed(checkpoint, run)
    total = rounds * plan.batch * steps_of(half * scored, plan.batch, plan.reuse)
    trainees: list[Trainee] = []
    met, harvested = (saved["met"], saved["harvested"]) if saved else (0, 0)
    met_before, spent = met, [0.0, 0.0]
    begun = told = kept = time.monotonic()

    def tell(doing: str) -> None:
        nonlocal told
        now = time.monotonic()
        if watch and now - told >= tell_every:
            told = now
            speed = (met - met_before) / max(now - begun, 1e-9)
            watch(Progress(doing, met, total, speed, tuple(trainees)))

    def begin() -> None:
        rows = stream.some()
        if saved:
            roots = [state["root"] for state in saved["trainees"]]
        else:
            roots = _roots(plan, model, contexts, tell)
        trainees.extend(
            _trainee(job, rows.values, plan, root) for job, root in zip(plan.jobs, roots, strict=True)
        )
        if saved:
            for trainee, state in zip(trainees, saved["trainees"], strict=True):
                trainee.restore(state)
        else:
            for trainee in trainees:
                if trainee.job.start is not None:
                    trainee.go_on_from((starts or {})[trainee.job.name])

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(max(1, min(plan.threads, len(plan.jobs)))) as pool:
        first_round = saved["round"] if saved else 0
        for number in range(first_round, rounds):
            start = time.monotonic()
            torch.set_num_threads(max(plan.threads, 1))
            stream.prepare(number, lambda _: tell("harvesting"))
            if not trainees:
                begin()
            spent[0] += time.monotonic() - start
            start = time.monotonic()
            torch.set_num_threads(1 if len(plan.jobs) > 1 else max(plan.threads, 1))
            for rows_of in stream.batches(number, plan.batch, plan.reuse):
                progress = min(met / total, 1.0)
                factor = min(1.0, (progress + 1e-3) / plan.warm, (1 - progress) / plan.fall)
                list(pool.map(_step_of(stream, rows_of, factor, plan, progress), trainees))
                met += sum(len(which) for _, which in rows_of)
                tell("training")
            spent[1] += time.monotonic() - start
            harvested = (number + 2) * half * scored
            if checkpoint and (time.monotonic() - kept >= every or number + 1 == rounds):
                kept = time.monotonic()
                state = {"round": number + 1, "met": met, "harvested": harvested, "of": run}
                _keep(checkpoint, state | {"trainees": [trainee.state() for trainee in trainees]})
    if not trainees:  # resumed after its last round
        begin()
    torch.set_num_threads(threads)
    passes = harvested / (len(contexts) * scored)
    return TrainingRun(tuple(trainees), harvested, met, passes, spent[0], spent[1])


def _trainee(job: Job, values: Any, plan: TrainingPlan, root: torch.Tensor | None) -> Trainee:
    read, given = job.sources
    return Trainee(job, values[read], values[given], plan.device, plan.bf16, root)


def _roots(
    plan: TrainingPlan, model: ResidualModel, contexts: Contexts, tell: Callable[[str], None]
) -> list[torch.Tensor | None]:
    """M^½ of each job that asks for one, all from the same gradients."""
    points = sorted({job.point for job in plan.jobs if job.gradients})
    if not points:
        return [None] * len(plan.jobs)
    moments = gradient_moments(
        model, contexts, points, plan.gradient_tokens, plan.autocast, lambda _: tell("gradients")
    )
    return [root_of(moments[job.point], job.gradients) if job.gradients else None for job in plan.jobs]


def _step_of(
    stream: Stream,
    rows: Sequence[tuple[int, torch.Tensor]],
    factor: float,
    plan: TrainingPlan,
    progress: float,
) -> Callable[[Trainee], None]:
    # Latents begun anew in the last part would not learn any more.
    reviving = plan.warm < progress < 1 - plan.fall / 2

    def step(trainee: Trainee) -> None:
        revive = (trainee.job.revive_after or plan.revive_after) if reviving else None
        read, given = trainee.job.sources
        x = stream.take(read, rows)
        y = x if given == read else stream.take(given, rows)
        trainee.step(x, y, factor, revive)

    return step


# --- checkpoints --------------------------------------------------------------------------------------------


def fingerprint(plan: TrainingPlan, model: ResidualModel, contexts: Contexts) -> str:
    """Of all that decides a run's result."""
    told = asdict(plan)
    for free in ("threads", "device", "contexts_at_once"):
        told.pop(free)
    told |= {"model": model.hash, "documents": list(contexts.documents), "contexts": len(contexts)}
    told |= {"length": contexts.length, "order": contexts.seed, "first": contexts.first_scored}
    tokens = hashlib.sha256()  # another tokenizer cuts the same documents otherwise
    for lo in range(0, len(contexts), 8192):
        tokens.update(contexts.tokens[lo : lo + 8192].tobytes())
    told |= {"pad": contexts.pad, "tokens": tokens.hexdigest()}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _resumed(checkpoint: Path | None, run: str) -> dict[str, Any] | None:
    if checkpoint is None or not checkpoint.exists():
        return None
    try:
        saved = torch.load(checkpoint, weights_only=True)
        of = saved["of"]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, UnpicklingError) as error:
        raise InputError(
            f"{checkpoint}: cannot be read as a checkpoint ({type(error).__name__}); delete it to begin anew"
        ) from error
    if of != run:
        raise InputError(
            f"{checkpoint}: is of another run (the spec, the model or the corpus has changed); delete it to"
            " begin anew"
        )
    return dict(saved)


def _keep(checkpoint: Path, state: dict[str, Any]) -> None:
    part = checkpoint.with_name(checkpoint.name + ".part")
    try:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, part)
        part.replace(checkpoint)
    except (OSError, RuntimeError) as error:  # torch's own, of a disk that is full
        part.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or "the disk is full, or the folder is gone"
        raise InputError(
            f"{checkpoint}: cannot be written ({why}); make room, the same command goes on from the"
            f" {'last one' if checkpoint.exists() else 'beginning'}"
        ) from error
