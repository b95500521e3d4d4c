"""The executor in this process: how many at once, memory, what steps share; and what a display is shown."""

import threading
import time

import pytest

from workers.artifacts import Artifacts
from workers.local import LocalExecutor, SharedValues
from workers.plan import Done, Needs, Step, run_plan
from workers.progress import Pace, Running


class Meter:
    """Counts how many steps run at once."""

    def __init__(self, seconds=0.03):
        self.now = self.most = 0
        self.seconds = seconds
        self.memory = self.most_memory = 0
        self.lock = threading.Lock()

    def __call__(self, step, inputs, out, context):
        with self.lock:
            self.now += 1
            self.memory += step.needs.memory
            self.most = max(self.most, self.now)
            self.most_memory = max(self.most_memory, self.memory)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
            self.memory -= step.needs.memory
        return Done()


def steps(n, memory=0):
    return [Step("meter", 1, {"i": i}, needs=Needs(memory=memory, seconds=1), title=f"{i}") for i in range(n)]


def test_as_many_steps_run_at_once_as_there_are_workers(tmp_path):
    meter = Meter()
    artifacts = Artifacts(tmp_path)
    run_plan(steps(9), LocalExecutor({"meter": (1, meter)}, artifacts, workers=3), artifacts)
    assert meter.most == 3


def test_running_steps_stay_within_the_memory_and_a_larger_one_runs_alone(tmp_path):
    meter = Meter()
    artifacts = Artifacts(tmp_path)
    executor = LocalExecutor({"meter": (1, meter)}, artifacts, workers=8, memory=100)
    large = Step("meter", 1, {"i": 99}, needs=Needs(memory=500))
    run_plan([*steps(6, memory=40), large], executor, artifacts)
    assert meter.most == 2 and meter.most_memory == 500


def test_a_step_knows_its_device_and_threads(tmp_path):
    def tell(step, inputs, out, context):
        return Done({"device": context.device, "threads": context.threads, "cancelled": context.cancelled})

    artifacts, step = Artifacts(tmp_path), Step("tell", 1)
    run_plan([step], LocalExecutor({"tell": (1, tell)}, artifacts, device="cuda:0"), artifacts)
    assert artifacts.figures(step.name) == {"device": "cuda:0", "threads": 1, "cancelled": False}


def test_steps_share_a_value_that_is_made_once(tmp_path):
    made = []

    def use(step, inputs, out, context):
        def make():
            made.append(step.name)
            time.sleep(0.05)
            return "model"

        return Done({"got": context.cached(("model", "hash"), make)})

    artifacts = Artifacts(tmp_path)
    plan = [Step("use", 1, {"i": i}) for i in range(6)]
    run_plan(plan, LocalExecutor({"use": (1, use)}, artifacts, workers=4), artifacts)
    assert len(made) == 1 and artifacts.figures(plan[5].name) == {"got": "model"}


def test_the_least_recently_used_values_go_first():
    made = []
    values = SharedValues(limit=100)

    def get(key, memory=40):
        return values.get(key, lambda: made.append(key) or key, memory)

    assert [get("a"), get("b"), get("a"), get("c"), get("a"), get("b")] == ["a", "b", "a", "c", "a", "b"]
    assert made == ["a", "b", "c", "b"]  # c took b's place, since a was used later
    get("huge", 1000)  # larger than all: alone, until the next one
    get("a")
    assert made == ["a", "b", "c", "b", "huge", "a"]


def test_a_value_that_could_not_be_made_is_tried_again():
    values = SharedValues(limit=100)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        values.get("a", fail, 60)
    assert values.get("a", lambda: 1, 60) == 1
    assert values.get("b", lambda: 2, 30) == 2
    assert values.get("a", lambda: 3, 60) == 1  # the failed one's memory was given back


def test_the_display_sees_what_runs_how_much_is_left_and_the_time(tmp_path):
    def told(step, inputs, out, context):
        for i in range(10):
            context.progress(i, 10, "rows")
            time.sleep(0.02)
        return Done()

    artifacts = Artifacts(tmp_path)
    plan = [Step("told", 1, {"i": i}, needs=Needs(seconds=50), title=f"part {i}") for i in range(4)]
    run_plan(plan[:1], LocalExecutor({"told": (1, told)}, artifacts), artifacts)
    seen = []
    run_plan(plan, LocalExecutor({"told": (1, told)}, artifacts, workers=2), artifacts, display=seen.append)

    assert all(now.total == 4 and now.reused == 1 for now in seen)
    assert [now.finished for now in seen] == sorted(now.finished for now in seen)
    assert seen[-1].finished == 4 and seen[-1].running == () and seen[-1].seconds_left == 0
    running = [one for now in seen for one in now.running]
    assert {str(one.step) for one in running} == {"part 1", "part 2", "part 3"}
    assert any(one.unit == "rows" and 0 < one.done < one.total == 10 for one in running)
    assert max(len(now.running) for now in seen) == 2


def of(kind, seconds):
    return Step(kind, 1, {"s": seconds}, needs=Needs(seconds=seconds))


def test_time_left_follows_what_finished_steps_took():
    pace = Pace()
    assert pace.left([], [of("a", 10), of("a", 30)], at_once=1) == 40  # the guesses themselves
    assert pace.left([], [of("a", 10), of("a", 30)], at_once=2) == 30  # not before the longest
    pace.learn(of("a", 10), 5)
    assert pace.left([], [of("a", 10), of("a", 30)], at_once=1) == 20
    assert pace.left([], [of("b", 10)], at_once=1) == 5  # as the other kinds went
    pace.learn(of("b", 10), 40)
    assert pace.left([], [of("b", 10), of("a", 10)], at_once=1) == 45


def test_a_running_steps_own_progress_tells_better_than_its_guess():
    pace = Pace()
    halfway = Running(of("a", 1000), done=5, total=10, unit="", seconds=7)
    assert pace.left([halfway], [], at_once=1) == 7
    silent = Running(of("a", 10), done=0, total=0, unit="", seconds=4)
    assert pace.left([silent], [], at_once=1) == 6


def test_time_left_is_unknown_while_nothing_tells():
    pace = Pace()
    assert pace.left([], [of("a", 0)], at_once=1) is None
    pace.learn(of("a", 0), 3)
    assert pace.left([], [of("a", 0)] * 2, at_once=1) == 6
