"""A training that goes on from a trained set: it begins there, and what cannot begin there is told first."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from atlas.cli.program import program
from ingest.dictionaries import open_set
from ingest.models import open_model
from tests.atlas.tiny_source import write_model

torch.set_num_threads(1)
HEAD = """train: 1
model: model
corpus: ids.npy
tokens: 800
reuse: 1
buffer: 400
batch: 100
gradient_tokens: 200
dictionaries:
"""
SET = "reads: mlp.in, writes: mlp.out, layers: [0, 2], latents: 40, gate: {topk: 5}"


def run(place, sets, out, code=0):
    spec = place / f"{out}.yaml"
    spec.write_text(HEAD + f"  tc: {{{sets}}}\n")
    arguments = ["train", str(spec), "--out", str(place / out), "--threads", "1", "--json"]
    done = CliRunner().invoke(program, arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout) if not code else str(done.exception)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    write_model(folder / "model")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 50, (300, 12)))
    run(folder, SET, "first")
    return folder


def test_a_set_goes_on_from_another(place):
    run(place, f"{SET}, rate: 1e-9, start: first/tc", "still")
    run(place, f"{SET}, rate: 1e-2, start: first/tc, loss: {{gradients: 0.8}}", "on")
    model = open_model(place / "model", check=False)
    first, still, on = (
        open_set(place / out / "tc", name="tc", model=model) for out in ("first", "still", "on")
    )
    for layer in (0, 2):
        began, same, moved = (one.load(layer) for one in (first, still, on))
        assert torch.allclose(same.encoders[0].W_enc, began.encoders[0].W_enc, atol=1e-5)
        assert torch.allclose(same.writes[0].W_dec, began.writes[0].W_dec, atol=1e-5)
        assert not torch.allclose(moved.writes[0].W_dec, began.writes[0].W_dec, atol=1e-2)
    record = json.loads((place / "on" / "tc" / "training.json").read_text())
    assert record["set"]["loss"] == {"gradients": 0.8} and record["set"]["start"].endswith("tc")


@pytest.mark.parametrize("sets, told", [
    (SET.replace("40", "41"), "tc.start: .*layer 0 has .*mlp.in, mlp, 40, False, TopK; expected .* 41, "),
    (SET.replace("topk", "relu"), "TopK; expected .*ReLU"),
    (SET + ", skip: true", "False, TopK; expected .*True, TopK"),
    (SET.replace("[0, 2]", "[0, 1]"), "first/tc"),
])  # fmt: skip
def test_a_set_of_another_kind_is_refused(place, sets, told):
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(run(place, f"{sets}, start: first/tc", "refused", code=1))
    assert not (place / "refused").exists()


def test_a_start_that_is_nowhere_is_told_with_its_line(place):
    assert "line 10: dictionaries.tc.start: nowhere: no such" in run(
        place, f"{SET}, start: ./nowhere".replace("./", ""), "nowhere-spec", code=1
    )
