"""Functions are compiled where nothing can be kept on disk, too."""

from collections.abc import Callable
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


def test_with_a_place_it_is_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "functions.py"
    source.write_text("def double(x):\n    return 2 * x\n")
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    assert compiled()(names["double"])(21) == 42
    assert list((tmp_path / "__pycache__").glob("functions.double-*.nbc"))
