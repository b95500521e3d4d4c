"""The plan of steps: which step may run, what is finished already, what follows from it.

`run_plan` walks the graph of steps and hands what is ready to an executor; the executor only runs steps.
What is finished is read from the artifact folder, nothing else is remembered: a plan that was killed goes on
where it stopped, and one that has run does nothing.

The pieces that a step's author needs stand in `workers.steps` and are offered here too.
"""

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from ingest.errors import InputError
from workers.artifacts import Artifacts, disk_errors
from workers.graph import Graph
from workers.progress import Display, Pace, Running, Snapshot
from workers.steps import Cancelled, Context, Done, Expand, Needs, Registry, Step, StepFunction, step_function

__all__ = [
    "Cancelled",
    "Context",
    "Done",
    "Event",
    "Executor",
    "Expand",
    "Failed",
    "Finished",
    "Needs",
    "PlanInterrupted",
    "Progressed",
    "Registry",
    "Report",
    "Started",
    "Step",
    "StepFailed",
    "StepFunction",
    "Stopped",
    "perform",
    "run_plan",
]


@dataclass(frozen=True)
class Started:
    """A step began to run."""

    name: str


@dataclass(frozen=True)
class Progressed:
    """How far a running step is."""

    name: str
    done: float
    total: float
    unit: str


@dataclass(frozen=True)
class Finished:
    """A step's artifact is published."""

    name: str


@dataclass(frozen=True)
class Failed:
    """A step raised; nothing of it is kept."""

    name: str
    error: BaseException


@dataclass(frozen=True)
class Stopped:
    """A step was cancelled, before it began or while it ran; nothing of it is kept."""

    name: str


Event = Started | Progressed | Finished | Failed | Stopped


class Executor(Protocol):
    """What runs steps: in this process, or on other machines. The plan knows nothing else of it."""

    def submit(self, step: Step, sources: Mapping[str, Path]) -> None:
        """Takes a step whose input steps have finished. sources: where its inputs by content hash are."""
        ...

    def poll(self, timeout: float) -> list[Event]:
        """What happened since the last call, in order; waits up to `timeout` seconds for the first event."""
        ...

    def cancel(self) -> None:
        """Forgets what has not begun, asks what runs to stop; every submitted step still ends by an event."""
        ...


class StepFailed(Exception):
    """A step raised something that is not the user's mistake: `__cause__` has it."""

    def __init__(self, step: Step, error: BaseException) -> None:
        super().__init__(f"step '{step}' failed: {type(error).__name__}: {error}".rstrip(": "))
        self.step = step


class PlanInterrupted(KeyboardInterrupt):
    """Ctrl-C came and every running step has stopped. `report` tells what is finished; run again to go on."""

    def __init__(self, report: "Report") -> None:
        super().__init__(f"interrupted: {report.finished} of {len(report.steps)} steps are finished")
        self.report = report


@dataclass(frozen=True)
class Report:
    """What a plan came to.

    steps: all of them, each expansion's after the step that expanded. ran: the names of those that this run
    computed, with their seconds. reused: the names of those found finished.
    """

    steps: tuple[Step, ...]
    ran: Mapping[str, float]
    reused: frozenset[str]
    seconds: float

    @property
    def finished(self) -> int:
        """How many steps have their result."""
        return len(self.ran) + len(self.reused)


def perform(
    step: Step, registry: Registry, artifacts: Artifacts, sources: Mapping[str, Path], context: Context
) -> None:
    """Runs one step to its published artifact: the whole of what an executor does with a step.

    A step whose artifact is there (another worker was faster, a message came twice) does nothing. Raises
    what the step raises, and InputError for a full disk or a folder that cannot be written.
    """
    if artifacts.has(step.name):
        return
    function = step_function(registry, step)
    inputs = {role: sources.get(ref) or artifacts.path(ref) for role, ref in step.inputs.items()}
    with artifacts.writing(step.name) as out:
        context.check_cancelled()
        artifacts.publish(step, out, function(step, inputs, out, context))


def run_plan(
    steps: Iterable[Step],
    executor: Executor,
    artifacts: Artifacts,
    sources: Mapping[str, Path] | None = None,
    display: Display | None = None,
) -> Report:
    """Runs every step whose artifact is missing, and what follows from it.

    sources: content hash -> path of what the steps read from outside. display: called several times a second
    with a `Snapshot`.

    Raises InputError as a step raised it; StepFailed for any other error in a step; PlanInterrupted after
    Ctrl-C, when the running steps have stopped (a second Ctrl-C does not wait for them: KeyboardInterrupt);
    Cancelled where the executor stopped steps by itself; ValueError for inputs that nothing supplies.
    Whatever it raises, finished steps stay finished and nothing is half-written.
    """
    run = _Run(executor, artifacts, sources or {}, display)
    with disk_errors(artifacts.root), _interrupts() as interrupts:
        artifacts.sweep()
        for step in steps:
            run.plan(step)
        for step, role, ref in run.graph.unsupplied():
            raise ValueError(f"step '{step}', input {role} = {ref}: neither a step of the plan nor a source")
        while not run.ended:
            run.advance(stopping=bool(interrupts) or run.failure is not None)
        run.show()
    report = run.report()
    if run.failure is not None:
        step, error = run.failure
        raise error if isinstance(error, InputError) else StepFailed(step, error) from error
    missing = [step for step in report.steps if step.name not in run.graph.done]
    if missing and interrupts:
        raise PlanInterrupted(report)
    if run.stopped:
        raise Cancelled(f"the run was cancelled: {report.finished} of {len(report.steps)} steps are finished")
    if missing:
        raise ValueError(f"steps wait for each other: {', '.join(map(str, missing[:5]))}")
    return report


