"""SAELens' layout, written here from known tensors; what it computes, by the library's formulas, float64."""

import pytest
import torch

from ingest.dictionaries import At, Read, Space
from ingest.dictionaries.encode import decode, encode
from tests.ingest.saelens_files import LAYER_NORM, D, X, current, legacy, transcoder, weights, written
from tests.ingest.small_dictionaries import Facts, opened


def computed(folder, x=X, facts=None):
    dictionary = opened(folder, facts).load(1)
    acts = encode(dictionary, x)
    return acts, decode(dictionary, acts, x)[0]


def agrees(found, acts, out):
    assert (found[0] - acts).abs().max() < 1e-5
    assert (found[1] - out).abs().max() < 1e-5
    assert torch.equal(found[0] != 0, acts != 0)


def doubles(values):
    return {key: value.double() for key, value in values.items()}


# --- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("subtracts", [True, False])
def test_standard_with_and_without_b_dec_on_the_input(tmp_path, subtracts):
    values = weights()
    t = doubles(values)
    acts = ((X - subtracts * t["b_dec"]) @ t["W_enc"] + t["b_enc"]).relu()
    folder = written(tmp_path, values, current(apply_b_dec_to_input=subtracts))
    agrees(computed(folder), acts, acts @ t["W_dec"] + t["b_dec"])


def layer_norm(x):
    mean = x.sum(-1, keepdim=True) / D
    std = (((x - mean) ** 2).sum(-1, keepdim=True) / (D - 1)).sqrt()  # n - 1
    return (x - mean) / (std + 1e-5), mean, std


def test_b_dec_is_subtracted_behind_the_layer_norm_and_restored_with_the_rest(tmp_path):
    values = weights()
    t = doubles(values)
    normal, mean, std = layer_norm(X)
    acts = ((normal - t["b_dec"]) @ t["W_enc"] + t["b_enc"]).relu()
    folder = written(tmp_path, values, current(normalize_activations="layer_norm"))
    agrees(computed(folder), acts, (acts @ t["W_dec"] + t["b_dec"]) * std + mean)


def test_constant_norm_rescale(tmp_path):
    values = weights()
    t = doubles(values)
    factor = D**0.5 / (X**2).sum(-1, keepdim=True).sqrt()
    acts = ((X * factor - t["b_dec"]) @ t["W_enc"] + t["b_enc"]).relu()
    folder = written(tmp_path, values, current(normalize_activations="constant_norm_rescale"))
    agrees(computed(folder), acts, (acts @ t["W_dec"] + t["b_dec"]) / factor)


def test_the_factor_of_expected_average_is_not_in_the_file_and_that_is_said(tmp_path):
    values = weights()
    plain = written(tmp_path / "plain", values, current())
    scaled = written(tmp_path / "scaled", values, current(normalize_activations="expected_average_only_in"))
    assert torch.equal(computed(plain)[0], computed(scaled)[0])
    assert any("the factor is not in the file" in note for note in opened(scaled).notes)


def selected(pre, k, score):
    chosen = score.topk(k, dim=-1).indices
    return torch.zeros_like(pre).scatter(-1, chosen, pre.gather(-1, chosen))


def test_topk_selects_before_the_relu_so_fewer_may_stay(tmp_path):
    values = weights()
    values["b_enc"] = values["b_enc"] - 4
    t = doubles(values)
    pre = (X - t["b_dec"]) @ t["W_enc"] + t["b_enc"]
    acts = selected(pre, 12, pre).relu()
    assert ((acts != 0).sum(-1) < 12).any()
    folder = written(tmp_path, values, current("topk", k=12, rescale_acts_by_decoder_norm=False))
    agrees(computed(folder), acts, acts @ t["W_dec"] + t["b_dec"])
    assert opened(folder).layout.l0 == {1: 12}


def test_abstopk_selects_by_magnitude_and_keeps_signs(tmp_path):
    values = weights()
    t = doubles(values)
    pre = (X - t["b_dec"]) @ t["W_enc"] + t["b_enc"]
    acts = selected(pre, 5, pre.abs())
    folder = written(tmp_path, values, current("abstopk", k=5))
    agrees(computed(folder), acts, acts @ t["W_dec"] + t["b_dec"])
    assert opened(folder).load(1).signed


