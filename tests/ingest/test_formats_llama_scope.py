"""Llama Scope's two older layouts, 2024 and 2025, against the library's computation in float64."""

import pytest
import torch

from ingest.dictionaries import RescaledInput, ScalarThreshold, TopK
from ingest.dictionaries.encode import decode, encode
from tests.ingest.scope_files import (
    HOOK,
    THRESHOLD,
    D,
    F,
    K,
    X,
    expected,
    known,
    largest,
    over,
    positive,
    scale,
    write_2024,
    write_2025,
)
from tests.ingest.small_dictionaries import opened

MID, OUT = "blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out"
NORMS = {"in": 11.0, "out": 4.0}
INTO, OUTWARD = scale(11.0), scale(4.0)


def compare(folder, acts, output):
    found = opened(folder)
    dictionary = found.load(1)
    got = encode(dictionary, X)
    assert torch.equal((got != 0).sum(-1), (acts != 0).sum(-1))
    assert (got - acts).abs().max() < 5e-5
    assert (decode(dictionary, got, X)[0] - output).abs().max() < 5e-5
    return found, dictionary


# --- 2025 ---------------------------------------------------------------------------------------------------


def test_2025_jumprelu_with_the_scales_of_the_weights_file(tmp_path):
    values, s = known(), scale(11.0)
    acts, output = expected(values, s, s, over(values[THRESHOLD].double().exp()))
    found, _ = compare(write_2025(tmp_path, values, {HOOK: 11.0}, act_fn="jumprelu"), acts / s, output)
    assert (found.format, found.kind, found.layout.activation) == ("llama-scope-2025", "sae", "JumpReLU")


def test_2025_bfloat16_weights_beside_float32_thresholds(tmp_path):
    values, s = known(dtype=torch.bfloat16), scale(11.0)
    acts, output = expected(values, s, s, over(values[THRESHOLD].double().exp()))
    found, dictionary = compare(
        write_2025(tmp_path, values, {HOOK: 11.0}, act_fn="jumprelu"), acts / s, output
    )
    assert found.layout.dtypes == ("BF16", "F32")
    assert torch.equal(dictionary.encoders[0].W_enc, values["W_E"].T.float())


def test_2025_the_decoder_bias_is_subtracted_in_the_normalised_space(tmp_path):
    """So in units of the input's norm, though it is added in units of the output's."""
    values = known(1)
    folder = write_2025(
        tmp_path,
        values,
        {MID: 11.0, OUT: 4.0},
        apply_decoder_bias_to_pre_encoder=True,
        hook_point_in=MID,
        hook_point_out=OUT,
    )
    acts, output = expected(values, INTO, OUTWARD, positive, centred=True)
    _, dictionary = compare(folder, acts / INTO, output)
    assert torch.allclose(dictionary.b_in, values["b_D"] / INTO)
    assert torch.allclose(dictionary.writes[0].b_out, values["b_D"] / OUTWARD)


def test_2025_topk_with_a_threshold_stays_topk(tmp_path):
    values, s = known(2), scale(11.0)
    folder = write_2025(tmp_path, values, {HOOK: 11.0}, act_fn="topk", jump_relu_threshold=0.5)
    acts, output = expected(values, s, s, largest(K))
    found, dictionary = compare(folder, acts / s, output)
    assert dictionary.gate == TopK(K)
    assert "jump_relu_threshold is not used: the library keeps the k largest" in found.notes


def test_norms_named_in_and_out(tmp_path):
    """As versions between the layouts wrote them."""
    values = known(3)
    folder = write_2025(tmp_path, values, NORMS, hook_point_in=MID, hook_point_out=OUT)
    acts, output = expected(values, INTO, OUTWARD, positive)
    compare(folder, acts / INTO, output)


# --- 2024 ---------------------------------------------------------------------------------------------------


def loaded_2024(values, into, out, keep, *, unit=True, centred=False):
    """What the library of 2024 has computed after loading: in raw units, with unit decoder norms.

    A pre-activation there is that of the normalised space times n' / s_in, n' = |W_D| s_in / s_out.
    """
    values = {key: value.double() for key, value in values.items()}
    n = values["W_D"].norm(dim=1) * into / out if unit else torch.ones(F, dtype=torch.float64)
    x = X.double() - (values["b_D"] / out if centred else 0)
    pre = (into * x @ values["W_E"] + values["b_E"]) * n / into
    acts = pre * keep(pre)
    return acts, (acts * into / n @ values["W_D"] + values["b_D"]) / out


def test_2024_one_threshold_in_raw_units_after_the_unit_decoder_norm(tmp_path):
    values = known()
    found, dictionary = compare(write_2024(tmp_path, values), *loaded_2024(values, INTO, OUTWARD, over(0.6)))
    assert (found.format, found.layout.activation) == ("llama-scope-2024", "JumpReLU 0.6")
    assert dictionary.gate == ScalarThreshold(0.6, relu_too=False)
    assert torch.allclose(dictionary.writes[0].W_dec.norm(dim=1), torch.ones(F))
    # Compared anywhere else, other latents fire.
    fires = (encode(dictionary, X) != 0).sum(-1)
    for wrong in (over(0.6 / INTO), over(0.6 * INTO)):
        assert not torch.equal((loaded_2024(values, INTO, OUTWARD, wrong)[0] != 0).sum(-1), fires)


