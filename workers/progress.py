"""How far a plan is, as a terminal, a page or a log can show it, and how long it still takes.

A step says beforehand how long it may take (`Needs.seconds`); steps of its kind that have finished say how
long they did. The time left is the work left, in calibrated seconds, over the steps that run at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workers.steps import Step

__all__ = ["Display", "Pace", "Running", "Snapshot"]


@dataclass(frozen=True)
class Running:
    """One running step: done of total in its unit (total 0: it has not told yet), seconds since it began."""

    step: Step
    done: float
    total: float
    unit: str
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """A plan at one moment.

    finished: steps whose result is there, reused ones among them. total: steps known now; it grows where a
    step expands. seconds: since the plan began. seconds_left: None while nothing tells.
    """

    running: tuple[Running, ...]
    finished: int
    reused: int
    total: int
    seconds: float
    seconds_left: float | None


Display = Callable[[Snapshot], None]


class Pace:
    """Learns how long steps take from those that have finished."""

    def __init__(self) -> None:
        self._guessed: dict[str, float] = defaultdict(float)
        self._measured: dict[str, float] = defaultdict(float)
        self._count: dict[str, int] = defaultdict(int)

    def learn(self, step: Step, seconds: float) -> None:
        """A step took this long."""
        self._guessed[step.kind] += step.needs.seconds
        self._measured[step.kind] += seconds
        self._count[step.kind] += 1

    def expected(self, step: Step) -> float | None:
        """Seconds that the step should take from its beginning; None while nothing tells.

        By its guess times what steps of its kind took of theirs, or else of all kinds; without a guess,
        what steps of its kind took on average.
        """
        kind = step.kind
        if step.needs.seconds > 0:
            guessed, measured = self._guessed[kind], self._measured[kind]
            if guessed <= 0:
                guessed, measured = sum(self._guessed.values()), sum(self._measured.values())
            return step.needs.seconds * (measured / guessed if guessed > 0 else 1.0)
        return self._measured[kind] / self._count[kind] if self._count[kind] else None

    def left(self, running: Iterable[Running], waiting: Iterable[Step], at_once: int) -> float | None:
        """Seconds until all of these have finished, `at_once` steps at a time; None while nothing tells."""
        work, longest = 0.0, 0.0
        for one in running:
            share = one.done / one.total if one.total > 0 else 0.0
            expected = self.expected(one.step)
            if share > 0.05:  # the step itself tells better than its guess, once it is under way
                seconds = one.seconds * (1 - share) / share
            elif expected is None:
                return None
            else:
                seconds = max(expected - one.seconds, 0.0)
            work, longest = work + seconds, max(longest, seconds)
        for step in waiting:
            expected = self.expected(step)
            if expected is None:
                return None
            work, longest = work + expected, max(longest, expected)
        return max(work / max(at_once, 1), longest)
