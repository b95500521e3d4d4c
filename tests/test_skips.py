"""In CI a skip is a failure with its reason; elsewhere it is a skip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no server here")
def test_marked(): pass

def test_inside():
    pytest.skip("no file here")

@pytest.mark.hardware
def test_hardware():
    pytest.skip("no GPU here")

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    raise ValueError

def test_good(): pass
"""
MODULE = "import pytest\npytest.importorskip('a_module_that_is_nowhere')\n"


@pytest.mark.parametrize(
    ("ci", "code", "summary"),
    [
        ("true", 1, ["1 failed", "2 errors", "no server here", "no file here", "a_module_that_is_nowhere"]),
        ("", 0, ["1 passed, 4 skipped, 1 xfailed"]),
    ],
)
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "xdist"])
def test_skips(tmp_path, ci, code, summary, workers):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    hardware\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--continue-on-collection-errors", *workers],
        cwd=tmp_path,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
    for expected in summary:
        assert expected in done.stdout
