"""A build that is killed or interrupted at any moment, and goes on by the same command, leaves the atlas that
a build left alone leaves: the artifacts byte for byte, the database row for row, and no file besides.

Processes are real and killed by the system. Most are forked from a server that has imported what a build
needs, so that the time goes into building, not into importing torch once for every kill.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import workers.build
import workers.search
import workers.tokens
from atlas.folder import AtlasFolder
from atlas.load import load_run, loaded_runs
from atlas.store import open_store
from atlas.store.checksum import content_checksum
from ingest.dictionaries import open_set
from ingest.models import open_model
from ingest.spec import load_spec
from tests.atlas.program import Program
from tests.atlas.synthetic import Synthetic
from tests.atlas.tiny_source import write_source
from tests.workers.killing import files_of, kill_and_resume
from workers.artifacts import Artifacts
from workers.local import LocalExecutor
from workers.plan import run_plan

ROOT = Path(__file__).resolve().parents[2]
STEP_KINDS = set(workers.build.REGISTRY)


def build(spec: Path, target: Path, said: Path | None = None) -> Program:
    """A running `atlas build`."""
    return Program("build", spec, "--out", target, "--workers", "2", said=said)


def computing(atlas: Path, began: float) -> bool:
    """Whether everything was opened and the steps have begun."""
    return _younger(atlas / "builder.pid", began)


def loading(atlas: Path, began: float) -> bool:
    """Whether a new generation is being filled, or is there."""
    return any(_younger(held, began) for held in atlas.glob("db/*/held"))


def _younger(path: Path, began: float) -> bool:
    try:
        return path.stat().st_mtime > began
    except FileNotFoundError:
        return False


def checksum(atlas: Path) -> str:
    with open_store(atlas) as store:
        return content_checksum(store)


def contents(atlas: Path) -> dict[str, Any]:
    """What must be equal: artifacts to the byte, the database's rows, the names of all other files.

    A generation counts the loads, so its number is left out.
    """
    current = (atlas / "CURRENT").read_text().strip()
    names = {str(path.relative_to(atlas)).replace(current, "current") for path in atlas.rglob("*")}
    specs = {path.name: path.read_text() for path in (atlas / "specs").iterdir()}
    return {
        "artifacts": files_of(atlas / "artifacts"),
        "database": checksum(atlas),
        "names": names,
        "specs": specs,
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def before(source: Path) -> Path:
    """An atlas with other edges of the same model; building it also compiles what is not compiled yet."""
    atlas = source / "before.atlas"
    assert build(source / "before.yaml", atlas).wait(200) == 0
    return atlas


@pytest.fixture(scope="module")
def undisturbed(source: Path, before: Path) -> Path:
    """The atlas of a build that was left alone."""
    atlas = source / "undisturbed.atlas"
    assert build(source / "spec.yaml", atlas).wait(100) == 0
    return atlas


def test_the_plan_has_steps_of_every_kind(undisturbed: Path) -> None:
    (run,) = loaded_runs(AtlasFolder.open(undisturbed))
    assert {step.kind for step in run.steps} == STEP_KINDS


def test_killed_at_random_instants_from_nothing(source: Path, undisturbed: Path, tmp_path: Path) -> None:
    whole = checksum(undisturbed)

    def readers_see_all_or_are_told(atlas: Path) -> None:
        if (atlas / "CURRENT").exists():
            assert checksum(atlas) == whole
        artifacts = Artifacts(atlas / "artifacts")
        assert [artifacts.verify(name) for name in artifacts.names()] == [[] for _ in artifacts.names()]

    kills = kill_and_resume(
        lambda target: build(source / "spec.yaml", target),
        tmp_path,
        kills=15,
        seed=0,
        stages=(computing, loading),
        contents=contents,
        check=readers_see_all_or_are_told,
    )
    assert min(kills.at_stage.values()) >= 4, kills
    assert contents(tmp_path / "target") == contents(undisturbed)
    _nothing_is_left_over(tmp_path / "target")


def test_killed_at_random_instants_over_an_earlier_atlas(
    source: Path, before: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """There is always an atlas to read: the earlier one until the later one is whole."""
    earlier, later = checksum(before), checksum(undisturbed)
    seen: list[str] = []
    kills = kill_and_resume(
        lambda target: build(source / "spec.yaml", target),
        tmp_path,
        kills=6,
        seed=1,
        stages=(computing, loading),
        prepare=lambda target: shutil.copytree(before, target),
        contents=contents,
        check=lambda target: seen.append(checksum(target)),
    )
    assert kills.killed == len(seen) == 6
    assert set(seen) <= {earlier, later} and earlier in seen
    assert checksum(tmp_path / "target") == later
    _nothing_is_left_over(tmp_path / "target")


def _nothing_is_left_over(atlas: Path) -> None:
    current = (atlas / "CURRENT").read_text().strip()
    assert [path.name for path in (atlas / "db").iterdir()] == [current]
    assert [path.name for path in (atlas / "csr").iterdir()] == [current]
    assert not list((atlas / "artifacts" / "tmp").iterdir())
    (run,) = loaded_runs(AtlasFolder.open(atlas))
    assert [path.name for path in (atlas / "runs").iterdir()] == [f"{run.run}.json"]
    hidden = {path.name for path in atlas.rglob(".*")} - {".load.lock"}
    assert hidden == set()


def test_killed_while_importing_and_finished_by_the_program(
    source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The program as a user starts it: `python -m atlas`."""
    target = tmp_path / "tiny.atlas"
    command = [sys.executable, "-m", "atlas", "build", source / "spec.yaml", "--out", target, "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    draw = random.Random(2)
    for _ in range(3):
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0, 2))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["atlas"] == str(target)
    assert contents(target) == contents(undisturbed)


