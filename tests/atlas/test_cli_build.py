"""`atlas build` and `atlas estimate` on a tiny random model: from nothing to answers, again, and with bad
input.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from atlas.cli import main
from atlas.cli.build import rule_of
from ingest.errors import InputError
from ingest.rules import Any_, Everything, Top, Z

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HEADS, NEURONS, TOKENS, WIDTH = 3, 4, 40, 61, 32
ROWS = 2 * NEURONS  # a gated neuron reads twice


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny Llama, saved."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": NEURONS,
        "num_hidden_layers": LAYERS,
    }
    config = LlamaConfig(
        **sizes, num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=64
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.delenv("ATLAS", raising=False)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return command


def spec_text(model: Path, keep: object = "everything", **changes: object) -> str:
    spec = {
        "atlas": 1,
        "models": {"tiny": {"path": str(model)}},
        "dictionaries": {"neurons": {"model": "tiny", "format": "neurons", "layers": "all", "alias": "n"}},
        "edges": [{"types": ["DIRECT", "VIA_HEAD"], "from": ["neurons"], "to": ["neurons"], "keep": keep}],
    }
    return yaml.safe_dump(spec | changes)


def artifact_hashes(atlas: Path) -> dict[str, str]:
    return {
        str(path.relative_to(atlas)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((atlas / "artifacts").rglob("*"))
        if path.is_file()
    }


def test_from_a_spec_to_answers_and_again(run, model, tmp_path):
    (tmp_path / "tiny.yaml").write_text(spec_text(model))
    code, out, _ = run("build", "tiny.yaml", "--workers", "2", "--json")
    assert code == 0
    built = json.loads(out)
    counts = {row["of"]: row["rows"] for row in built["holds"]}
    pairs = NEURONS * ROWS * LAYERS * (LAYERS - 1) // 2
    assert counts["DIRECT"] == pairs
    # layer 0 reaches 1 by the heads of 1, and 2 by those of 1 and 2; layer 1 reaches 2 by those of 2
    assert counts["VIA_HEAD"] == NEURONS * ROWS * HEADS * (1 + 2 + 1)
    assert counts["Feature"] == LAYERS * NEURONS and counts["Token"] == TOKENS
    selection = {row["type"]: row for row in built["selection"]}
    assert selection["DIRECT"]["kept_share"] == pytest.approx(1, rel=1e-6)
    assert selection["VIA_HEAD"]["kept_share"] == pytest.approx(1, rel=0.1)  # its total rests on a sample
    assert {type: row["pairs"] for type, row in selection.items()} == {
        type: counts[type] for type in ("DIRECT", "VIA_HEAD")
    }
    assert (tmp_path / "tiny.atlas" / "CURRENT").exists()

    dropped = json.loads(run("info", "--dropped", "--json")[1])
    layers = {
        (row["source_layer"], row["target_layer"]): (row["pairs"], row["edges"]) for row in dropped["direct"]
    }
    assert layers == dict.fromkeys(((0, 1), (0, 2), (1, 2)), (NEURONS * ROWS, NEURONS * ROWS))
    heads = {(row["layer"], row["head"]): row["edges"] for row in dropped["via_head"]}
    assert heads == {(layer, head): NEURONS * ROWS * 2 for layer in (1, 2) for head in range(HEADS)}

    code, out, _ = run("feature", "n1[3]", "--json")
    page = json.loads(out)
    assert code == 0 and page["key"] == "tiny/neurons/L01.mlp/3"
    assert (
        page["embeds_gate"]
        and page["embeds_up"]
        and page["promotes"]
        and page["upstream"]
        and page["downstream"]
    )
    assert json.loads(run("head", "1.2", "--json")[1])["edges"] == NEURONS * ROWS * 2

    before, current = (
        artifact_hashes(tmp_path / "tiny.atlas"),
        (tmp_path / "tiny.atlas" / "CURRENT").read_text(),
    )
    code, out, _ = run("build", "tiny.yaml", "--json")
    assert code == 0 and json.loads(out)["steps"].startswith("0 computed")
    assert artifact_hashes(tmp_path / "tiny.atlas") == before
    assert (tmp_path / "tiny.atlas" / "CURRENT").read_text() == current


def test_without_a_spec_the_one_used_is_kept_and_builds_the_same(run, model, tmp_path):
    code, out, _ = run(
        "build", "--model", model, "--dictionaries", "neurons", "--keep", "top:2", "--name", "own", "--json"
    )
    assert code == 0
    (written,) = (tmp_path / "own.atlas" / "specs").glob("*.yaml")
    code, again, _ = run("build", written, "--out", "other.atlas", "--json")
    assert code == 0
    assert json.loads(again)["run"] == json.loads(out)["run"]
    assert artifact_hashes(tmp_path / "other.atlas") == artifact_hashes(tmp_path / "own.atlas")


def test_another_selection_replaces_the_first_and_reuses_what_it_can(run, model, tmp_path):
    for keep in ({"top": 3}, {"top": 2}):
        (tmp_path / "tiny.yaml").write_text(spec_text(model, keep))
        code, out, _ = run("build", "tiny.yaml", "--json")
        assert code == 0
    second = json.loads(out)
    reused = int(second["steps"].split(", ")[1].split()[0])
    assert reused > 0 and "replaced run" in " ".join(second["notes"])
    assert [row["run"] for row in json.loads(run("runs", "--json")[1])] == [second["run"]]
    counted = {row["of"]: row["rows"] for row in second["holds"]}
    assert (
        counted.get("DIRECT", 0) + counted.get("VIA_HEAD", 0) == (LAYERS - 1) * ROWS * 2
    )  # two for each reading that has any


def _broken_model(model: Path, place: Path, **changes: object) -> Path:
    shutil.copytree(model, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no spec", "no-such.yaml: no such file"),
        ("no arguments", "expected SPEC"),
        ("both", "--model: is said in the spec"),
        ("unknown key", "line"),
        ("unknown set", "no dictionary set 'neuron'"),
        ("missing model", "no such file or directory"),
        ("wrong shape", "down_proj.weight has shape (32, 40); the configuration needs (32, 41)"),
        ("refused architecture", "bert"),
        ("truncated weights", "model.safetensors"),
        ("missing layer", "layer"),
        ("bad rule", "--keep"),
        ("no device", "device gpu"),
        ("a file in the way", "is not a folder"),
        ("a stranger's folder", "is no atlas"),
        ("newer atlas", "newer"),
    ],
)
def test_bad_input_fails_before_any_work_and_leaves_nothing(run, model, tmp_path, what, said):
    spec = tmp_path / "tiny.yaml"
    spec.write_text(spec_text(model))
    arguments: list[str | Path] = ["build", "tiny.yaml"]
    if what == "no spec":
        arguments = ["build", "no-such.yaml"]
    elif what == "no arguments":
        arguments = ["build"]
    elif what == "both":
        arguments += ["--model", model]
    elif what == "unknown key":
        spec.write_text(spec_text(model) + "\nmodel: {}\n")
    elif what == "unknown set":
        spec.write_text(spec_text(model).replace("from:\n  - neurons", "from:\n  - neuron"))
    elif what == "missing model":
        spec.write_text(spec_text(tmp_path / "nowhere"))
    elif what == "wrong shape":
        spec.write_text(spec_text(_broken_model(model, tmp_path / "broken", intermediate_size=NEURONS + 1)))
    elif what == "refused architecture":
        spec.write_text(spec_text(_broken_model(model, tmp_path / "broken", model_type="bert")))
    elif what == "truncated weights":
        broken = _broken_model(model, tmp_path / "broken")
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        spec.write_text(spec_text(broken))
    elif what == "missing layer":
        sets = {"neurons": {"model": "tiny", "format": "neurons", "layers": [0, LAYERS]}}
        spec.write_text(spec_text(model, dictionaries=sets))
    elif what == "bad rule":
        arguments = ["build", "--model", model, "--keep", "best:5"]
    elif what == "no device":
        arguments += ["--device", "gpu"]
    elif what == "a file in the way":
        (tmp_path / "tiny.atlas").write_text("mine")
    elif what == "a stranger's folder":
        (tmp_path / "tiny.atlas").mkdir()
        (tmp_path / "tiny.atlas" / "thesis.txt").write_text("mine")
    elif what == "newer atlas":
        (tmp_path / "tiny.atlas").mkdir()
        (tmp_path / "tiny.atlas" / "atlas.json").write_text('{"schema": 99}')
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    mistake = "\n".join(line for line in err.splitlines() if not line.endswith(" s"))  # less the progress
    assert mistake.startswith("error: ") and said in mistake and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_said_to_be(run, model, tmp_path, monkeypatch):
    """The refusal is made up, since the superuser, whom tests may run as, may write anywhere."""
    (tmp_path / "tiny.yaml").write_text(spec_text(model))
    make = Path.mkdir

    def refused(path: Path, *arguments, **options):
        if path.name == "tiny.atlas":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refused)
    code, out, err = run("build", "tiny.yaml")
    assert (code, out) == (2, "") and "not writable (Read-only file system)" in err
    assert not (tmp_path / "tiny.atlas").exists()


def test_a_disk_that_fills_up_leaves_a_build_that_goes_on(run, model, tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(spec_text(model))
    import workers.tables

    write, written = workers.tables.pq.ParquetWriter.write_table, []

    def full(self, *arguments, **options):
        written.append(self)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments, **options)

    monkeypatch.setattr(workers.tables.pq.ParquetWriter, "write_table", full)
    code, out, err = run("build", "tiny.yaml", "--workers", "1")
    assert (code, out) == (2, "") and "disk is full" in err.splitlines()[-1]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("build", "tiny.yaml", "--json")
    assert code == 0 and not json.loads(out)["steps"].startswith("0 computed")


def test_ctrl_c_leaves_what_the_same_command_goes_on_from(run, model, tmp_path):
    """Interrupted when the first step is finished; then finished; equal to a build that was left alone."""
    (tmp_path / "tiny.yaml").write_text(spec_text(model))
    process = subprocess.Popen(
        [sys.executable, "-m", "atlas", "build", "tiny.yaml", "--workers", "1"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    artifacts = tmp_path / "tiny.atlas" / "artifacts"
    while process.poll() is None and not list(artifacts.glob("[0-9a-f][0-9a-f]/*")):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in err and "Traceback" not in err
    assert not (tmp_path / "tiny.atlas" / "CURRENT").exists()
    code, out, _ = run("build", "tiny.yaml", "--json")
    assert code == 0 and int(json.loads(out)["steps"].split(", ")[1].split()[0]) > 0
    assert run("build", "tiny.yaml", "--out", "whole.atlas")[0] == 0
    assert artifact_hashes(tmp_path / "tiny.atlas") == artifact_hashes(tmp_path / "whole.atlas")


def test_an_estimate_counts_the_pairs_that_the_build_finds(run, model, tmp_path):
    (tmp_path / "tiny.yaml").write_text(spec_text(model))
    code, out, _ = run("estimate", "tiny.yaml", "--json")
    assert code == 0
    content = json.loads(out)
    by_type = {row["type"]: row for row in content["edges_by_type"]}
    assert content["features"] == LAYERS * NEURONS
    assert by_type["DIRECT"]["pairs"] == by_type["DIRECT"]["edges"] == NEURONS * ROWS * 3
    assert by_type["VIA_HEAD"]["pairs"] == by_type["VIA_HEAD"]["edges"] == NEURONS * ROWS * HEADS * 4
    assert (
        by_type["EMBEDS"]["edges"] == LAYERS * ROWS * 32
        and by_type["PROMOTES"]["edges"] == LAYERS * NEURONS * 32
    )
    assert content["computing_seconds"] > 0 and content["memory_bytes"] > 0
    assert not (tmp_path / "tiny.atlas").exists()
    code, out, _ = run("estimate", "--model", model, "--keep", "top:2", "--json")
    kept = {row["type"]: row["edges"] for row in json.loads(out)["edges_by_type"]}
    assert kept["DIRECT"] + kept["VIA_HEAD"] == pytest.approx((LAYERS - 1) * ROWS * 2, abs=2)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("z:6", Z(6.0)),
        ("z=4.5", Z(4.5)),
        ("top:16", Top(16)),
        ("everything", Everything()),
        ("{top: 4, per: source}", Top(4, "source")),
        ("any: [{z: 6}, {top: 16}]", Any_((Z(6.0), Top(16)))),
    ],
)
def test_rules_on_the_command_line(text, rule):
    assert rule_of(text) == rule


@pytest.mark.parametrize("text", ["z", "z:", "z:-1", "top:1.5", "best:3", "{z: 6", "[]", ""])
def test_a_rule_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="--keep"):
        rule_of(text)
