"""Progress on stderr: live on a terminal, a plain line now and then elsewhere, nothing for what is quick."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from workers.progress import Snapshot

__all__ = ["Display", "counting", "showing"]

QUIET = 2.0  # seconds before the first line
EVERY = 30.0  # seconds between plain lines
LINES = 4  # running steps shown at once

Count = Callable[[float, float, str], None]


def duration(seconds: float) -> str:
    """12 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Display:
    """Shows a running plan: steps done, what runs and how far it is, the time left. A callable for
    `run_plan`.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        from rich.console import Console

        self._title = title
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live: Live | None = None
        self._begin = self._told = time.monotonic()

    def __call__(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if now - self._begin < QUIET:
            return
        if self._console.is_terminal:
            self._draw(snapshot)
        elif now - self._told >= EVERY:
            self._told = now
            self._console.print(f"{self._title}: {_summary(snapshot)}", markup=False)

    def close(self) -> None:
        """Takes the live lines away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, snapshot: Snapshot) -> None:
        from rich.live import Live
        from rich.text import Text

        lines = [f"{self._title}: {_summary(snapshot)}"]
        for one in snapshot.running[:LINES]:
            share = f"{100 * one.done / one.total:3.0f} %" if one.total > 0 else "     "
            lines.append(f"  {share}  {one.step}  {duration(one.seconds)}")
        if len(snapshot.running) > LINES:
            lines.append(f"         and {len(snapshot.running) - LINES} more")
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(text, console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)


def _summary(snapshot: Snapshot) -> str:
    left = "" if snapshot.seconds_left is None else f", about {duration(snapshot.seconds_left)} left"
    reused = f" ({snapshot.reused} from before)" if snapshot.reused else ""
    return f"{snapshot.finished} of {snapshot.total} steps{reused}, {duration(snapshot.seconds)}{left}"


@contextmanager
def showing(title: str) -> Iterator[Display]:
    """A display for `run_plan`, taken away at the end."""
    display = Display(title)
    try:
        yield display
    finally:
        display.close()


class _Counter:
    """How far one piece of work is, as a line that tells the time even while the work tells nothing."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begin = time.monotonic()
        self._state: tuple[float, float, str] = (0, 0, "")

    def __call__(self, done: float, total: float = 0, unit: str = "") -> None:
        self._state = (done, total, unit)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def line(self) -> str:
        done, total, unit = self._state
        parts = [f"{100 * done / total:.0f} %"] if total > 0 else []
        parts += [unit] if unit else []
        parts.append(duration(self.seconds))
        if total > 0 and done > 0.02 * total:
            parts.append(f"about {duration(self.seconds * (total - done) / done)} left")
        return f"{self._title}: {', '.join(parts)}"

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self.line() if self.seconds >= QUIET else "", no_wrap=True, overflow="ellipsis")


@contextmanager
def counting(title: str) -> Iterator[Count]:
    """A function (done, total, unit) that shows how far one piece of work is."""
    counter = _Counter(title)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr, highlight=False)
        with Live(counter, console=console, transient=True, refresh_per_second=4):
            yield counter
        return
    over = threading.Event()

    def tell() -> None:
        wait = QUIET
        while not over.wait(wait):
            print(counter.line(), file=sys.stderr, flush=True)
            wait = EVERY

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        over.set()
        thread.join()
