"""`atlas train`: dictionaries from a spec."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atlas.cli.asked import json_option, print_answer

if TYPE_CHECKING:
    from rich.live import Live

    from workers.training.run import Progress

__all__ = ["train"]

EVERY = 30.0  # seconds between plain lines


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the sets go; default, SPEC's name here.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:0: of the dictionaries.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads; default, the number of cores.")
@click.option("--bf16/--float32", default=False, show_default=True, help=(
    "Choose latents by bfloat16 products (their values stay float32): faster where the processor has them."
))  # fmt: skip
@click.option("--autocast", is_flag=True, help="Run the model's products in bfloat16 while harvesting.")
@json_option
def train(
    spec: Path,
    out: Path | None,
    device: str,
    threads: int | None,
    bf16: bool,
    autocast: bool,
    as_json: bool,
) -> None:
    """Train the dictionaries that SPEC (YAML) describes: transcoders, skip-transcoders, autoencoders.

    Activations are harvested in a stream; every dictionary takes each batch. A run that was stopped goes on
    by the same command. Each set is a folder under --out that `atlas build`, `atlas evaluate` and
    `atlas dictionary inspect` read.

    \b
    atlas train transcoders.yaml --out trained --bf16
    """
    from atlas.training import run_training
    from ingest.training_spec import load_training_spec

    wanted = load_training_spec(spec)
    display = _Display()
    try:
        trained = run_training(
            wanted,
            out or Path(spec.stem),
            device=device,
            threads=threads or os.cpu_count() or 1,
            autocast=autocast,
            bf16=bf16,
            watch=display,
        )
    except KeyboardInterrupt as interrupt:
        interrupt.resumable = True  # type: ignore[attr-defined]
        raise
    finally:
        display.close()
    print_answer(trained.answer(), as_json)


class _Display:
    """How far the run is, and of each dictionary what matters."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._told = self._begin - EVERY + 2.0
        self._live: Live | None = None

    def __call__(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
            return
        now = time.monotonic()
        if now - self._told >= EVERY:
            self._told = now
            print("\n".join(_lines(progress, now - self._begin, most=6)), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the live lines away."""
        if self._live is not None:
            self._live.stop()

    def _draw(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        lines = _lines(progress, time.monotonic() - self._begin, most=30)
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            console = Console(file=sys.stderr, highlight=False)
            self._live = Live(text, console=console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)


def _lines(progress: Progress, seconds: float, most: int) -> list[str]:
    from atlas.cli.progress import duration

    share = progress.rows / progress.total
    parts = [f"{progress.doing}, {100 * share:.0f} %", f"{progress.rows:,} of {progress.total:,} tokens"]
    if progress.rows_per_second > 0:
        parts.append(f"{progress.rows_per_second:,.0f} tokens/s")
        left = (progress.total - progress.rows) / progress.rows_per_second
        parts.append(f"about {duration(left)} left")
    lines = [f"train: {', '.join(parts)}, {duration(seconds)}"]
    for trainee in progress.trainees[:most]:
        if trainee.steps:
            lines.append(
                f"  {trainee.job.name}: FVU {trainee.fvu:.3f}, L0 {trainee.l0:.1f}, {trainee.dead(100_000)}"
                f" quiet for 100,000 tokens, {trainee.revived} begun anew"
            )
    if len(progress.trainees) > most:
        lines.append(f"  and {len(progress.trainees) - most} more")
    return lines
