"""Training specs: what is read, and each mistake told with its line."""

import pytest

from ingest.spec_text import SpecError
from ingest.training_spec import load_training_spec, parse_training_spec

GOOD = """train: 1
model: model
corpus: text.jsonl
tokens: 5000
dictionaries:
  tc: {reads: mlp.in, writes: mlp.out, layers: [0, 2-3], latents: 64, gate: {topk: 8}, rate: 1e-3}
  sae: {reads: resid_post, latents: 32, gate: {jumprelu: 4.5}, optimiser: muon, precision: float16}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "text.jsonl").write_text("{}")
    return tmp_path


def test_a_spec_is_read_with_its_defaults(folder):
    (folder / "spec.yaml").write_text(GOOD)
    spec = load_training_spec(folder / "spec.yaml")
    assert (spec.model, spec.corpus) == (str(folder / "model"), str(folder / "text.jsonl"))
    assert (spec.tokens, spec.reuse, spec.held_out, spec.context, spec.seed) == (5000, 3.0, 0.1, None, 0)
    transcoder, autoencoder = spec.dictionaries["tc"], spec.dictionaries["sae"]
    assert transcoder.layers == (0, 2, 3) and transcoder.gate == ("topk", 8.0) and transcoder.rate == 1e-3
    assert (
        autoencoder.layers == "all" and autoencoder.writes is None and autoencoder.gate == ("jumprelu", 4.5)
    )


def test_a_loss_may_weigh_directions_by_gradients(folder):
    loss = "{reads: mlp.in, writes: mlp.out, latents: 8, gate: {topk: 2}, loss: {gradients: 0.7}}"
    text = GOOD.replace("tokens: 5000", "gradient_tokens: 300") + f"  felt: {loss}\n"
    spec = parse_training_spec(text, base=folder)
    assert spec.gradient_tokens == 300
    assert [one.loss.gradients for one in spec.dictionaries.values()] == [0.0, 0.0, 0.7]


@pytest.mark.parametrize("line, put, told", [
    (1, "train: 2", "line 1: train: expected 1, found 2"),
    (1, "atlas: 1", "line 1: atlas: is a build's spec; atlas build reads it"),
    (2, "model: nowhere", "line 2: model: nowhere: no such file or directory"),
    (3, "corpus: 5", "line 3: corpus: expected text, found 5"),
    (4, "token: 5000", "line 4: token: unknown key; did you mean 'tokens'?"),
    (4, "tokens: 0", "line 4: tokens: input should be greater than or equal to 1, found 0"),
    (4, "batch: 200000", "line 4: batch: expected at most the buffer's 131072 rows"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 9}}", "tc.gate.topk: expected at most the 8 latents"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {top: 4}}", "unknown gate 'top'; did you mean 'topk'"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 2.5}}", "topk: expected a whole number of latents"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {relu: 0}}", "relu: expected a number above 0, found 0"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: topk}", "expected one of topk, batchtopk, jumprelu, relu"),
    (6, "  tc: {reads: mlp.out, latents: 8, gate: {topk: 2}, skip: true}", "tc.skip: an autoencoder's skip"),
    (6, "  tc: {reads: mlp.in, gate: {topk: 2}}", "tc.latents: is missing"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 2}, optimiser: sgd}", "expected 'adam' or 'muon'"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 2}, rate: fast}", "expected a number, found 'fast'"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 2}, write: x}", "did you mean 'writes'"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 2}, loss: {gradients: 1}}", "loss.gradients: input"),
    (6, "  tc: {reads: mlp.in, latents: 8, gate: {topk: 2}, loss: {gradient: 0}}", "you mean 'gradients'"),
])  # fmt: skip
def test_each_mistake_is_told_with_its_line(folder, line, put, told):
    lines = GOOD.splitlines()
    lines[line - 1] = put
    with pytest.raises(SpecError) as caught:
        parse_training_spec("\n".join(lines), base=folder)
    assert told in str(caught.value)


@pytest.mark.parametrize("old, new, told", [
    ("{topk: 8}", "{topk: .inf}", "line 6: dictionaries.tc.gate: topk: expected a number above 0, found inf"),
    ("rate: 1e-3", "rate: .inf", "line 6: dictionaries.tc.rate: .*finite"),
    ("tokens: 5000", "reuse: .inf", "line 4: reuse: .*finite"),
    ("tokens: 5000", "seed: 99999999999999999999", "line 4: seed: "),
    ("  tc:", "  checkpoint.pt:", r"line 6: dictionaries.checkpoint.pt: a run's own files"),
])  # fmt: skip
def test_what_no_run_can_use_is_told_with_its_line(folder, old, new, told):
    with pytest.raises(SpecError, match=told):
        parse_training_spec(GOOD.replace(old, new), base=folder)


def test_small_numbers_are_numbers_wherever_they_stand(folder):
    text = GOOD.replace("tokens: 5000", "held_out: 1e-2").replace("{topk: 8}", "{relu: 1e-3}")
    found = parse_training_spec(text, base=folder)
    assert found.held_out == 0.01 and found.dictionaries["tc"].gate == ("relu", 1e-3)


def test_a_place_is_told_with_its_line(folder):
    spec = parse_training_spec(GOOD, source="spec.yaml", base=folder)
    assert spec.place("dictionaries", "tc", "layout") == "spec.yaml: line 6: dictionaries.tc.layout"