def test_activations_by_decoder_norm_are_selected_and_reported_so_and_the_output_is_divided(tmp_path):
    values = weights()
    t = doubles(values)
    norm = (t["W_dec"] ** 2).sum(-1).sqrt()
    pre = ((X - t["b_dec"]) @ t["W_enc"] + t["b_enc"]) * norm
    acts = selected(pre, 5, pre).relu()
    assert not torch.equal(acts != 0, selected(pre, 5, pre / norm).relu() != 0)  # the norm decides
    folder = written(tmp_path, values, current("topk", k=5, rescale_acts_by_decoder_norm=True))
    agrees(computed(folder), acts, acts / norm @ t["W_dec"] + t["b_dec"])
    values["W_dec"][3] = 0.0
    assert all(part.isfinite().all() for part in computed(written(tmp_path, values, current("topk", k=5))))


def test_jumprelu_is_strict_and_a_negative_threshold_lets_nothing_negative_pass(tmp_path):
    values = weights("threshold")
    t = doubles(values)
    assert (t["threshold"] < 0).any()
    pre = (X - t["b_dec"]) @ t["W_enc"] + t["b_enc"]
    acts = pre.relu() * (pre > t["threshold"])
    folder = written(tmp_path, values, current("jumprelu"))
    agrees(computed(folder), acts, acts @ t["W_dec"] + t["b_dec"])
    values["threshold"] = values["b_enc"].abs()
    values["b_enc"] = values["threshold"].clone()
    border = written(tmp_path, values, current("jumprelu"))
    assert not computed(border, values["b_dec"][None])[0].any()  # there pre is b_enc, and so the threshold


def test_gated_decides_by_one_bias_and_measures_by_another(tmp_path):
    values = weights("b_gate", "r_mag", "b_mag")
    t = doubles(values)
    x = X - t["b_dec"]
    open_ = x @ t["W_enc"] + t["b_gate"] > 0
    acts = open_ * (x @ (t["W_enc"] * t["r_mag"].exp()) + t["b_mag"]).relu()
    agrees(computed(written(tmp_path, values, current("gated"))), acts, acts @ t["W_dec"] + t["b_dec"])


@pytest.mark.parametrize("architecture", ["skip_transcoder", "jumprelu_skip_transcoder"])
def test_a_transcoder_is_never_scaled_back_and_its_skip_reads_the_raw_input(tmp_path, architecture):
    jump = architecture.startswith("jump")
    values = weights("W_skip", *(["threshold"] if jump else []))
    t = doubles(values)
    normal, _, _ = layer_norm(X)
    pre = normal @ t["W_enc"] + t["b_enc"]
    acts = pre.relu() * (pre > t["threshold"]) if jump else pre.relu()
    out = acts @ t["W_dec"] + t["b_dec"] + X @ t["W_skip"].T
    folder = written(tmp_path, values, transcoder(architecture, normalize_activations="layer_norm"))
    agrees(computed(folder), acts, out)
    layout = opened(folder).layout
    assert (layout.kind, layout.read) == ("transcoder", Read("mlp.in", Space.NORMALISED))
    assert layout.writes == {1: ((1, "mlp", At.STREAM),)}


@pytest.mark.parametrize("key", ["scaling_factor", "finetuning_scaling_factor"])
def test_the_finetuning_factor_is_the_decoders_alone(tmp_path, key):
    values = weights("scaling_factor")
    t = doubles(values)
    values[key] = values.pop("scaling_factor")
    acts = ((X - t["b_dec"]) @ t["W_enc"] + t["b_enc"]).relu()
    folder = written(tmp_path, values, legacy(finetuning_scaling_factor=True))
    agrees(computed(folder), acts, (acts * t["scaling_factor"]) @ t["W_dec"] + t["b_dec"])


@pytest.mark.parametrize("architecture", ["standard", "gated"])
@pytest.mark.parametrize("subtracts", [True, False])
def test_a_stream_whose_mean_was_taken_out_is_read_from_one_that_has_it(tmp_path, architecture, subtracts):
    gated = ("b_gate", "r_mag", "b_mag") if architecture == "gated" else ()
    values = weights(*gated)
    plain = written(tmp_path / "a", values, current(architecture, apply_b_dec_to_input=subtracts))
    folded = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    config = current(architecture, metadata=folded, apply_b_dec_to_input=subtracts)
    centred = written(tmp_path / "b", values, config)
    facts = Facts(norm=LAYER_NORM)
    wanted, _ = computed(plain, X - X.mean(-1, keepdim=True), facts)
    for x in (X, X - X.mean(-1, keepdim=True)):
        assert (computed(centred, x, facts)[0] - wanted).abs().max() < 1e-5
    assert (computed(plain, X, facts)[0] - wanted).abs().max() > 0.1
    assert opened(centred, facts).layout.folded
    # Where norms do not centre, the library takes no mean out.
    assert torch.equal(computed(centred, X)[0], computed(plain, X)[0])
