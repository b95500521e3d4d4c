"""The command line as a person and a program meet it: tables, JSON, errors in one line, exit codes, speed."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atlas.cli import main
from atlas.cli.program import COMMANDS
from tests.atlas.small_atlas import TEXTS, build

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "pandas", "transformers", "numba", "neo4j", "scipy", "networkx", "transformer_lens")
LOOKUPS = (
    ["info"], ["feature", "n1[3]"], ["edges", "n1[3]"], ["edges", "n1[3]", "--up", "--by", "z"],
    ["search", "the"],
    ["head", "1.1"], ["runs"], ["query", "MATCH (f:Feature) RETURN f.key LIMIT 3"], ["info", "--dropped"],
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cli") / "small.atlas", sets=("neurons", "tc"))


@pytest.fixture
def run(small, capsys, monkeypatch):
    """Runs a command on the small atlas: (exit code, stdout, stderr)."""
    monkeypatch.setenv("ATLAS", str(small.path))

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return command


SLOW = (
    "MATCH (a:Feature), (b:Feature), (c:Feature), (d:Feature), (e:Feature)"
    " RETURN sum(a.id + b.id * c.id - d.id * e.id)"
)


def process(arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "atlas", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **env}, timeout=60, check=False,
    )  # fmt: skip


def shown_cells(value) -> set[str]:
    """Every text in a JSON answer that a table must show whole (numbers are rounded there)."""
    if isinstance(value, dict):
        return set().union(*map(shown_cells, value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*map(shown_cells, value)) if value else set()
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("arguments", LOOKUPS, ids=" ".join)
def test_a_table_and_its_json_say_the_same_within_100_columns(run, arguments):
    code, table, _ = run(*arguments)
    assert code == 0
    assert max(map(len, table.splitlines())) <= 100
    assert "\x1b" not in table and all(c.isprintable() or c == "\n" for c in table)
    code, text, _ = run(*arguments, "--json")
    content = json.loads(text)
    assert code == 0 and content
    names = [cell for cell in shown_cells(content) if cell.startswith("smol/") and len(cell) < 40]
    assert [name for name in names if name not in table] == []


def test_numbers_are_signed_aligned_and_rounded_alike(run):
    _, table, _ = run("edges", "n1[3]", "--limit", "5")
    lines = [line for line in table.splitlines() if line.startswith(" smol/")]
    weights = [next(word for word in line.split() if word[0] in "+-" and "." in word) for line in lines]
    ends = {line.index(weight) + len(weight) for line, weight in zip(lines, weights, strict=True)}
    assert len(lines) == 5 and len(ends) == 1
    assert len({len(weight.partition(".")[2]) for weight in weights}) == 1
    _, text, _ = run("edges", "n1[3]", "--limit", "5", "--json")
    exact = [row["weight"] for row in json.loads(text)]
    assert [float(weight) for weight in weights] == pytest.approx(exact, abs=6e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["feature", "n1[99]"], "has the features 0 to 11"),
        (["feature", "L1M3"], "2 features fit"),
        (["edges", "n1[3]", "--via", "9.9"], "no such head"),
        (["edges", "n1[3]", "--limit", "-1"], "--limit"),
        (["edges", "n1[3]", "--type", "SIDEWAYS"], "--type"),
        (["search", "zzz"], "no such token"),
        (["head", "nowhere"], "no head"),
        (["paths", "the", "zzz"], "no such token"),
        (["paths", "the", "the", "--hops", "3..1"], "--hops"),
        (["query", "CREATE (n:Feature {id: 1})"], "CREATE would change the atlas"),
        (["query", "MATCH (n:Feature) RETURN n.nme"], "no property nme"),
        (["query", "MATCH (n:Feature) RETURN n.id LIMIT $k"], "names the parameter $k"),
        (["query", "MATCH (n) RETURN n", "--param", "broken"], "NAME=VALUE"),
        (["query", "MATCH (n) RETURN n", "--param", "a=1", "--param", "a=2"], "given twice"),
        (["query"], "expected a query"),
        (["query", "RETURN 1", "--file", "x"], "not both"),
        (["query", "--file", "no-such-file.cypher"], "cannot be read"),
        (
            ["query", SLOW, "--timeout", "0.05"],
            "stopped",
        ),
        (["info", "--atlas", "no-such.atlas"], "no atlas here"),
        (["remove"], "--run HASH or --model NAME"),
        (["remove", "--run", "zz"], "no such run"),
        (["remove", "--model", "smol"], "--yes"),
        (["export", "out"], "expected a format"),
        (["edgs"], "did you mean edges"),
        (["info", "surplus"], "surplus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(run, arguments, said):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    first, *rest = err.splitlines()
    assert first.startswith("error: ") and said in first
    assert all(line.startswith("try: ") for line in rest)


def test_debug_shows_the_traceback_wherever_it_stands(small):
    for arguments in (["--debug", "feature", "x", "--atlas", str(small.path)], ["feature", "x", "--debug"]):
        done = process(arguments, env={"ATLAS": str(small.path)})
        assert done.returncode != 0 and "Traceback" in done.stderr and "AtlasError" in done.stderr


def test_the_only_atlas_here_is_taken(small, tmp_path, run, monkeypatch):
    monkeypatch.delenv("ATLAS")
    monkeypatch.chdir(tmp_path)
    assert "no *.atlas in this folder" in run("info")[2]
    (tmp_path / "one.atlas").symlink_to(small.path)
    assert run("info")[0] == 0
    (tmp_path / "two.atlas").symlink_to(small.path)
    code, _, err = run("info")
    assert code == 2 and "one.atlas, two.atlas" in err


def test_help_of_everything_names_its_options_and_needs_no_atlas(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATLAS")
    code, text, _ = run("--help")
    assert code == 0 and all(name in text for name in COMMANDS)
    for name in COMMANDS:
        if name == "demo":
            continue  # comes with the demo
        code, text, _ = run(name, "--help")
        assert code == 0 and "Usage: atlas" in text
        assert max(map(len, text.splitlines())) <= 100 or name in (
            "query",
            "export",
        )  # their examples are longer


@pytest.mark.parametrize("arguments", [["--help"], *LOOKUPS], ids=" ".join)
def test_a_lookup_loads_nothing_heavy(small, arguments):
    code = (
        "import sys\nfrom atlas.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        f"    found = [name for name in {HEAVY} if name in sys.modules]\n"
        "    sys.stderr.write(' '.join(found))\n    raise"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "ATLAS": str(small.path)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], *LOOKUPS[1:6]], ids=" ".join)
def test_a_lookup_spends_less_than_half_a_second_of_processor_time(small, arguments):
    """Processor time, the least of three: other programs on the machine must not fail the test."""
    import resource

    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = process(arguments, env={"ATLAS": str(small.path)})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.5


def test_query_takes_parameters_files_and_limits(run, tmp_path):
    cypher = "MATCH (t:Token) WHERE t.text = $text RETURN t.number AS number"
    assert json.loads(run("query", cypher, "--param", "text= Paris", "--json")[1]) == [{"number": 2}]
    file = tmp_path / "q.cypher"
    file.write_text("MATCH (f:Feature) WHERE f.layer IN $layers RETURN count(*) AS n")
    assert json.loads(run("query", "--file", str(file), "--param", "layers=[0, 1]", "--json")[1]) == [
        {"n": 48}
    ]
    code, text, err = run("query", "MATCH (f:Feature) RETURN f.id", "--limit", "4", "--json")
    assert code == 0 and len(json.loads(text)) == 4 and "there are more" in err
    assert len(json.loads(run("query", "MATCH (f:Feature) RETURN f.id", "--limit", "0", "--json")[1])) == 72


def test_csv_of_a_query_holds_hostile_texts_exactly(run):
    _, text, _ = run(
        "query", "MATCH (t:Token) RETURN t.number AS number, t.text AS text ORDER BY number", "--csv"
    )
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["number", "text"]
    assert [row[1] for row in rows[1:]] == TEXTS


def test_a_reader_that_stops_early_is_no_error(small):
    cypher = "MATCH (f:Feature)-[r]->(g) RETURN f.key, g.key"
    done = subprocess.run(
        f'"{sys.executable}" -m atlas query "{cypher}" --limit 0 | head -1', shell=True, cwd=ROOT, text=True,
        capture_output=True, timeout=60, check=False, env={**os.environ, "ATLAS": str(small.path)},
    )  # fmt: skip
    assert done.stderr == ""


def test_text_beyond_the_output_encoding_is_escaped(small):
    environment = {"ATLAS": str(small.path), "PYTHONIOENCODING": "ascii"}
    done = process(["search", "日本"], env=environment)
    assert done.returncode == 0 and "\\u65e5" in done.stdout
    assert (
        json.loads(process(["search", "日本", "--json"], env=environment).stdout)["tokens"][0]["text"]
        == "日本"
    )


def test_runs_are_listed_and_removed(tmp_path, run):
    small = build(tmp_path / "removable.atlas")
    (listed,) = json.loads(run("runs", "--atlas", str(small.path), "--json")[1])
    assert (listed["run"], listed["steps"], listed["status"]) == (small.manifest.run, 4, "done")
    code, out, _ = run("remove", "--run", listed["run"][:6], "--yes", "--atlas", str(small.path))
    assert code == 0 and "removed run" in out
    assert json.loads(run("runs", "--atlas", str(small.path), "--json")[1]) == []
    assert json.loads(
        run("query", "MATCH (f:Feature) RETURN count(*) AS n", "--atlas", str(small.path), "--json")[1]
    ) == [{"n": 0}]


def test_load_builds_the_same_database_again(tmp_path, run):
    small = build(tmp_path / "again.atlas")
    cypher = "MATCH (a)-[r:DIRECT]->(b) RETURN a.key AS a, b.key AS b, r.weight AS w ORDER BY a, b, w"
    question = ["query", cypher, "--limit", "0", "--json", "--atlas", str(small.path)]
    before = run(*question)[1]
    code, out, _ = run("load", "--atlas", str(small.path), "--json")
    assert code == 0 and json.loads(out)["generation"] == "000002"
    assert run(*question)[1] == before


def test_interrupting_a_query_ends_the_process(small):
    started = subprocess.Popen(
        [sys.executable, "-m", "atlas", "query", SLOW], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "ATLAS": str(small.path)},
    )  # fmt: skip
    time.sleep(2)
    assert started.poll() is None
    started.send_signal(2)
    assert started.wait(timeout=10) in (-2, 130)
