"""What a plan is made of: steps, their answers, and what a running step is told.

A step is a pure function of its inputs. Its name is the hash of what decides its result:

    name = sha256(canonical JSON of {kind, version, params, inputs})

so the same step asked for twice, today or on another machine, is the same artifact.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

__all__ = [
    "Cancelled",
    "Context",
    "Done",
    "Expand",
    "Needs",
    "Registry",
    "Step",
    "StepFunction",
    "canonical_json",
    "step_function",
]

T = TypeVar("T")


class Cancelled(Exception):
    """Raised inside a step that was asked to stop. A step lets it pass; nothing of it is kept."""


def canonical_json(value: object) -> str:
    """One text for one value: keys sorted, no spaces, no NaN or infinity.

    Raises ValueError or TypeError for what JSON cannot hold (NaN, tensors, numpy numbers).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Needs:
    """What a step needs to run. No part of its identity.

    queue: which workers may take it ('cpu', 'gpu', 'load').
    memory: bytes it holds at its peak beyond what is cached.
    seconds: a guess of how long it takes; only the ratio between steps of a kind matters.
    """

    queue: str = "cpu"
    memory: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Step:
    """One unit of work, 5 to 120 s by default.

    kind, version: which function of the registry; the version is raised when its results change.
    params: what JSON can hold; kept as a private copy.
    inputs: role -> the name of another step, or the content hash ('sha256:…') of a source.
    needs, title: for the scheduler and for people; no part of the name.

    A step whose input X answers with Expand waits for X and for all that X expanded into, and finds under
    that role X's folder: `Artifacts.expanded` lists the artifacts of the expansion from there. Steps *of*
    the expansion may have X as an input too: they wait for X's own folder alone.
    """

    kind: str
    version: int
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    needs: Needs = field(default_factory=Needs)
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", json.loads(canonical_json(self.params)))
        object.__setattr__(self, "inputs", dict(self.inputs))

    @cached_property
    def name(self) -> str:
        """64 hex digits."""
        identity = {"kind": self.kind, "version": self.version, "params": self.params, "inputs": self.inputs}
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.title or f"{self.kind} {self.name[:8]}"

    def as_json(self) -> dict[str, Any]:
        """The step as JSON can hold it: what a message or an expansion's list carries."""
        return {
            "kind": self.kind,
            "version": self.version,
            "params": self.params,
            "inputs": self.inputs,
            "needs": {"queue": self.needs.queue, "memory": self.needs.memory, "seconds": self.needs.seconds},
            "title": self.title,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Step":
        """The step that `as_json` wrote."""
        return cls(**{**value, "needs": Needs(**value["needs"])})


@dataclass(frozen=True)
class Done:
    """A step's answer: its files are in its folder; figures are small facts about them, kept as JSON."""

    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expand:
    """A step's answer: what follows from it, not known before it ran. It may have written files as well."""

    steps: tuple[Step, ...]


class Cache(Protocol):
    """What `Context.cached` needs of the executor's process."""

    def get(self, key: object, make: Callable[[], T], memory: int) -> T:
        """The value kept under the key, or make's, then kept."""
        ...


@dataclass(frozen=True)
class Context:
    """What a running step may know of where it runs: no terminal, no store, no global.

    device: 'cpu' or 'cuda:0'. threads: how many threads the step's own arithmetic may use.
    """

    device: str
    threads: int
    stop: threading.Event
    report: Callable[[float, float, str], None]
    cache: Cache

    def progress(self, done: float, total: float, unit: str = "") -> None:
        """Tells how far the step is. Raises Cancelled where the step was asked to stop."""
        self.check_cancelled()
        self.report(done, total, unit)

    @property
    def cancelled(self) -> bool:
        """Whether the step was asked to stop."""
        return self.stop.is_set()

    def check_cancelled(self) -> None:
        """Raises Cancelled where the step was asked to stop. Call it at least every few seconds."""
        if self.stop.is_set():
            raise Cancelled

    def cached(self, key: object, make: Callable[[], T], memory: int = 64 << 20) -> T:
        """`make()`, or what it gave to an earlier step of this process under the same key.

        memory: the value's size in bytes; the least recently used values go when the cache is full. Put the
        content hash of what was read into the key. The value is shared between threads: do not change it.
        """
        return self.cache.get(key, make, memory)


StepFunction = Callable[[Step, Mapping[str, Path], Path, Context], Done | Expand]

#: kind -> (version, function)
Registry = Mapping[str, tuple[int, StepFunction]]


def step_function(registry: Registry, step: Step) -> StepFunction:
    """The function that runs the step.

    Raises LookupError when this process does not have it in the step's version: planner and worker run
    different code.
    """
    version, function = registry.get(step.kind, (None, None))
    if function is None or version != step.version:
        have = "not" if function is None else f"version {version}"
        raise LookupError(
            f"step '{step}' wants {step.kind} version {step.version}, this worker has {have}: "
            "install the same circuit-atlas on both"
        )
    return function
