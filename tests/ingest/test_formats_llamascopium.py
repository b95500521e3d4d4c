"""Llamascopium's SAEs and transcoders: what the library computes in its normalised space, read as
dictionaries on raw activations."""

import torch

from ingest.dictionaries import At, JumpReLU, Read, RescaledInput, Space, TopK
from ingest.dictionaries.encode import decode, encode
from tests.ingest.scope_files import (
    HOOK,
    NORM,
    THRESHOLD,
    F,
    K,
    X,
    expected,
    known,
    largest,
    over,
    positive,
    scale,
    write_now,
)  # fmt: skip
from tests.ingest.small_dictionaries import opened

MID, OUT = "blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out"


def check(folder, values, into, out, keep, **meaning):
    """The reader's activations are the library's divided by s_in; the outputs and what fires are the same."""
    found = opened(folder)
    dictionary = found.load(1)
    acts, output = expected(values, into, out, keep, **meaning)
    got = encode(dictionary, X)
    assert torch.equal((got != 0).sum(-1), (acts != 0).sum(-1))
    assert (got - acts / into).abs().max() < 3e-5
    assert (decode(dictionary, got, X)[0] - output).abs().max() < 3e-5
    return found, dictionary


def test_a_jumprelu_fires_as_in_the_normalised_space(tmp_path):
    values, s = known(), scale(3.7)
    threshold = values[THRESHOLD].double().exp()
    found, dictionary = check(write_now(tmp_path, values, act_fn="jumprelu"), values, s, s, over(threshold))
    assert (found.format, found.kind, found.layers) == ("llamascopium", "sae", (1,))
    assert isinstance(dictionary.gate, JumpReLU)
    norm = values["W_D"].double().norm(dim=1)
    assert torch.allclose(dictionary.gate.threshold.double(), threshold / (norm * s), rtol=1e-6)
    # What other readings would make fire is not the same in these data.
    acts, _ = expected(values, s, s, over(threshold))
    for wrong in (over(threshold * s), over(threshold * norm), over(values[THRESHOLD].double())):
        assert not torch.equal((expected(values, s, s, wrong)[0] != 0).sum(-1), (acts != 0).sum(-1))


def test_without_the_decoder_norm_in_the_gate(tmp_path):
    values, s = known(), scale(3.7)
    threshold = values[THRESHOLD].double().exp()
    folder = write_now(tmp_path, values, act_fn="jumprelu", sparsity_include_decoder_norm=False)
    check(folder, values, s, s, over(threshold), gate=False)
    folder = write_now(tmp_path, values, act_fn="topk", sparsity_include_decoder_norm=False)
    _, dictionary = check(folder, values, s, s, largest(K), gate=False)
    assert dictionary.decoder_norm_in_gate is None


def test_a_topk_chooses_by_activation_times_decoder_norm(tmp_path):
    values, s = known(1), scale(3.7)
    found, dictionary = check(write_now(tmp_path, values, act_fn="topk"), values, s, s, largest(K))
    assert dictionary.gate == TopK(K) and found.layout.l0 == {1: 5.0}
    plain, _ = expected(values, s, s, largest(K), gate=False)
    assert not torch.equal(plain != 0, encode(dictionary, X) != 0)


def test_a_relu_ignores_the_decoder_norm(tmp_path):
    values, s = known(2), scale(3.7)
    found, _ = check(write_now(tmp_path, values), values, s, s, positive)
    assert found.layout.activation == "ReLU"
    assert found.layout.provenance == {
        "library_version": "2.0.0b34",
        "norm_activation": "dataset-wise",
        "average_norm_in": "3.7",
        "average_norm_out": "3.7",
    }


def test_norms_already_in_the_weights_are_not_applied_again(tmp_path):
    values = known(3)
    threshold = values[THRESHOLD].double().exp()
    # Where they were never set the file holds arbitrary numbers.
    for norm in (3.7, 0.0, float("nan")):
        folder = write_now(tmp_path, values, {HOOK: norm}, act_fn="jumprelu", norm_activation="inference")
        _, dictionary = check(folder, values, 1.0, 1.0, over(threshold))
        assert torch.equal(dictionary.writes[0].W_dec, values["W_D"])
    write_now(tmp_path, values, {}, norm_activation="inference")
    check(tmp_path, values, 1.0, 1.0, positive)


def test_a_transcoder_has_one_scale_for_its_input_and_one_for_its_output(tmp_path):
    values = known(4)
    threshold = values[THRESHOLD].double().exp()
    folder = write_now(
        tmp_path, values, {MID: 5.0, OUT: 2.5}, act_fn="jumprelu", hook_point_in=MID, hook_point_out=OUT
    )
    found, dictionary = check(folder, values, scale(5.0), scale(2.5), over(threshold))
    assert (found.kind, dictionary.read) == ("transcoder", Read("mlp.in", Space.RAW))
    assert found.layout.writes == {1: ((1, "mlp", At.STREAM),)}
    assert dictionary.b_in is None


