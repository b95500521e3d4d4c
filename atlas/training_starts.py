"""What a training goes on from: the dictionaries of a trained set, of the kind that is to be trained."""

from __future__ import annotations

from collections.abc import Sequence

from ingest.dictionaries import Dictionary, open_set
from ingest.dictionaries.types import Read
from ingest.errors import InputError
from ingest.models import ResidualModel
from ingest.training_spec import TrainingSpec
from workers.training.trainee import Job

__all__ = ["starts_of"]

_GATES = {"topk": "TopK", "batchtopk": "ScalarThreshold", "jumprelu": "JumpReLU", "relu": "ReLU"}


def starts_of(spec: TrainingSpec, jobs: Sequence[Job], model: ResidualModel) -> dict[str, Dictionary]:
    """By a job's name, the dictionary that it goes on from, checked to be of its kind."""
    found: dict[str, Dictionary] = {}
    for name, entry in spec.dictionaries.items():
        if entry.start is None:
            continue
        mine = [job for job in jobs if job.set == name]
        place = f"{spec.source}: dictionaries.{name}.start: {entry.start}"
        opened = open_set(entry.start, name=name, model=model, layers=[job.layer for job in mine])
        for job in mine:
            one = opened.load(job.layer)
            if len(one.encoders) != 1 or len(one.writes) != 1:
                raise InputError(f"{place}: expected latents that read once and write at one layer")
            there = (one.read, one.writes[0].site, one.size, one.W_skip is not None, type(one.gate).__name__)
            wanted = (job.read, job.point[1], job.latents, job.skip, _GATES[entry.gate[0]])
            if there != wanted:
                raise InputError(
                    f"{place}: layer {job.layer} has (read, written, latents, skip, gate) {_said(there)};"
                    f" expected {_said(wanted)}"
                )
            found[job.name] = one
    return found


def _said(kind: tuple[Read, str, int, bool, str]) -> str:
    read, *rest = kind
    return ", ".join([read.site, *map(str, rest)])
