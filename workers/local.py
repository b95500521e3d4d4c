"""The executor in this process: n steps at once in threads, within a budget of memory."""

import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import psutil

from workers.artifacts import Artifacts
from workers.plan import Event, Failed, Finished, Progressed, Started, Stopped, perform
from workers.steps import Cancelled, Context, Registry, Step

__all__ = ["LocalExecutor", "SharedValues"]

T = TypeVar("T")


class SharedValues:
    """What steps of one process share (a model, a layer's dictionary), up to a number of bytes.

    The least recently used values go first; a value that a step still holds lives until it lets go.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[object, tuple[Future[Any], int]] = OrderedDict()

    def get(self, key: object, make: Callable[[], T], memory: int) -> T:
        """The value under the key; made once, however many threads ask. Raises what `make` raises."""
        with self._lock:
            future, _ = self._values.get(key, (None, 0))
            mine = future is None
            if future is None:
                future = Future()
                self._values[key] = (future, memory)
                self._used += memory
                self._evict(key)
            else:
                self._values.move_to_end(key)
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                with self._lock:
                    if self._values.get(key, (None, 0))[0] is future:
                        self._used -= self._values.pop(key)[1]
                future.set_exception(error)
        return future.result()

    def _evict(self, newest: object) -> None:
        for key in list(self._values):
            if self._used <= self._limit or key == newest:
                return
            if self._values[key][0].done():
                self._used -= self._values.pop(key)[1]


class LocalExecutor:
    """Runs up to `workers` steps at once, each in a thread of its own.

    workers: default, the number of cores; what the steps compute with should then use one thread each.
    memory: bytes that the running steps may need together by `Needs.memory`; default, 7/10 of what is
    available now. A step that needs more than all of it runs alone. Steps begin in the order submitted.
    cached: bytes that `Context.cached` keeps, in `shared`; default, a quarter of `memory`, 2 GB at most.
    """

    def __init__(
        self,
        registry: Registry,
        artifacts: Artifacts,
        workers: int | None = None,
        device: str = "cpu",
        *,
        memory: int | None = None,
        cached: int | None = None,
    ) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._registry, self._artifacts, self._device = registry, artifacts, device
        self._memory = memory or psutil.virtual_memory().available * 7 // 10
        self.shared = SharedValues(cached or min(self._memory // 4, 2 << 30))
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued: deque[tuple[Step, Mapping[str, Path]]] = deque()
        self._running: dict[str, int] = {}  # step -> the memory that it needs
        self._stop = threading.Event()

    def submit(self, step: Step, sources: Mapping[str, Path]) -> None:
        """Queues a step; it begins when a thread and its memory are free."""
        with self._lock:
            if not self._running and not self._queued:
                self._stop = threading.Event()  # what was cancelled is over: a new plan begins
            self._queued.append((step, sources))
            self._begin()

    def poll(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout` seconds for the first event."""
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def cancel(self) -> None:
        """Drops what is queued; running steps stop where they next tell their progress."""
        with self._lock:
            self._stop.set()
            while self._queued:
                self._events.put(Stopped(self._queued.popleft()[0].name))

    def _begin(self) -> None:
        """Starts queued steps while there is room. In order: a large step is not overtaken for ever."""
        while self._queued and len(self._running) < self.workers:
            step, sources = self._queued[0]
            if self._running and sum(self._running.values()) + step.needs.memory > self._memory:
                return
            self._queued.popleft()
            self._running[step.name] = step.needs.memory
            # A daemon: after a second Ctrl-C the process does not wait for it; what it wrote is swept later.
            threading.Thread(
                target=self._run, args=(step, sources, self._stop), name=str(step), daemon=True
            ).start()

    def _run(self, step: Step, sources: Mapping[str, Path], stop: threading.Event) -> None:
        def report(done: float, total: float, unit: str) -> None:
            self._events.put(Progressed(step.name, done, total, unit))

        context = Context(self._device, 1, stop, report, self.shared)
        self._events.put(Started(step.name))
        outcome: Event
        try:
            perform(step, self._registry, self._artifacts, sources, context)
            outcome = Finished(step.name)
        except Cancelled:
            outcome = Stopped(step.name)
        except BaseException as error:  # MemoryError and SystemExit too: a step ends, the process does not
            outcome = Failed(step.name, error)
        with self._lock:
            del self._running[step.name]
            self._events.put(outcome)
            self._begin()