def test_token_wise_norms_are_taken_anew_for_every_token(tmp_path):
    values = known(5)
    threshold = values[THRESHOLD].double().exp()
    folder = write_now(
        tmp_path, values, {HOOK: float("nan")}, act_fn="jumprelu", norm_activation="token-wise"
    )
    dictionary = opened(folder).load(1)
    assert dictionary.input_norm == RescaledInput(8**0.5)
    got = encode(dictionary, X)
    out = decode(dictionary, got, X)[0]
    for token, x in enumerate(X.double()):
        into = 8**0.5 / x.norm()
        pre = (into * x) @ values["W_E"].double() + values["b_E"].double()
        acts = pre * (pre * values["W_D"].double().norm(dim=1) > threshold)
        assert (got[token] - acts).abs().max() < 3e-5
        output = (acts @ values["W_D"].double() + values["b_D"].double()) / into
        assert (out[token] - output).abs().max() < 3e-5


def test_a_decoder_bias_subtracted_from_the_normalised_input(tmp_path):
    values, s = known(6), scale(3.7)
    folder = write_now(tmp_path, values, apply_decoder_bias_to_pre_encoder=True)
    check(folder, values, s, s, positive, centred=True)


def test_no_decoder_bias(tmp_path):
    values, s = known(), scale(3.7)
    folder = write_now(tmp_path, values, use_decoder_bias=False)
    _, dictionary = check(folder, {**values, "b_D": torch.zeros(8)}, s, s, positive)
    assert dictionary.writes[0].b_out is None


def test_bfloat16_weights_and_norms_are_widened_exactly(tmp_path):
    values = known(7, dtype=torch.bfloat16)
    s = scale(float(torch.tensor(3.7, dtype=torch.bfloat16)))
    folder = write_now(tmp_path, values, {HOOK: 3.7}, act_fn="jumprelu")
    # The norm in the weights' own type, as the library writes it.
    from safetensors.torch import load_file, save_file

    path = folder / "sae_weights.safetensors"
    tensors = load_file(str(path))
    tensors[NORM + HOOK] = tensors[NORM + HOOK].bfloat16()
    save_file(tensors, str(path))
    found, dictionary = check(folder, values, s, s, over(values[THRESHOLD].double().exp()))
    assert found.layout.dtypes == ("BF16", "F32")
    assert torch.equal(dictionary.encoders[0].W_enc, values["W_E"].T.float())


def test_a_latent_without_a_decoder_never_fires(tmp_path):
    values, s = known(), scale(3.7)
    values["W_D"][3] = 0.0
    dictionary = opened(write_now(tmp_path, values, act_fn="jumprelu")).load(1)
    got = encode(dictionary, X)
    assert (got[:, 3] == 0).all() and got.isfinite().all()
    others = [latent for latent in range(F) if latent != 3]
    acts, _ = expected(values, s, s, over(values[THRESHOLD].double().exp()))
    assert torch.equal((got != 0)[:, others], (acts != 0)[:, others])


def test_what_a_layer_takes_in_memory(tmp_path):
    for activation in ("relu", "topk", "jumprelu"):
        found = opened(write_now(tmp_path, known(), act_fn=activation))
        one = found.load(1)
        parts = [one.encoders[0].W_enc, one.encoders[0].b_enc, one.writes[0].W_dec, one.writes[0].b_out]
        parts += [
            part
            for part in (one.decoder_norm_in_gate, getattr(one.gate, "threshold", None))
            if part is not None
        ]
        assert found.layout.bytes == {1: 4 * sum(part.numel() for part in parts)}


def test_one_folder_for_each_layer_makes_a_set(tmp_path):
    for layer in (0, 2):
        hook = f"blocks.{layer}.hook_resid_post"
        write_now(
            tmp_path / f"L{layer}", known(layer), {hook: 2.0 + layer}, hook_point_in=hook, hook_point_out=hook
        )
    found = opened(tmp_path)
    assert found.layers == (0, 2)
    assert "average_norm_in" not in found.layout.provenance  # not one of both
    assert torch.equal(found.load(2).encoders[0].W_enc, known(2)["W_E"].T)


def test_the_models_name_is_kept(tmp_path):
    write_now(tmp_path, known())
    (tmp_path / "lm_config.json").write_text('{"model_name": "meta-llama/Llama-3.1-8B", "max_length": 2048}')
    assert opened(tmp_path).layout.provenance["model_name"] == "meta-llama/Llama-3.1-8B"