def test_2024_a_negative_threshold_lets_negative_values_pass(tmp_path):
    values = known(4)
    folder = write_2024(tmp_path, values, jump_relu_threshold=-0.2)
    _, dictionary = compare(folder, *loaded_2024(values, INTO, OUTWARD, over(-0.2)))
    assert dictionary.signed


def test_2024_without_the_decoder_norm(tmp_path):
    values = known(5)
    folder = write_2024(tmp_path, values, sparsity_include_decoder_norm=False)
    compare(folder, *loaded_2024(values, INTO, OUTWARD, over(0.6), unit=False))


@pytest.mark.parametrize("unit", [True, False])
def test_2024_topk(tmp_path, unit):
    values = known(6)
    folder = write_2024(tmp_path, values, act_fn="topk", sparsity_include_decoder_norm=unit)
    found, dictionary = compare(folder, *loaded_2024(values, INTO, OUTWARD, largest(K), unit=unit))
    assert dictionary.gate == TopK(K) and found.layout.l0 == {1: 5.0}
    assert "jump_relu_threshold is not used: the library keeps the k largest" in found.notes


def test_2024_relu(tmp_path):
    values = known(7)
    compare(write_2024(tmp_path, values, act_fn="relu"), *loaded_2024(values, INTO, OUTWARD, positive))


def test_2024_the_folded_decoder_bias_is_subtracted_from_the_raw_input(tmp_path):
    values = known(8)
    folder = write_2024(tmp_path / "said", values, apply_decoder_bias_to_pre_encoder=True)
    _, dictionary = compare(folder, *loaded_2024(values, INTO, OUTWARD, over(0.6), centred=True))
    assert torch.allclose(dictionary.b_in, values["b_D"] / OUTWARD)
    # It is the library's default of that time, and told where the file does not say it.
    unsaid = opened(write_2024(tmp_path / "unsaid", values, apply_decoder_bias_to_pre_encoder=...))
    assert unsaid.hash == opened(folder).hash
    assert any("the library's default, true" in note for note in unsaid.notes)


@pytest.mark.parametrize("norm", ["inference", "none"])
def test_2024_norms_that_do_not_apply(tmp_path, norm):
    values = known(9)
    folder = write_2024(tmp_path, values, norm_activation=norm, dataset_average_activation_norm=None)
    compare(folder, *loaded_2024(values, 1.0, 1.0, over(0.6)))


def test_2024_token_wise(tmp_path):
    values = known(10)
    folder = write_2024(tmp_path, values, norm_activation="token-wise", dataset_average_activation_norm=None)
    dictionary = opened(folder).load(1)
    assert dictionary.input_norm == RescaledInput(D**0.5)
    got, wide = encode(dictionary, X), {key: value.double() for key, value in values.items()}
    out = decode(dictionary, got, X)[0]
    n = wide["W_D"].norm(dim=1)
    for token, x in enumerate(X.double()):
        into = D**0.5 / x.norm()
        pre = (into * x @ wide["W_E"] + wide["b_E"]) * n
        acts = pre * (pre > 0.6)
        assert (got[token] - acts).abs().max() < 5e-5
        assert (out[token] - (acts / n @ wide["W_D"] + wide["b_D"]) / into).abs().max() < 5e-5


def test_2024_a_latent_without_a_decoder_stays_silent(tmp_path):
    values = known(11)
    values["W_D"][2] = 0.0
    dictionary = opened(write_2024(tmp_path, values)).load(1)
    got = encode(dictionary, X)
    assert (got[:, 2] == 0).all() and got.isfinite().all()
    assert decode(dictionary, got, X)[0].isfinite().all()


def test_2024_no_decoder_bias(tmp_path):
    values = known(12)
    folder = write_2024(tmp_path, values, use_decoder_bias=False)
    silent = {**values, "b_D": torch.zeros(D)}
    compare(folder, *loaded_2024(silent, INTO, OUTWARD, over(0.6)))


def test_2024_one_of_its_files_means_its_folder(tmp_path):
    folder = write_2024(tmp_path, known())
    for file in ("hyperparams.json", "checkpoints/final.safetensors"):
        assert opened(folder / file).hash == opened(folder).hash


def test_2024_a_pruned_checkpoint_comes_first_as_in_the_library(tmp_path):
    values = known(13)
    pruned = write_2024(tmp_path / "pruned", values)
    folder = write_2024(tmp_path / "both", known(14))
    (pruned / "checkpoints" / "final.safetensors").rename(folder / "checkpoints" / "pruned.safetensors")
    assert torch.equal(opened(folder).load(1).writes[0].b_out, values["b_D"] / OUTWARD)
