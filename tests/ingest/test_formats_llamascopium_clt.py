"""Llamascopium's cross-layer transcoders, grouped by the layer written."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingest.dictionaries import At, JumpReLU, Read, Space, TopK
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.layout import Declared
from ingest.errors import InputError
from tests.ingest.scope_files import THRESHOLD, D, F, K, known, largest, over, positive, scale, write_clt
from tests.ingest.small_dictionaries import Facts, opened

DEPTH = 3
NORMS = {
    **{f"blocks.{layer}.hook_resid_mid": 5.0 + layer for layer in range(DEPTH)},
    **{f"blocks.{layer}.hook_mlp_out": 2.5 + 0.5 * layer for layer in range(DEPTH)},
}
ONES = dict.fromkeys(NORMS, 1.0)
X = torch.randn(DEPTH, 40, D, generator=torch.Generator().manual_seed(9)) * 2


def stack(dtype=torch.float32):
    """By layer read: W_E, b_E, the threshold, b_D of the same layer, and W_D to every layer from it on."""
    layers = []
    for layer in range(DEPTH):
        one = known(20 + layer, dtype)
        later = [known(40 + 10 * layer + target, dtype)["W_D"] for target in range(layer, DEPTH)]
        layers.append({**one, "W_D": later})
    return layers


def expected(layers, norms, keep, *, gate=True):
    """(activations by layer read, in normalised space; outputs by layer written), in float64."""
    acts, out = [], []
    into = [scale(norms[f"blocks.{layer}.hook_resid_mid"]) for layer in range(DEPTH)]
    outward = [scale(norms[f"blocks.{layer}.hook_mlp_out"]) for layer in range(DEPTH)]
    for source, layer in enumerate(layers):
        pre = X[source].double() * into[source] @ layer["W_E"].double() + layer["b_E"].double()
        norm = torch.cat([part.double() for part in layer["W_D"]], dim=1).norm(dim=1)
        acts.append(pre * keep(source)(pre * norm if gate else pre))
    for target in range(DEPTH):
        total = sum(acts[i] @ layers[i]["W_D"][target - i].double() for i in range(target + 1))
        out.append((total + layers[target]["b_D"].double()) / outward[target])
    return acts, out, into


def check(folder, layers, norms, keep, **meaning):
    found = opened(folder)
    acts, out, into = expected(layers, norms, keep, **meaning)
    written = [torch.zeros_like(X[0]) for _ in range(DEPTH)]
    for layer in range(DEPTH):
        dictionary = found.load(layer)
        got = encode(dictionary, X[layer])
        assert torch.equal((got != 0).sum(-1), (acts[layer] != 0).sum(-1))
        assert (got - acts[layer] / into[layer]).abs().max() < 5e-5
        for write, part in zip(dictionary.writes, decode(dictionary, got, X[layer]), strict=True):
            written[write.layer] += part
    for layer in range(DEPTH):
        assert (written[layer] - out[layer]).abs().max() < 1e-4
    return found


def test_a_jumprelu_gates_by_the_norm_over_all_targets_together(tmp_path):
    layers = stack()
    folder = write_clt(tmp_path, layers, NORMS, act_fn="jumprelu")
    found = check(folder, layers, NORMS, lambda i: over(layers[i][THRESHOLD].double().exp()))
    assert (found.format, found.kind, found.layers) == (
        "llamascopium-clt",
        "cross-layer transcoder",
        (0, 1, 2),
    )
    assert found.layout.read == Read("mlp.in", Space.RAW)
    assert found.layout.writes == {
        0: ((0, "mlp", At.STREAM), (1, "mlp", At.STREAM), (2, "mlp", At.STREAM)),
        1: ((1, "mlp", At.STREAM), (2, "mlp", At.STREAM)),
        2: ((2, "mlp", At.STREAM),),
    }
    assert isinstance(found.load(0).gate, JumpReLU)


def test_a_topk_is_each_layers_own(tmp_path):
    layers = stack()
    found = check(write_clt(tmp_path, layers, NORMS, act_fn="topk"), layers, NORMS, lambda i: largest(K))
    assert found.load(1).gate == TopK(K) and found.layout.l0 == dict.fromkeys(range(DEPTH), 5.0)


def test_without_the_decoder_norm_in_the_gate(tmp_path):
    layers = stack()
    for activation, keep in (
        ("topk", lambda i: largest(K)),
        ("jumprelu", lambda i: over(layers[i][THRESHOLD].double().exp())),
    ):
        folder = write_clt(tmp_path, layers, NORMS, act_fn=activation, sparsity_include_decoder_norm=False)
        check(folder, layers, NORMS, keep, gate=False)


def test_norms_already_in_the_weights_are_not_applied_again(tmp_path):
    layers = stack()
    root = dict.fromkeys(NORMS, D**0.5)  # scales of 1
    check(write_clt(tmp_path, layers, NORMS, norm_activation="inference"), layers, root, lambda i: positive)


def test_bfloat16(tmp_path):
    layers = stack(torch.bfloat16)
    found = check(write_clt(tmp_path, layers, NORMS), layers, NORMS, lambda i: positive)
    assert found.layout.dtypes == ("BF16",)


def test_the_bias_of_a_layer_goes_with_its_own_latents(tmp_path):
    found = opened(write_clt(tmp_path, stack(), NORMS))
    for layer in range(DEPTH):
        own, *later = found.load(layer).writes
        assert own.layer == layer and own.b_out is not None
        assert all(write.b_out is None for write in later)


def test_of_one_layer_only_what_it_needs_is_read(tmp_path):
    layers = stack()
    folder = write_clt(tmp_path, layers, NORMS, act_fn="topk")
    path = folder / "sae_weights.safetensors"
    tensors = load_file(str(path))
    tensors["W_E"][2], tensors["W_D.1"][0] = float("nan"), float("inf")
    save_file(tensors, str(path))
    found = opened(folder)
    assert torch.equal(found.load(1).encoders[0].W_enc, layers[1]["W_E"].T)
    with pytest.raises(InputError, match=r"W_D.1\[0\]\[0, 0\] is infinite"):
        found.load(0)
    with pytest.raises(InputError, match=r"W_E\[2\]\[0, 0\] is NaN"):
        found.load(2)


@pytest.mark.parametrize("activation", ["relu", "topk", "jumprelu"])
def test_what_a_layer_takes_in_memory(tmp_path, activation):
    found = opened(write_clt(tmp_path, stack(), NORMS, act_fn=activation))
    for layer in range(DEPTH):
        one = found.load(layer)
        parts = [one.encoders[0].W_enc, one.encoders[0].b_enc, one.writes[0].b_out]
        parts += [write.W_dec for write in one.writes]
        beside = (one.decoder_norm_in_gate, getattr(one.gate, "threshold", None))
        parts += [part for part in beside if part is not None]
        assert found.layout.bytes[layer] == 4 * sum(part.numel() for part in parts)


def test_a_few_of_its_layers(tmp_path):
    found = opened(write_clt(tmp_path, stack(), NORMS), layers=[1])
    assert found.layers == (1,) and [write.layer for write in found.load(1).writes] == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "layertopk"}, "layertopk keeps the k largest of all layers together"),
        ({"act_fn": "batchlayertopk"}, "batchlayertopk keeps the k largest of a whole batch and all layers"),
        (
            {"norm_activation": "token-wise"},
            r"norm_activation is token-wise and blocks.0.hook_mlp_out is written",
        ),
        ({"hook_points_out": ["blocks.0.hook_mlp_out"]}, "as many hooks as hook_points_out.* found 3 and 1"),
        ({"hook_points_in": []}, "at least one, found 0 and 3"),
        (
            {"hook_points_in": [f"blocks.{layer}.hook_resid_mid" for layer in (1, 0, 2)]},
            "writes layer 0, but layer 1 is read",
        ),
        (
            {
                "hook_points_in": [f"blocks.{layer}.hook_resid_mid" for layer in (0, 1, 1)],
                "hook_points_out": [f"blocks.{layer}.hook_mlp_out" for layer in (0, 1, 2)],
            },
            "expected layers in order, each once, found 1 and then 1",
        ),
        ({"apply_decoder_bias_to_pre_encoder": True}, "has a decoder bias for each layer written"),
        ({"hook_points": []}, "hook_points: unknown key; did you mean 'hook_points_in'"),
        ({"expansion_factor": 4}, r"W_E has shape \(3, 8, 24\), expected \(3, 8, 32\)"),
        ({"sae_type": "sae"}, r"sae_type: expected clt, found 'sae'"),
    ],
)
def test_a_configuration_that_does_not_hold(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        opened(write_clt(tmp_path, stack(), NORMS, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("W_D.1"), r"tensor missing: W_D.1; expected .*, found .*W_D.0, W_D.2"),
        (lambda t: t.update({"b_D.3": torch.zeros(D)}), r"tensor left over: b_D.3"),
        (
            # circuit-tracer's grouping, by the layer read
            lambda t: t.update({"W_D.0": torch.zeros(3, F, D), "W_D.2": torch.zeros(1, F, D)}),
            r"W_D.0 has shape \(3, 24, 8\), expected \(1, 24, 8\): .* grouped by the layer written",
        ),
        (lambda t: t.update({"b_E": torch.zeros(F)}), r"b_E has shape \(24\), expected \(3, 24\)"),
        (
            lambda t: t.pop("dataset_average_activation_norm.blocks.1.hook_mlp_out"),
            r"blocks.1.hook_mlp_out: is missing: .* dataset-wise; .* found .*blocks.0.hook_mlp_out",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    path = write_clt(tmp_path, stack(), NORMS) / "sae_weights.safetensors"
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path))
    with pytest.raises(InputError, match=message):
        opened(tmp_path)


def test_the_users_word_must_agree_and_a_layer_cannot_be_said(tmp_path):
    folder = write_clt(tmp_path, stack(), NORMS)
    found = opened(folder, declared=Declared(reads="hook_resid_mid", writes="hook_mlp_out"))
    assert found.hash == opened(folder).hash
    with pytest.raises(InputError, match="holds all layers in one file; leave layer out"):
        opened(folder, declared=Declared(layer=0))
    with pytest.raises(InputError, match=r"but writes says mlp.out; leave writes out"):
        opened(folder, declared=Declared(writes="mlp.out"))


def test_two_of_them_under_one_path_and_another_models(tmp_path):
    for name in ("a", "b"):
        write_clt(tmp_path / name, stack(), NORMS)
    with pytest.raises(InputError, match=r"expected one folder with config.json and .* found .*a, .*b"):
        opened(tmp_path)
    with pytest.raises(InputError, match="W_E has width 8, the model's d_model is 16"):
        opened(tmp_path / "a", Facts(d_model=16))
    with pytest.raises(InputError, match="has a dictionary for layer 2, the model has layers 0 to 1"):
        opened(tmp_path / "a", Facts(n_layers=2))
