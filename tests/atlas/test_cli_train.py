"""`atlas train` through the program: sets that other commands read, and mistakes told before any work."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from atlas.cli.program import program
from atlas.training import run_training
from ingest.dictionaries import JumpReLU, TopK, open_set
from ingest.models import open_model
from ingest.training_spec import load_training_spec
from tests.atlas.tiny_source import write_model

torch.set_num_threads(1)
HEAD = """train: 1
model: model
corpus: ids.npy
tokens: 2000
reuse: 2
buffer: 800
batch: 100
"""
SETS = """dictionaries:
  tc: {reads: mlp.in, writes: mlp.out, layers: [0, 2], latents: 40, gate: {topk: 5}, precision: float16}
  skip: {reads: mlp.in, writes: mlp.out, layers: 1, latents: 40, gate: {batchtopk: 5}, skip: true}
  sae: {reads: resid_post, layers: [1], latents: 40, gate: {jumprelu: 5}}
  z: {reads: attn.z, layers: [1], latents: 40, gate: {relu: 0.01}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    write_model(folder / "model")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 50, (300, 12)))
    (folder / "spec.yaml").write_text(HEAD + SETS)
    return folder


def run(*arguments, code=0):
    done = CliRunner().invoke(program, ["train", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def trained(place):
    answer = json.loads(run(place / "spec.yaml", "--out", place / "out", "--threads", 1, "--json").stdout)
    return place / "out", answer


def test_each_set_is_a_folder_that_is_recognised(place, trained):
    out, answer = trained
    model = open_model(place / "model", check=False)
    kinds = {"tc": "circuit-tracer", "skip": "circuit-tracer", "sae": "saelens", "z": "saelens"}
    layers = {"tc": (0, 2), "skip": (1,), "sae": (1,), "z": (1,)}
    assert sorted(path.name for path in out.iterdir()) == sorted(kinds)  # no checkpoint stays
    for name, format in kinds.items():
        found = open_set(out / name, name=name, model=model)
        assert (found.format, found.layers) == (format, layers[name])
        record = json.loads((out / name / "training.json").read_text())
        assert record["model"]["hash"] == model.hash
        assert [one["hash"] for one in record["held_out"]] == [found.hash_of(layer) for layer in found.layers]
        for one in record["held_out"]:
            assert 0 < one["fvu"] < 1.5 and 0 < one["l0"] <= 40 and 0 <= one["dead"] <= 40
    assert isinstance(open_set(out / "tc", name="tc", model=model).load(0).gate, TopK)
    assert open_set(out / "skip", name="skip", model=model).load(1).W_skip is not None
    by_set = {(one["set"], one["layer"]): one for one in answer["dictionaries"]}
    assert len(by_set) == 5 and by_set["tc", 0]["L0"] <= 5
    assert any("held-out documents" in note for note in answer["notes"])


def test_the_same_spec_gives_the_same_dictionaries(place, trained):
    _, answer = trained
    again = json.loads(run(place / "spec.yaml", "--out", place / "again", "--threads", 1, "--json").stdout)
    assert [one["hash"] for one in again["dictionaries"]] == [one["hash"] for one in answer["dictionaries"]]


def test_what_is_there_is_not_written_over(place, trained):
    done = run(place / "spec.yaml", "--out", trained[0], code=1)
    assert "tc: is there already" in str(done.exception)


def test_a_topk_can_be_written_as_one_threshold(place, tmp_path):
    spec = place / "threshold.yaml"
    common = "reads: mlp.in, writes: mlp.out, layers: [1], latents: 40, gate: {topk: 5}"
    spec.write_text(
        HEAD + "dictionaries:\n"
        f"  ct: {{{common}, write_as: jumprelu}}\n  sl: {{{common}, layout: saelens}}\n  tk: {{{common}}}\n"
    )
    answer = json.loads(run(spec, "--out", tmp_path / "out", "--threads", 1, "--json").stdout)
    model = open_model(place / "model", check=False)
    found = {
        name: open_set(tmp_path / "out" / name, name=name, model=model).load(1) for name in ("ct", "sl", "tk")
    }
    assert [type(one.gate) for one in found.values()] == [JumpReLU, JumpReLU, TopK]
    assert torch.equal(found["ct"].gate.threshold, found["sl"].gate.threshold)
    for one in answer["dictionaries"]:
        assert one["L0"] == pytest.approx(5, abs=0.3)
    told = " ".join(answer["notes"])
    assert "threshold" in told


@pytest.mark.parametrize("sets, told", [
    ("{reads: mlp.in, latents: 8, gate: {topk: 2}}", "mlp.in cannot be written to"),
    ("{reads: mlp.in, writes: mlp.out, layers: [3], latents: 8, gate: {topk: 2}}", "has layers 0 to 2"),
    ("{reads: blocks.1.mlp.hook_in, writes: mlp.out, latents: 8, gate: {topk: 2}}", "names a layer"),
    ("{reads: mlp.on, latents: 8, gate: {topk: 2}}", "unknown hook 'mlp.on'"),
    ("{reads: resid_post, layout: circuit-tracer, latents: 8, gate: {topk: 2}}", "expected saelens"),
    ("{reads: resid_pre, writes: mlp.out, latents: 8, gate: {topk: 2}}", "expected saelens"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_runs(place, tmp_path, sets, told):
    spec = place / "wrong.yaml"
    spec.write_text(HEAD + f"dictionaries:\n  s: {sets}\n")
    done = run(spec, "--out", tmp_path / "out", code=1)
    assert told in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_corpus_shorter_than_a_context_is_one_error(place, tmp_path):
    (place / "short.txt").write_text("one")
    spec = place / "short.yaml"
    spec.write_text(HEAD.replace("ids.npy", "short.txt") + SETS)
    done = run(spec, "--out", tmp_path / "out", code=1)
    assert "\n" not in str(done.exception) and not (tmp_path / "out").exists()


# --- stopped, and refused by the disk -----------------------------------------------------------------------


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("before", ["training.json", "sae", "checkpoint.pt"])
def test_a_run_stopped_while_it_writes_its_sets_ends_as_one_that_was_not(place, trained, tmp_path, before):
    """Stopped before the first record is written, between two sets, or with all of them there."""

    class Stopped(BaseException):
        """A kill, which no handler of errors sees."""

    def stopping(method):
        def instead(path, *given, **named):
            if path.name == before:
                raise Stopped
            return method(path, *given, **named)

        return instead

    spec = load_training_spec(place / "spec.yaml")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_text", "rename", "unlink"):
            patch.setattr(Path, name, stopping(getattr(Path, name)))
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Stopped):
            run_training(spec, tmp_path / "out")
    assert (tmp_path / "out" / "checkpoint.pt").exists()
    run(place / "spec.yaml", "--out", tmp_path / "out", "--threads", 1)
    assert files_of(tmp_path / "out") == files_of(trained[0])


def test_a_set_of_another_run_is_not_taken_for_this_ones(place, tmp_path):
    out = tmp_path / "out"
    (out / "tc").mkdir(parents=True)
    (out / "tc" / "training.json").write_text('{"run": "another", "set": {}}')
    (out / "checkpoint.pt").write_bytes(b"")
    assert "tc: is there already" in str(run(place / "spec.yaml", "--out", out, code=1).exception)


def test_what_a_disk_refuses_is_one_error(place, tmp_path, monkeypatch):
    def full(state, path):
        path.write_bytes(b"some")
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 0 vs 1")

    monkeypatch.setattr(torch, "save", full)
    done = run(place / "spec.yaml", "--out", tmp_path / "out", code=1)
    assert "checkpoint.pt: cannot be written" in str(done.exception)
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "file").write_text("mine")
    done = run(place / "spec.yaml", "--out", tmp_path / "file", code=1)
    assert "file: is a file; expected a folder" in str(done.exception)


def test_a_device_that_is_not_here_is_one_error(place, tmp_path):
    assert "device abacus: expected cpu" in str(
        run(place / "spec.yaml", "--out", tmp_path / "o", "--device", "abacus", code=1).exception
    )


def test_a_mistake_in_a_hook_is_told_with_its_line(place, tmp_path):
    spec = place / "line.yaml"
    spec.write_text(HEAD + "dictionaries:\n  s:\n    latents: 8\n    reads: mlp.on\n    gate: {topk: 2}\n")
    done = run(spec, "--out", tmp_path / "out", code=1)
    assert "line.yaml: line 11: dictionaries.s.reads: unknown hook" in str(done.exception)
