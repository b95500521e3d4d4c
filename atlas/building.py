"""A build from its spec to a loaded atlas: the plan of `workers.build`, run here, then loaded.

    spec → models opened and checked → dictionaries read once, every weight finite → plan → steps → load

Nothing is written before everything that was given has been checked. A build that stops later keeps its
finished steps, and the same call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atlas.answers import Answer, Table
from atlas.errors import AtlasError
from atlas.folder import AtlasFolder, write_atomically
from ingest.errors import InputError
from ingest.rules import Absolute, All_, Any_, Rule, Top
from ingest.spec import DictionaryEntry, Spec

if TYPE_CHECKING:
    from atlas.load import LoadReport
    from ingest.dictionaries import DictionarySet, Layers
    from ingest.models import ResidualModel
    from workers.plan import Report
    from workers.progress import Display

__all__ = [
    "Built",
    "Watch",
    "build",
    "check_device",
    "check_place",
    "code_version",
    "open_sources",
    "run_hash",
]

SCALED = (
    "its latents' scale is free, so rules on |V| (absolute, top) compare them as if each wrote a unit vector;"
    " stored weights keep the file's scale"
)

Count = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Watch:
    """What is told while a build runs. Each gives a context: `counting` a function (done, total, unit),
    `plan` a display of the plan's snapshots."""

    counting: Callable[[str], AbstractContextManager[Count]] = lambda title: nullcontext(lambda *_: None)
    plan: Callable[[str], AbstractContextManager[Display | None]] = lambda title: nullcontext(None)


@dataclass(frozen=True)
class Built:
    """What a build came to. `notes` are for the user: what was defaulted, replaced or unusual."""

    atlas: Path
    run: str
    report: Report
    loaded: LoadReport
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = field(default=())

    def answer(self) -> Answer:
        """The summary: what was computed, what is in the atlas, what was dropped."""
        from atlas.api import open as open_atlas

        with open_atlas(self.atlas) as atlas:
            info = atlas.info()
        steps = f"{len(self.report.ran)} computed, {len(self.report.reused)} from before"
        facts = {"atlas": str(self.atlas), "run": self.run, "steps": steps}
        sizes = {name: value for name, value in info.facts.items() if name.endswith("bytes")}
        times = Table.of("time", ("part", "seconds"), list(self.seconds.items()))
        tables = {"holds": info.tables["holds"], "selection": info.tables["selection"], "time": times}
        return Answer(f"built {self.atlas}", {**facts, **sizes}, tables, self.notes)


def check_place(path: Path) -> None:
    """Raises AtlasError where no atlas can be made or continued: something else is there, or a newer one."""
    if not path.exists():
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir():
            raise AtlasError(f"{path}: {parent} is no folder")
        return
    if not path.is_dir():
        raise AtlasError(f"{path}: exists and is not a folder")
    if (path / "atlas.json").exists():
        AtlasFolder.open(path)
    elif any(not part.name.startswith(".atlas.json.") for part in path.iterdir()):  # killed while making it
        raise AtlasError(f"{path}: exists and is no atlas; choose another place with --out")


def open_sources(
    spec: Spec, watch: Watch
) -> tuple[dict[str, ResidualModel], dict[str, DictionarySet], tuple[str, ...]]:
    """The models and sets of a spec by name, checked whole, and notes for the user. Raises InputError."""
    from ingest.dictionaries import describe_set, open_set
    from ingest.models import describe_model, open_model
    from ingest.models.reach import check_weights

    with watch.counting("reading headers"):
        facts = {name: describe_model(entry.where) for name, entry in spec.models.items()}
        for name, entry in spec.dictionaries.items():
            layout = describe_set(
                entry.where,
                facts[entry.model],
                format=entry.format,
                layers=_layers(entry),
                declared=entry.declared,
            )
            check_weights(facts[entry.model], name, layout)
    models: dict[str, ResidualModel] = {}
    for name, model in spec.models.items():
        with watch.counting(f"opening model {name}"):
            models[name] = open_model(model.where, name=name, tokenizer=model.tokenizer)
    sets: dict[str, DictionarySet] = {}
    notes: list[str] = []
    for name, entry in spec.dictionaries.items():
        found = open_set(
            entry.where,
            name=name,
            model=models[entry.model],
            format=entry.format,
            layers=_layers(entry),
            alias=entry.alias,
            declared=entry.declared,
        )
        with watch.counting(f"checking {name}") as count:
            found.verify(lambda done, total: count(done, total, "layers"))
        sets[name] = found
        notes += [f"{name}: {note}" for note in found.notes]
        if _by_size(spec, name) and found.load(found.layers[0]).rescalable:
            notes.append(f"{name}: {SCALED}")
    return models, sets, tuple(notes)