class _Run:
    """What is under way in one `run_plan`."""

    def __init__(
        self, executor: Executor, artifacts: Artifacts, sources: Mapping[str, Path], display: Display | None
    ) -> None:
        self.graph = Graph(sources)
        self.failure: tuple[Step, BaseException] | None = None
        self.stopped = False
        self._executor, self._artifacts, self._sources, self._display = executor, artifacts, sources, display
        self._roots: list[str] = []
        self._submitted: set[str] = set()
        self._began_at: dict[str, float] = {}
        self._progress: dict[str, Progressed] = {}
        self._ran: dict[str, float] = {}
        self._reused: set[str] = set()
        self._cancelled = False
        self._pace = Pace()
        self._begin = time.monotonic()
        self._at_once = 1
        self._shown = 0.0

    def plan(self, step: Step) -> None:
        """Takes a step into the plan."""
        self._roots.append(step.name)
        if self.graph.add(step) and self._artifacts.has(step.name):
            self._reused.add(step.name)
            self._settle(step.name)

    @property
    def ended(self) -> bool:
        """Whether nothing runs and nothing can."""
        return not self._submitted and (not self.graph.has_ready or self._cancelled)

    def advance(self, *, stopping: bool) -> None:
        """Submits what is ready, or cancels what was submitted; then takes in what has happened."""
        if stopping and not self._cancelled:
            self._cancelled = True
            self._executor.cancel()
        if not self._cancelled:
            for step in self.graph.take_ready():
                self._submitted.add(step.name)
                refs = step.inputs.values()
                self._executor.submit(step, {ref: self._sources[ref] for ref in refs if ref in self._sources})
        for event in self._executor.poll(0.2) if self._submitted else ():
            self._take(event)
        if time.monotonic() - self._shown > 0.1:
            self.show()

    def show(self) -> None:
        """Hands the display the present state."""
        if self._display is None:
            return
        now = self._shown = time.monotonic()
        running = []
        for name, began in self._began_at.items():
            told = self._progress.get(name, Progressed(name, 0, 0, ""))
            running.append(Running(self.graph.steps[name], told.done, told.total, told.unit, now - began))
        self._at_once = max(self._at_once, len(running))
        waiting = (
            step
            for name, step in self.graph.steps.items()
            if name not in self.graph.done and name not in self._began_at
        )
        self._display(
            Snapshot(
                running=tuple(running),
                finished=len(self.graph.done),
                reused=len(self._reused),
                total=len(self.graph.steps),
                seconds=now - self._begin,
                seconds_left=self._pace.left(running, waiting, self._at_once),
            )
        )

    def report(self) -> Report:
        """What has come of it so far."""
        seconds = time.monotonic() - self._begin
        return Report(self.graph.ordered(self._roots), dict(self._ran), frozenset(self._reused), seconds)

    def _settle(self, name: str) -> None:
        """A result is there: takes in what it expanded into, some of which may be there as well."""
        found = [name]
        while found:
            one = found.pop()
            new = self.graph.finish(one, self._artifacts.expansion(one) or ())
            there = [step.name for step in new if self._artifacts.has(step.name)]
            self._reused.update(there)
            found += there

    def _take(self, event: Event) -> None:
        name = event.name
        match event:
            case Started():
                self._began_at[name] = time.monotonic()
            case Progressed():
                self._progress[name] = event
            case Finished() | Failed() | Stopped():
                began = self._began_at.pop(name, time.monotonic())
                self._progress.pop(name, None)
                self._submitted.discard(name)
                if isinstance(event, Finished):
                    self._ran[name] = time.monotonic() - began
                    self._pace.learn(self.graph.steps[name], self._ran[name])
                    self._settle(name)
                elif isinstance(event, Failed):
                    self.failure = self.failure or (self.graph.steps[name], event.error)
                else:
                    self.stopped = True


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The Ctrl-Cs that came, collected instead of raised, so that none falls between two changes of state.

    The second one is raised as KeyboardInterrupt. Outside the main thread, or where the process ignores
    Ctrl-C (in the background), nothing changes.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield came
        return

    def take(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        if len(came) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, take)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
