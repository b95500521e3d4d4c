"""The model's own neurons: reading, activating and writing them is the MLP itself, exactly."""

from dataclasses import dataclass

import pytest
import torch
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from ingest.dictionaries import At, GatedMLP, Pointwise, Read, Space, open_set
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Facts, Outline

X = torch.randn(9, 8, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Weights:
    W_in: torch.Tensor
    b_in: torch.Tensor | None
    W_gate: torch.Tensor | None
    b_gate: torch.Tensor | None
    W_out: torch.Tensor
    b_out: torch.Tensor | None
    activation: str


@dataclass(frozen=True)
class WithMLP(Outline):
    mlp: Weights | None = None

    def mlp_weights(self, layer):
        return self.mlp


def plain(activation):
    """GPT-2's MLP, its weights stored (d_in, d_out)."""
    torch.manual_seed(0)
    mlp = GPT2MLP(12, GPT2Config(n_embd=8, activation_function=activation, resid_pdrop=0.0)).requires_grad_(
        False
    )
    for bias in (mlp.c_fc.bias, mlp.c_proj.bias):
        bias.normal_()
    weights = Weights(
        mlp.c_fc.weight, mlp.c_fc.bias, None, None, mlp.c_proj.weight, mlp.c_proj.bias, activation
    )
    return mlp, WithMLP(Facts(activation=activation), mlp=weights)


def gated(activation, bias):
    """Llama's MLP, its weights stored (d_out, d_in)."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=12, hidden_act=activation, mlp_bias=bias
    )
    mlp = LlamaMLP(config).requires_grad_(False)
    up, gate, down = mlp.up_proj, mlp.gate_proj, mlp.down_proj
    weights = Weights(up.weight.T, up.bias, gate.weight.T, gate.bias, down.weight.T, down.bias, activation)
    return mlp, WithMLP(Facts(gated=True, activation=activation), mlp=weights)


def neurons(model, **options):
    return open_set(None, name="neurons", model=model, format="neurons", **options)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu", "quick_gelu"])
def test_plain_neurons_are_the_mlp(activation):
    mlp, model = plain(activation)
    dictionary = neurons(model).load(1)
    torch.testing.assert_close(decode(dictionary, encode(dictionary, X))[0], mlp(X), atol=1e-6, rtol=1e-5)
    assert dictionary.readings == ("in",)
    assert dictionary.gate == Pointwise(activation)
    assert dictionary.signed is (activation != "relu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_neurons_are_the_mlp(activation, bias):
    mlp, model = gated(activation, bias)
    dictionary = neurons(model).load(0)
    torch.testing.assert_close(decode(dictionary, encode(dictionary, X))[0], mlp(X), atol=1e-6, rtol=1e-5)
    assert dictionary.readings == ("gate", "up")
    assert dictionary.gate == GatedMLP(activation)
    assert dictionary.signed is True
    # The two readings are told apart: the gate's encoder is gate_proj.
    assert torch.equal(dictionary.encoders[0].W_enc, mlp.gate_proj.weight)
    assert torch.equal(dictionary.encoders[1].W_enc, mlp.up_proj.weight)


def test_neurons_read_behind_the_norm_and_write_at_the_module():
    found = neurons(gated("silu", False)[1])
    dictionary = found.load(2)
    assert dictionary.read == Read("mlp.in", Space.NORMALISED_WITH_GAIN)
    assert [(write.layer, write.site, write.at) for write in dictionary.writes] == [(2, "mlp", At.MODULE)]
    assert (found.kind, found.format, found.key(2)) == ("neurons", "neurons", "small/neurons/L02.mlp")
    assert dict(found.sizes) == {0: 12, 1: 12, 2: 12}
    assert found.source is None


def test_hash_follows_the_model_and_layer_without_reading_a_weight():
    unread = WithMLP()  # mlp_weights gives None: reading it would fail
    found = neurons(unread)
    assert len({found.hash_of(layer) for layer in range(3)}) == 3
    assert found.hash == neurons(unread, layers=[0, 1, 2]).hash
    assert found.hash_of(0) != neurons(WithMLP(hash="b" * 64)).hash_of(0)
    loaded = neurons(plain("gelu")[1]).load(0)
    assert loaded.hash == found.hash_of(0)


def test_activation_without_a_formula_is_refused_before_work():
    with pytest.raises(InputError, match="activation 'xielu' is not supported"):
        neurons(WithMLP(Facts(activation="xielu")))


def test_a_layer_the_model_lacks():
    with pytest.raises(InputError, match="layer 3 was asked for, the model has layers 0 to 2"):
        neurons(WithMLP(), layers=[3])
