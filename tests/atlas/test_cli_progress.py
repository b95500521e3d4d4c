"""Progress: nothing for what is quick, plain lines where no terminal is, no control codes in them."""

from __future__ import annotations

import io
import time

import pytest

from atlas.cli import progress
from workers.plan import Step
from workers.progress import Running, Snapshot


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.05)


def test_quick_work_says_nothing(capsys):
    with progress.counting("quick") as count:
        count(1, 2, "layers")
    assert capsys.readouterr().err == ""


def test_slow_work_says_how_far_it_is_even_when_it_reports_nothing(capsys, impatient):
    with progress.counting("opening"):
        time.sleep(0.2)
    silent = capsys.readouterr().err.splitlines()
    assert silent and all(line.startswith("opening: ") for line in silent)
    with progress.counting("checking") as count:
        count(1, 4, "layers")
        time.sleep(0.2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("checking: 25 %, layers, ") and line.endswith(" left")


def test_work_that_fails_leaves_no_thread_that_talks(capsys, impatient):
    with pytest.raises(RuntimeError), progress.counting("failing"):
        raise RuntimeError
    capsys.readouterr()
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_a_plan_tells_steps_and_time_left(impatient):
    stream = io.StringIO()
    display = progress.Display("computing", stream)
    time.sleep(0.06)
    display(Snapshot((Running(Step("direct", 1), 1, 2, "tiles", 3.0),), 4, 1, 9, 65.0, 190.0))
    display.close()
    text = stream.getvalue()
    assert text == "computing: 4 of 9 steps (1 from before), 1 min 05 s, about 3 min 10 s left\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (7260, "2 h 01 min")]
)
def test_durations(seconds, text):
    assert progress.duration(seconds) == text