@pytest.mark.parametrize("stage", ["opening", "computing", "loading"])
def test_interrupted_it_says_how_to_go_on_and_does(
    stage: str, source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    target, said = tmp_path / "tiny.atlas", tmp_path / "said.txt"
    began = time.time()
    attempt = build(source / "spec.yaml", target, said)
    reached: Callable[[Path, float], bool] = {
        "opening": lambda atlas, began: said.exists() and "started" in said.read_text(),
        "computing": lambda atlas, began: any((atlas / "artifacts").glob("[0-9a-f][0-9a-f]/*")),
        "loading": loading,
    }[stage]
    while not reached(target, began) and attempt.wait(0.002) is None:
        pass
    time.sleep(0.02)
    os.kill(attempt.process.pid or 0, signal.SIGINT)
    assert attempt.wait(60) == 130, said.read_text()
    last = said.read_text().splitlines()[-1]
    assert "Traceback" not in said.read_text()
    if stage == "opening":
        assert last == "interrupted" and not target.exists()
    else:
        assert last == "interrupted; what is finished is kept, the same command goes on from there"
        assert not (target / "CURRENT").exists() and not list((target / "db").iterdir())
        assert not list((target / "artifacts" / "tmp").iterdir())
    assert build(source / "spec.yaml", target).wait(60) == 0
    assert contents(target) == contents(undisturbed)


@pytest.mark.parametrize(("at_once", "tile", "chunk"), [(1, (16, 128), 1), (3, (7, 256), 1 << 25)])
def test_the_order_of_steps_threads_and_tiles_leave_no_trace(
    at_once: int,
    tile: tuple[int, int],
    chunk: int,
    source: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan = workers.search.scan
    for module in (workers.search, workers.tokens):
        monkeypatch.setattr(
            module, "scan", lambda *given, **options: scan(*given, **{**options, "tile": tile})
        )
    monkeypatch.setattr(workers.tokens, "CHUNK", chunk)
    spec = load_spec(source / "spec.yaml")
    models = {name: open_model(entry.where, name=name) for name, entry in spec.models.items()}
    sets = {
        name: open_set(entry.where, name=name, model=models[entry.model], format=entry.format)
        for name, entry in spec.dictionaries.items()
    }
    plan = workers.build.plan(spec, models, sets)
    steps = list(plan.steps)
    random.Random(at_once).shuffle(steps)
    artifacts = Artifacts(tmp_path / "artifacts")
    executor = LocalExecutor(plan.registry, artifacts, at_once)
    plan.share(executor.shared)
    run_plan(steps, executor, artifacts, plan.sources)
    assert files_of(artifacts.root) == files_of(undisturbed / "artifacts")


# --- killed at single changes of the folder, one after the other --------------------------------------------


def _counts_its_changes(function: Callable[[], object], die_before: int, log: Path) -> None:
    """Runs it, and kills this process before its change of that number to the file system (from 1; 0: none).

    The changes go to the log, a line each: operation and path.
    """
    made = 0

    def counted(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            with log.open("a") as file:
                file.write(f"{name} {' '.join(map(str, arguments))}\n")
            return operation(*arguments, **options)

        return count

    for name in ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync"):
        setattr(os, name, counted(name, getattr(os, name)))
    function()


def _forked(function: Callable[[], object], die_before: int, log: Path) -> int | None:
    process = multiprocessing.get_context("fork").Process(
        target=_counts_its_changes, args=(function, die_before, log)
    )
    process.start()
    process.join()
    return process.exitcode


def test_making_the_folder_can_be_killed_before_any_change(tmp_path: Path) -> None:
    from atlas.building import check_place

    path, log = tmp_path / "new.atlas", tmp_path / "log"
    make = partial(AtlasFolder.create, path)
    change = 0
    while _forked(make, change + 1, log) == -signal.SIGKILL:
        change += 1
        check_place(path)
        make().remove_old_generations()
        assert {part.name for part in path.iterdir()} == {
            "atlas.json", "specs", "runs", "artifacts", "db", "csr"
        }  # fmt: skip
        shutil.rmtree(path)
    assert change >= 8


def test_replacing_a_run_can_be_killed_around_its_switch(tmp_path: Path) -> None:
    """Before each change to the ids, to CURRENT and to the manifests, and before some of the others."""
    old, new = Synthetic("old", n_edges=20), Synthetic("new", n_edges=20)
    path, later, log = tmp_path / "a.atlas", tmp_path / "b.atlas", tmp_path / "log"
    for folder in (path, later):
        old.write(folder)
        new.write(folder)
    load_run(later, new.manifest())
    load_run(path, old.manifest())
    before, after = checksum(path), checksum(later)
    kept = shutil.copytree(path, tmp_path / "kept.atlas")

    def load() -> None:
        replaced = {run.run for run in loaded_runs(AtlasFolder.open(path))} - {new.manifest().run}
        load_run(path, new.manifest(), replace=replaced)

    assert _forked(load, 0, log) == 0
    changes = log.read_text().splitlines()
    telling = [n for n, change in enumerate(changes, 1) if re.search(r"CURRENT|ids\.parquet|/runs/", change)]
    assert len(telling) >= 6
    seen = []
    for change in sorted({*telling, *random.Random(0).sample(range(1, len(changes) + 1), 5)}):
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        assert _forked(load, change, log) == -signal.SIGKILL
        seen.append(checksum(path))
        load()
        assert checksum(path) == after
        assert [file.name for file in (path / "runs").iterdir()] == [f"{new.manifest().run}.json"]
        assert len(list((path / "db").iterdir())) == len(list((path / "csr").iterdir())) == 1
        assert {file.name for file in path.rglob(".*")} <= {".load.lock"}
    assert set(seen) == {before, after}
