"""Which steps may run: the graph of a plan, growing where a step expands.

A step's own result being there, and all that it expanded into being there too, are two states: `done` and
`whole`. A step waits until its inputs are whole; a step of an expansion needs the step that expanded to be
done only, or the two would wait for each other.
"""

from collections import defaultdict
from collections.abc import Iterable

from workers.steps import Step

__all__ = ["Graph"]


class Graph:
    """The steps of a plan and what each waits for.

    sources: the content hashes that are no steps. Runs nothing and reads nothing.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self.steps: dict[str, Step] = {}
        self.done: set[str] = set()
        self.whole: set[str] = set()
        self._sources = frozenset(sources)
        self._expansion: dict[str, tuple[str, ...]] = {}
        self._parents: dict[str, set[str]] = defaultdict(set)  # step -> the steps whose expansion lists it
        self._outstanding: dict[str, set[str]] = {}  # done step -> listed steps that are not whole
        self._unmet: dict[str, set[str]] = {}  # step -> inputs that it waits for
        self._waiters: dict[str, list[str]] = defaultdict(list)
        self._ready: list[str] = []

    def add(self, step: Step) -> bool:
        """Puts a step in; False where it is in already."""
        if step.name in self.steps:
            return False
        self.steps[step.name] = step
        inputs = {ref for ref in step.inputs.values() if ref not in self._sources}
        unmet = {ref for ref in inputs if not self._met(step.name, ref)}
        self._unmet[step.name] = unmet
        for ref in unmet:
            self._waiters[ref].append(step.name)
        if not unmet:
            self._ready.append(step.name)
        return True

    def finish(self, name: str, expansion: Iterable[Step] = ()) -> list[Step]:
        """A step's own result is there. Puts in what it expanded into, and returns what of that is new."""
        listed = tuple(expansion)
        self.done.add(name)
        self._expansion[name] = tuple(step.name for step in listed)
        for child in self._expansion[name]:
            self._parents[child].add(name)
        new = [step for step in listed if self.add(step)]
        self._outstanding[name] = {child for child in self._expansion[name] if child not in self.whole}
        self._recheck(name)
        settled = [] if self._outstanding[name] else [name]
        while settled:
            one = settled.pop()
            self.whole.add(one)
            self._recheck(one)
            for parent in self._parents[one]:
                if parent in self._outstanding and parent not in self.whole:
                    self._outstanding[parent].discard(one)
                    if not self._outstanding[parent]:
                        settled.append(parent)
        return new

    @property
    def has_ready(self) -> bool:
        """Whether `take_ready` has something to give."""
        return any(name not in self.done for name in self._ready)

    def take_ready(self) -> list[Step]:
        """The steps that have become ready since the last call, in the order that they were put in."""
        ready, self._ready = self._ready, []
        return [self.steps[name] for name in ready if name not in self.done]

    def unsupplied(self) -> list[tuple[Step, str, str]]:
        """(step, role, input) for each input that is neither a step of the plan nor a source."""
        return [
            (step, role, ref)
            for step in self.steps.values()
            for role, ref in step.inputs.items()
            if ref not in self.steps and ref not in self._sources
        ]

    def ordered(self, roots: Iterable[str]) -> tuple[Step, ...]:
        """The steps in the plan's order, each expansion right after the step that expanded."""
        order: dict[str, Step] = {}
        stack = list(roots)[::-1]
        while stack:
            name = stack.pop()
            if name not in order:
                order[name] = self.steps[name]
                stack.extend(reversed(self._expansion.get(name, ())))
        return tuple(order.values())

    def _recheck(self, ref: str) -> None:
        """Lets go the steps that waited for this input, where it is now what they need."""
        still = []
        for name in self._waiters.pop(ref, ()):
            if self._met(name, ref):
                self._unmet[name].discard(ref)
                if not self._unmet[name]:
                    self._ready.append(name)
            else:
                still.append(name)
        if still:
            self._waiters[ref] = still

    def _met(self, name: str, ref: str) -> bool:
        return ref in self.whole or (ref in self.done and self._within(name, ref))

    def _within(self, name: str, expander: str) -> bool:
        """Whether a step is in another's expansion, or in an expansion of that expansion."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            for parent in self._parents[stack.pop()]:
                if parent == expander:
                    return True
                if parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
        return False
