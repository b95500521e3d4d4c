"""Ctrl-C, kill -9 and two builders at once, on a real process that runs a small plan."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingest.errors import InputError
from tests.workers.killing import files_of, kill_and_resume, starts
from workers.artifacts import Artifacts, sole_builder

PROGRAM = Path(__file__).with_name("small_plan.py")
ROOT = PROGRAM.parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def command(folder: Path, pause: float) -> list[str]:
    return [sys.executable, str(PROGRAM), str(folder), str(pause)]


def artifacts_of(folder: Path) -> dict[str, str]:
    return files_of(folder / "artifacts")


def started(folder: Path, pause: float) -> subprocess.Popen[str]:
    """A running build that has told its first progress."""
    process = subprocess.Popen(command(folder, pause), env=ENV, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "unit='tables'" in line:
            return process
    raise AssertionError("the build ended without progress")


def test_a_build_killed_at_random_instants_comes_out_the_same(tmp_path):
    def nothing_is_half_written(folder):
        artifacts = Artifacts(folder / "artifacts")
        for name in artifacts.names():
            assert artifacts.verify(name) == []

    kills = kill_and_resume(
        starts(lambda folder: command(folder, 0.02), ENV),
        tmp_path,
        kills=20,
        seed=3,
        contents=artifacts_of,
        check=nothing_is_half_written,
        timeout=60,
    )
    assert kills.killed == 20
    assert list((tmp_path / "target" / "artifacts" / "tmp").iterdir()) == []


def test_ctrl_c_stops_the_steps_and_the_next_run_goes_on(tmp_path):
    process = started(tmp_path, 0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - began < 3  # within a file of 0.3 s each, not after all of them
    assert re.search(r"interrupted: \d of \d steps are finished", output)
    artifacts = Artifacts(tmp_path / "artifacts")
    assert list((artifacts.root / "tmp").iterdir()) == []
    finished = artifacts.names()

    resumed = subprocess.run(command(tmp_path, 0), env=ENV, capture_output=True, text=True, timeout=60)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{6 - len(finished)} ran, {len(finished)} reused" in resumed.stdout


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    process = started(tmp_path, 30)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # waiting for its steps
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode not in (0, None)
    left = list((tmp_path / "artifacts" / "tmp").iterdir())
    assert left  # what the steps were writing when they were left alone
    Artifacts(tmp_path / "artifacts").sweep()
    assert not list((tmp_path / "artifacts" / "tmp").iterdir())


def test_what_a_living_process_writes_is_not_swept(tmp_path):
    process = started(tmp_path, 30)
    artifacts = Artifacts(tmp_path / "artifacts")
    before = set((artifacts.root / "tmp").iterdir())
    artifacts.sweep()
    assert before and before <= set((artifacts.root / "tmp").iterdir())  # another step may just have begun
    process.kill()
    process.communicate(timeout=10)
    artifacts.sweep()
    assert not list((artifacts.root / "tmp").iterdir())


def test_a_second_builder_is_told_which_process_builds(tmp_path):
    process = started(tmp_path, 30)
    told = f"process {process.pid} is building this atlas"
    with pytest.raises(InputError, match=told), sole_builder(tmp_path):
        pass
    process.kill()
    process.communicate(timeout=10)
    with sole_builder(tmp_path):  # the dead hold nothing
        assert (tmp_path / "builder.pid").read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / "builder.pid").exists()