def build(
    spec: Spec,
    path: Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    add: bool = False,
    watch: Watch | None = None,
) -> Built:
    """Builds the spec's atlas at `path`, or goes on with it, and loads it.

    workers: steps at once; default, the number of cores. add: keep earlier runs on the same models beside
    this one; without it they are replaced. Raises InputError and AtlasError for what was given; then a folder
    that this call made is gone again, unless steps have finished in it. PlanInterrupted after Ctrl-C.
    """
    watch = watch or Watch()
    check_place(path)
    check_device(device)
    begin = time.monotonic()
    started = _now()
    models, sets, notes = open_sources(spec, watch)
    seconds = {"reading and checking": time.monotonic() - begin}

    import torch

    from atlas.load import RunManifest, UsedStep, load_run
    from workers.artifacts import Artifacts, sole_builder
    from workers.build import plan
    from workers.local import LocalExecutor
    from workers.plan import StepFailed, run_plan

    torch.set_num_threads(1)  # the executor's threads share the cores: one thread each
    built = plan(spec, models, sets)
    notes += built.notes
    with _new_atlas(path) as folder, sole_builder(path):
        artifacts = Artifacts(folder.artifacts)
        executor = LocalExecutor(built.registry, artifacts, workers=workers, device=device)
        built.share(executor.shared)
        begin = time.monotonic()
        with watch.plan("computing") as display:
            try:
                report = run_plan(built.steps, executor, artifacts, built.sources, display)
            except StepFailed as error:
                if isinstance(error.__cause__, MemoryError):
                    raise AtlasError(
                        f"{error.step}: not enough memory; run again with fewer --workers"
                    ) from error
                raise
        seconds["computing"] = time.monotonic() - begin
        del executor, built, models, sets  # gigabytes that loading does not need
        _give_back_memory()
        run = run_hash(spec, [step.name for step in report.steps])
        write_atomically(folder.path / "specs" / f"{run[:16]}.yaml", spec.to_yaml())
        used = tuple(UsedStep(step.name, step.kind, step.title) for step in report.steps)
        manifest = RunManifest(
            run, canonical(spec.canonical()), code_version(), started, _now(), "done", used
        )
        replaced = () if add else _earlier_runs(folder, spec, run)
        begin = time.monotonic()
        with watch.counting("loading") as count:
            loaded = load_run(path, _as_loaded(folder, manifest), replace=replaced, progress=count)
        seconds["loading"] = time.monotonic() - begin
    notes += loaded.notes
    notes += tuple(f"replaced run {name[:16]} on the same models (--add keeps both)" for name in replaced)
    return Built(path, run, report, loaded, seconds, notes)


def _by_size(spec: Spec, name: str) -> bool:
    """Whether a rule compares |V| of edges out of or into a set."""

    def compares(rule: Rule) -> bool:
        return (
            any(map(compares, rule.rules))
            if isinstance(rule, Any_ | All_)
            else isinstance(rule, Absolute | Top)
        )

    return any(compares(request.keep) for request in spec.edges if name in (*request.from_, *request.to))


def _layers(entry: DictionaryEntry) -> Layers:
    return cast("Layers", entry.layers)


def _give_back_memory() -> None:
    """Hands freed memory back to the system where the C library keeps it for later (glibc)."""
    import ctypes
    import gc

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def run_hash(spec: Spec, steps: list[str]) -> str:
    """The name of a run: by its spec and the steps that carry it out."""
    return hashlib.sha256(canonical({"spec": spec.canonical(), "steps": sorted(steps)}).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON, keys sorted, without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@contextmanager
def _new_atlas(path: Path) -> Iterator[AtlasFolder]:
    """The atlas's folder, made if it is not there; taken away again if the block fails before any step is
    done.
    """
    made = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    try:
        folder = AtlasFolder.create(path)
        yield folder
    except BaseException as error:
        finished = any((path / "artifacts").glob("[0-9a-f][0-9a-f]/*"))
        if finished and isinstance(error, KeyboardInterrupt):
            error.resumable = True  # type: ignore[attr-defined]  # the command line says so
        if made and not finished:
            shutil.rmtree(path, ignore_errors=True)
            for parent in made[1:]:  # folders on the way to it, from the inside out
                if parent.exists() and not any(parent.iterdir()):
                    parent.rmdir()
        raise


def _earlier_runs(folder: AtlasFolder, spec: Spec, run: str) -> tuple[str, ...]:
    """Runs loaded from specs that share a model's name with this one."""
    from atlas.load import loaded_runs

    earlier = []
    for manifest in loaded_runs(folder):
        shared = set(json.loads(manifest.spec).get("models", {})) & set(spec.models)
        if shared and manifest.run != run:
            earlier.append(manifest.run)
    return tuple(earlier)


def _as_loaded(folder: AtlasFolder, manifest: Any) -> Any:
    """The manifest of the same run as it is loaded already, so that building again changes nothing."""
    from atlas.load import loaded_runs

    return next(
        (run for run in loaded_runs(folder) if (run.run, run.steps) == (manifest.run, manifest.steps)),
        manifest,
    )


def check_device(device: str) -> None:
    """InputError for a device that is not here."""
    if device == "cpu":
        return
    import torch

    name, _, number = device.partition(":")
    if name != "cuda" or (number and not number.isdecimal()):
        raise InputError(f"device {device}: expected cpu, cuda or cuda:0")
    if not torch.cuda.is_available():
        raise InputError(
            f"device {device}: torch finds no CUDA device here (atlas doctor says more); use --device cpu"
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def code_version() -> str:
    """The version that is installed."""
    try:
        return version("circuit-atlas")
    except PackageNotFoundError:
        return "unknown"
