"""The house: imports go one way, look-ups load nothing heavy, modules stay small, locks are whole."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("ingest", "workers", "atlas", "queries")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

SCHEMA = ("atlas.schema", "atlas.columns", "atlas.graph", "atlas.artifact_tables", "atlas.errors")
# What a module under the first name may import of ours. Everything else in atlas is the roof and may import
# all; since no one below may import it, nothing goes round.
MAY_IMPORT = {
    "ingest": ("ingest",),
    "workers": ("workers", "ingest", "atlas.schema"),
    "queries": ("queries", "atlas.schema", "atlas.store", "atlas.errors"),
    "atlas.store": ("atlas.store", "atlas.folder", *SCHEMA),
    "atlas.folder": SCHEMA,
    **dict.fromkeys(SCHEMA, SCHEMA),
    "atlas.errors": ("ingest.errors",),  # how any message is shown
}

HEAVY = {
    *("torch", "transformers", "transformer_lens", "numba", "scipy", "pandas", "networkx", "datasets"),
    *("neo4j", "celery", "redis", "fastapi", "uvicorn"),
}

PIN = r"^([a-z0-9][\w.-]*?)(?:\[.*\])?=="


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {module_name(path) for path in MODULES}


def imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module of ours that the source imports, at its top or inside a function."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            found = [name if name in NAMES else base for name in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            found = [value for value in constants if isinstance(value, str)]
        yield from (name for name in found if name.split(".")[0] in ROOMS)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports that go the wrong way."""
    for prefix, allowed in MAY_IMPORT.items():
        if within(module, (prefix,)):
            return [name for name in imported(source, module, is_package) if not within(name, allowed)]
    return []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_one_way(path):
    assert wrong_imports(path.read_text(encoding="utf-8"), module_name(path), path.stem == "__init__") == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("ingest.models", "from workers.plan import Step", ["workers.plan"]),
        ("workers.weights", "def f():\n    import atlas.store.embedded", ["atlas.store.embedded"]),
        ("workers.weights", "from atlas import store, schema", ["atlas.store"]),
        ("workers.weights", "from ..atlas.api import open", ["atlas.api"]),
        ("workers.weights", "importlib.import_module('atlas.load')", ["atlas.load"]),
        ("workers.weights", "import torch\nfrom ingest.errors import InputError", []),
        ("atlas.store.embedded", "from atlas import api", ["atlas"]),
        ("atlas.store.embedded", "from .. import load\nfrom .guard import check", ["atlas"]),
        ("queries.paths", "import atlas.store\nimport atlas.cli", ["atlas.cli"]),
        ("atlas.cli.edges", "import workers.plan, queries.paths, ingest.spec", []),
    ],
)
def test_a_wrong_import_is_seen(module, source, wrong, monkeypatch):
    for missing in ("atlas.api", "atlas.load"):  # whether they are built yet is not what is asked here
        monkeypatch.setitem(globals(), "NAMES", NAMES - {missing})
    assert wrong_imports(source, module) == wrong


def loaded_by(code: str) -> set[str]:
    """The top-level modules that are loaded when a fresh process has run the code."""
    report = "import sys, json; print('\\n' + json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["atlas", "atlas.schema", "atlas.store", "ingest.spec", "workers.plan"])
def test_light_modules_load_nothing_heavy(module):
    assert loaded_by(f"import {module}") & HEAVY == set()


def test_help_loads_nothing_heavy():
    code = """
import click
from atlas.cli.program import program

with click.Context(program, info_name="atlas") as context:
    names = program.list_commands(context)
    assert {"build", "edges", "query"} <= set(names)
    for command in [program, *(program.get_command(context, name) for name in names)]:
        assert "Usage:" in command.get_help(click.Context(command, parent=context))
"""
    assert loaded_by(code) & HEAVY == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_is_one_thing(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, "split it: it is two things"
    vague = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "base"}
    assert not vague & set(path.relative_to(ROOT).with_suffix("").parts), "name it after what it holds"


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-demo.lock"])
def test_a_lock_pins_hashes_and_names_no_address(lock):
    text = (ROOT / lock).read_text(encoding="utf-8")
    pins = re.findall(PIN + r"\S+.*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(pins) == len(lines) > 0
    assert not re.search(r"\w+://|--(extra-)?index-url|--find-links", text)


def test_the_lock_holds_every_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in declared}
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = set(re.findall(PIN, text, re.MULTILINE))
    assert names <= locked, "make lock"
