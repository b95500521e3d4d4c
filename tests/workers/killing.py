"""Kills a building command at random instants and sees that nothing of it shows afterwards.

For any command that builds a folder and goes on where it stopped when it is started again.
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

__all__ = ["Kills", "files_of", "kill_and_resume"]


@dataclass(frozen=True)
class Kills:
    """What was done: how often the command was killed, how often a build ended between kills."""

    killed: int
    completed: int
    seconds_undisturbed: float
    seconds_idle: float


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
    command: Callable[[Path], Sequence[str]],
    folder: Path,
    *,
    kills: int,
    seed: int,
    contents: Callable[[Path], object] = files_of,
    check: Callable[[Path], None] = lambda target: None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> Kills:
    """Builds once undisturbed, then again and again under `kill -9`, and compares.

    command: the arguments that build into a given folder. folder: an empty place for two such folders.
    contents: what must be equal in the end. check: called after each kill, on what the dead process left.
    The instants are uniform over the time that an undisturbed build takes beyond a start that finds nothing
    to do. Where a build ends before its kill it must equal the undisturbed one, and a new one begins.
    """
    reference, target = folder / "reference", folder / "target"

    def build(where: Path) -> float:
        began = time.monotonic()
        done = subprocess.run(
            command(where), env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command(where)} failed: {done.stdout}{done.stderr}"
        return time.monotonic() - began

    whole = build(reference)
    expected = contents(reference)
    idle = build(reference)
    assert contents(reference) == expected, "a second run of a finished build changed something"

    draw = random.Random(seed)
    killed = completed = 0
    while killed < kills:
        process = subprocess.Popen(
            command(target),
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(draw.uniform(0.7 * idle, whole))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            check(target)
            continue
        assert code == 0, f"{command(target)} ended by itself with {code} after {killed} kills"
        completed += 1
        assert contents(target) == expected, f"build {completed}, after {killed} kills, came out different"
        shutil.rmtree(target)
    build(target)
    assert contents(target) == expected, f"the last build, after {killed} kills, came out different"
    return Kills(killed, completed, whole, idle)
