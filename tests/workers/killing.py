"""Kills a building process at random instants and sees that nothing of it shows afterwards.

For anything that builds a folder and goes on where it stopped when it is started again.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Attempt", "Kills", "Reached", "files_of", "kill_and_resume", "starts"]


class Attempt(Protocol):
    """A building process that was started."""

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it still runs after so many seconds."""
        ...

    def kill(self) -> None:
        """`kill -9`; it is gone when this returns."""
        ...


Reached = Callable[[Path, float], bool]
"""Whether an attempt that builds into a folder, and began at that time.time(), has come to a stage."""


@dataclass(frozen=True)
class Kills:
    """What was done: kills by the last stage that was reached (0: none yet), and how often a build ended
    between kills."""

    at_stage: Mapping[int, int]
    completed: int
    seconds_undisturbed: float

    @property
    def killed(self) -> int:
        """How often the process was killed."""
        return sum(self.at_stage.values())


class _Program:
    """A command in a process of its own, with what it starts itself."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def starts(
    command: Callable[[Path], Sequence[str]], env: Mapping[str, str] | None = None
) -> Callable[[Path], Attempt]:
    """Starts the command that builds into a given folder."""
    return lambda folder: _Program(command(folder), env)


def files_of(folder: Path, ignore: Callable[[str], bool] = lambda relative: False) -> dict[str, str]:
    """Relative path -> sha256 of every file under a folder (empty folders count as ending in '/')."""
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if ignore(relative):
            continue
        if path.is_file():
            found[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir() and not any(path.iterdir()):
            found[relative + "/"] = ""
    return found


def kill_and_resume(
    start: Callable[[Path], Attempt],
    folder: Path,
    *,
    kills: int,
    seed: int,
    stages: Sequence[Reached] = (),
    prepare: Callable[[Path], object] = lambda target: None,
    contents: Callable[[Path], object] = files_of,
    check: Callable[[Path], None] = lambda target: None,
    timeout: float = 300,
) -> Kills:
    """Builds once undisturbed, then again and again under `kill -9`, and compares.

    start: begins a build into a given folder. folder: an empty place for two such folders. stages: what a
    build comes to, in order; the kills are shared out among them and the time before the first, and fall
    uniformly into the time that the undisturbed build took from there to the next. prepare: puts what is
    there before a build. contents: what must be equal in the end. check: called after each kill, on what
    the dead process left. Where a build ends before its kill it must equal the undisturbed one, and a new
    one begins.
    """
    reference, target = folder / "reference", folder / "target"
    prepare(reference)
    began = time.time()
    first = start(reference)
    reached = [_await(first, stage, reference, began, timeout) - began for stage in stages]
    _finish(first, timeout, "the undisturbed build")
    whole = time.time() - began
    lengths = [after - before for before, after in zip([0.0, *reached], [*reached, whole], strict=True)]
    expected = contents(reference)
    _finish(start(reference), timeout, "a second run of the finished build")
    assert contents(reference) == expected, "a second run of a finished build changed something"

    draw = random.Random(seed)
    prepare(target)
    at_stage = dict.fromkeys(range(len(lengths)), 0)
    completed = 0
    while sum(at_stage.values()) < kills:
        aim = min(at_stage, key=lambda stage: (at_stage[stage], stage))
        began = time.time()
        attempt = start(target)
        if aim:
            _await(attempt, stages[aim - 1], target, began, timeout)
        code = attempt.wait(draw.uniform(0, lengths[aim]))
        if code is None:
            attempt.kill()
            at_stage[max((n + 1 for n, stage in enumerate(stages) if stage(target, began)), default=0)] += 1
            check(target)
            continue
        assert code == 0, f"the build ended by itself with {code} after {sum(at_stage.values())} kills"
        completed += 1
        assert contents(target) == expected, f"build {completed}, after {at_stage} kills, came out different"
        shutil.rmtree(target)
        prepare(target)
    _finish(start(target), timeout, f"the last build, after {at_stage} kills,")
    assert contents(target) == expected, f"the last build, after {at_stage} kills, came out different"
    return Kills(at_stage, completed, whole)


def _finish(attempt: Attempt, timeout: float, which: str) -> None:
    code = attempt.wait(timeout)
    if code is None:
        attempt.kill()
    assert code == 0, f"{which} ended with {code}"


def _await(attempt: Attempt, stage: Reached, target: Path, began: float, timeout: float) -> float:
    """The time at which an attempt has come to a stage, or has ended."""
    while not stage(target, began) and attempt.wait(0.001) is None:
        if time.time() > began + timeout:
            attempt.kill()
            raise AssertionError(f"a stage was not reached within {timeout} s")
    return time.time()
