"""The command line in processes of its own, forked from a server that has imported what a build needs: real
processes, to be killed or run as another user, without importing torch for each.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Program"]

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["atlas.building", "atlas.cli.build", "atlas.cli.progress", "atlas.api", "atlas.load", "workers.build",
     "transformers.models.llama.modeling_llama", "transformer_lens.model_bridge"]
)  # fmt: skip


def _run(arguments: Sequence[str], said: Path | None, first: Callable[[], object] | None) -> None:
    output = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from atlas.cli import main

    if first is not None:
        first()
    print("started", flush=True)
    main(arguments)


class Program:
    """A running command. said: where its output goes; first: what its process does before, to itself."""

    def __init__(
        self, *arguments: str | Path, said: Path | None = None, first: Callable[[], object] | None = None
    ) -> None:
        self.process = _SERVER.Process(target=_run, args=(list(map(str, arguments)), said, first))
        self.process.start()

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it still runs after so many seconds."""
        self.process.join(timeout)
        return self.process.exitcode

    def kill(self) -> None:
        """`kill -9`; it is gone when this returns."""
        self.process.kill()
        self.process.join()
