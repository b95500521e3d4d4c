"""Opening the embedded engine's database.

The first one in a process imports the engine's native half. A Ctrl-C during that import is not raised: the
engine takes it for a half that is missing, and its error says so. So it waits until the database is open.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ladybug

__all__ = ["open_database"]


def open_database(path: Path, memory: int, *, read_only: bool = False) -> ladybug.Database:
    """Opens or makes a database. memory: of its buffers, in bytes. Raises RuntimeError as the engine does."""
    with _interrupt_waits():
        return ladybug.Database(path, read_only=read_only, buffer_pool_size=memory)


@contextmanager
def _interrupt_waits() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
