"""Functions are compiled where nothing can be kept on disk, too."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import njit

from workers.compiled import compiled


def _function_of_a_place_that_cannot_be_written() -> Callable[[int], int]:
    names: dict[str, Any] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "/proc/no/such/place.py", "exec"), names)
    return names["double"]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder for a user's cache: even the superuser makes none in /proc."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/proc/no/such")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


def test_without_a_place_for_the_cache_it_compiles_all_the_same(nowhere: None) -> None:
    function = _function_of_a_place_that_cannot_be_written()
    with pytest.raises(RuntimeError, match="cannot cache"):
        njit(cache=True)(function)
    assert compiled()(function)(21) == 42


def test_with_a_place_it_is_kept(tmp_path: Path) -> None:
    """In a process of its own, as a module's functions are: importing it, calling it, finding it kept."""
    module = "from workers.compiled import compiled\n\n@compiled()\ndef double(x):\n    return 2 * x\n"
    (tmp_path / "functions.py").write_text(module)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", "import functions; assert functions.double(21) == 42"]
    subprocess.run(command, check=True, env=os.environ | paths)
    assert list((tmp_path / "__pycache__").glob("functions.double-*.nbc"))
