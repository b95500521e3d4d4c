"""Each gate does exactly what its docstring says, by numbers small enough to check by eye, then by
libraries' files."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingest.dictionaries import (
    At,
    Dictionary,
    Encoder,
    Gated,
    GatedMLP,
    GroupMax,
    JumpReLU,
    LayerNormInput,
    Pointwise,
    Read,
    ReLU,
    RescaledInput,
    ScalarThreshold,
    Space,
    TopK,
    Write,
)
from ingest.dictionaries.encode import activation_function, decode, encode
from ingest.dictionaries.types import NEURON_ACTIVATIONS
from ingest.errors import InputError

FORMATS = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "formats"


def passing(gate, b_enc=None, **more):
    """A dictionary whose pre-activation is its input: what encode returns is the gate alone."""
    size = 4 if b_enc is None else len(b_enc)
    bias = torch.zeros(size) if b_enc is None else torch.tensor(b_enc)
    two = isinstance(gate, GatedMLP)
    return Dictionary(
        set="s",
        kind="sae",
        layer=0,
        read=Read("resid_post", Space.RAW),
        encoders=tuple(Encoder(name, torch.eye(size), bias) for name in (("gate", "up") if two else ("in",))),
        writes=(Write(0, "resid_post", At.STREAM, torch.eye(size), None),),
        gate=gate,
        **more,
    )


@pytest.mark.parametrize(
    ("gate", "pre", "expected", "signed"),
    [
        (ReLU(), [-1, 0, 2, 3], [0, 0, 2, 3], False),
        (JumpReLU(torch.tensor([1.0, 2, 2, -5]), relu_too=True), [1, 2, 3, -4], [0, 0, 3, 0], False),
        (JumpReLU(torch.tensor([1.0, 2, 2, -5]), relu_too=False), [1, 2, 3, -4], [0, 0, 3, -4], True),
        (JumpReLU(torch.tensor([1.0, 2, 2, 0]), relu_too=False), [1, 2, 3, -4], [0, 0, 3, 0], False),
        (ScalarThreshold(1.0), [-2, 1, 2, 3], [0, 0, 2, 3], False),
        (ScalarThreshold(-1.0, relu_too=False), [-2, -0.5, 2, 3], [0, -0.5, 2, 3], True),
        (ScalarThreshold(-1.0), [-2, -0.5, 2, 3], [0, 0, 2, 3], False),
        (TopK(2), [1, 5, -7, 3], [0, 5, 0, 3], False),
        (TopK(3), [1, -5, -7, -3], [1, 0, 0, 0], False),  # fewer than k are positive
        (TopK(3, relu_too=False), [1, -5, -7, -3], [1, -5, 0, -3], True),
        (TopK(2, by_magnitude=True, relu_too=False), [1, 5, -7, 3], [0, 5, -7, 0], True),
        (TopK(2), [4, 4, 4, 1], [4, 4, 0, 0], False),  # ties: the smaller number
        (TopK(9), [1, 2, 3, 4], [1, 2, 3, 4], False),
        (GroupMax(2), [1, 2, 4, 3], [0, 2, 4, 0], False),
        (GroupMax(2), [-1, -2, 4, 4], [0, 0, 4, 0], False),  # nothing positive in a group; a tie
        (
            Gated(torch.tensor([1.0, 1, -1, 2]), torch.tensor([0.0, -5, 0, 0])),
            [1, 2, 3, -4],
            [1, 0, 0, 0],
            False,
        ),
        (Pointwise("relu"), [-1, 0, 2, 3], [0, 0, 2, 3], False),
        (Pointwise("relu2"), [-1, 0, 2, 3], [0, 0, 4, 9], False),
        (GatedMLP("relu"), [-1, 0, 2, 3], [0, 0, 4, 9], True),
    ],
)
def test_gate(gate, pre, expected, signed):
    dictionary = passing(gate)
    acts = encode(dictionary, torch.tensor([pre], dtype=torch.float32))
    assert acts.tolist() == [[float(value) for value in expected]]
    assert dictionary.signed is signed


def test_gated_opens_by_its_own_bias_and_passes_by_the_magnitudes():
    """(pre - b_enc) * scale + b_gate decides, pre passes: with b_enc 1 the gate sees 2 and 1."""
    gate = Gated(torch.tensor([1.0, 1.0]), torch.tensor([-1.5, -1.5]))
    assert encode(passing(gate, b_enc=[1.0, 1.0]), torch.tensor([[2.0, 1.0]])).tolist() == [[3.0, 0.0]]


def test_decoder_norm_in_the_gate_chooses_and_does_not_scale():
    weighed = passing(TopK(1), decoder_norm_in_gate=torch.tensor([1.0, 1, 10, 1]))
    assert encode(weighed, torch.tensor([[5.0, 1, 2, 4]])).tolist() == [[0, 0, 2, 0]]
    grouped = passing(GroupMax(2), decoder_norm_in_gate=torch.tensor([9.0, 1, 1, 3]))
    assert encode(grouped, torch.tensor([[1.0, 2, 4, 3]])).tolist() == [[1, 0, 0, 3]]


def test_input_bias_is_subtracted_after_the_norm():
    """SAELens: b_dec lives in the normalised space."""
    dictionary = passing(ReLU(), input_norm=LayerNormInput(eps=0.0), b_in=torch.tensor([0.5, 0.5, 0.5, 0.5]))
    x = torch.tensor([[0.0, 2.0, 4.0, 6.0]])
    expected = ((x - 3) / torch.tensor(20 / 3).sqrt() - 0.5).relu()  # n - 1: variance 20 / 3
    torch.testing.assert_close(encode(dictionary, x), expected)


@pytest.mark.parametrize("norm", [LayerNormInput(eps=0.0), RescaledInput(norm=2.0)])
def test_a_norm_is_undone_on_the_way_out(norm):
    """Encoder and decoder are the identity and nothing is negative: what comes out is what went in."""
    x = torch.tensor([[1.0, 2.0, 4.0, 5.0]])
    open_ = TopK(4, relu_too=False)
    dictionary = passing(open_, input_norm=norm)
    torch.testing.assert_close(decode(dictionary, encode(dictionary, x), x)[0], x)
    kept = passing(open_, input_norm=dataclasses.replace(norm, restores=False))
    torch.testing.assert_close(decode(kept, encode(kept, x))[0], encode(kept, x))


def test_several_writes_and_a_skip_into_the_first():
    """Two layers written, as a cross-layer transcoder does."""
    one, two = torch.eye(4), 2 * torch.eye(4)
    dictionary = dataclasses.replace(
        passing(ReLU()),
        writes=(Write(0, "mlp", At.MODULE, one, torch.ones(4)), Write(1, "mlp", At.MODULE, two, None)),
        W_skip=10 * torch.eye(4),
    )
    x = torch.tensor([[1.0, -1, 0, 2]])
    first, second = decode(dictionary, encode(dictionary, x), x)
    assert first.tolist() == [[12.0, -9, 1, 23]]
    assert second.tolist() == [[2.0, 0, 0, 4]]
    with pytest.raises(ValueError, match="needs x"):
        decode(dictionary, encode(dictionary, x))


def test_only_latents_may_be_rescaled():
    assert passing(TopK(2)).rescalable
    assert passing(Pointwise("relu")).rescalable
    assert not passing(Pointwise("gelu")).rescalable
    assert not passing(GatedMLP("relu")).rescalable


def test_every_activation_of_the_list_has_its_formula():
    """Against Hugging Face's own, where it has one."""
    from transformers.activations import ACT2FN

    u = torch.linspace(-4, 4, 33)
    for name in NEURON_ACTIVATIONS:
        theirs = ACT2FN[name](u)
        torch.testing.assert_close(activation_function(name)(u), theirs, atol=1e-6, rtol=1e-6)
    with pytest.raises(InputError, match="'tanhshrink' is not supported"):
        activation_function("tanhshrink")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gate": GatedMLP("silu")}, "readings"),
        ({"b_in": torch.ones(3)}, "b_in has shape"),
        ({"W_skip": torch.ones(4, 3)}, "W_skip has shape"),
        ({"gate": JumpReLU(torch.ones(3), relu_too=True)}, "threshold has shape"),
        ({"writes": (Write(0, "mlp", At.MODULE, torch.ones(3, 4), None),)}, "W_dec of layer 0 has shape"),
        ({"writes": (Write(0, "mpl", At.MODULE, torch.ones(4, 4), None),)}, "write site 'mpl'"),
    ],
)
def test_a_reader_cannot_build_nonsense(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(passing(ReLU()), **change)


# --- what libraries compute on files they wrote: is the type wide enough, and are the gates right? ----------


def plain(values, gate, *, W_enc="W_enc", **more):
    """The files' tensors in the type, for the layouts that store W_enc (d, F)."""
    return Dictionary(
        set="s",
        kind="sae",
        layer=3,
        read=Read("resid_post", Space.RAW),
        encoders=(Encoder("in", values[W_enc].T.contiguous(), more.pop("b_enc", values.get("b_enc"))),),
        writes=(Write(3, "resid_post", At.STREAM, values["W_dec"], values["b_dec"]),),
        gate=gate,
        **more,
    )


def gated(values):
    scale = values["r_mag"].exp()
    values["W_enc"] = values["W_enc"] * scale
    return plain(values, Gated(1 / scale, values["b_gate"]), b_enc=values["b_mag"], b_in=values["b_dec"])


def by_magnitude(values):
    return plain(values, TopK(8, by_magnitude=True, relu_too=False), b_in=values["b_dec"])


def layer_norm(values):
    return plain(values, ReLU(), input_norm=LayerNormInput())


def relu_beside_a_threshold(values):
    return plain(values, JumpReLU(values["threshold"], relu_too=True), b_in=values["b_dec"])


def group_max(values):
    width = values["encoder.weight"].shape[1]
    return Dictionary(
        set="s",
        kind="transcoder",
        layer=1,
        read=Read("mlp.in", Space.NORMALISED_WITH_GAIN),
        encoders=(Encoder("in", values["encoder.weight"], values["encoder.bias"]),),
        writes=(Write(1, "mlp", At.MODULE, values["W_dec"], values["b_dec"]),),
        gate=GroupMax(values["k"]),
        b_in=None if values["transcode"] else values["b_dec"] * torch.ones(width),
    )


@pytest.mark.parametrize(
    ("case", "build"),
    [
        ("saelens-gated", gated),
        ("saelens-abstopk", by_magnitude),
        ("saelens-standard-layer-norm", layer_norm),
        ("saelens-jumprelu-negative-threshold", relu_beside_a_threshold),
        ("sparsify-groupmax", group_max),
    ],
)
@pytest.mark.skipif(not FORMATS.is_dir(), reason="the files of other libraries are not here")
def test_gate_as_a_library_computes_it(case, build):
    files = FORMATS / case / "files"
    weights = next(files.rglob("*.safetensors"))
    values = load_file(str(weights))
    if (weights.parent / "cfg.json").is_file():
        config = json.loads((weights.parent / "cfg.json").read_text())
        values |= {key: config[key] for key in ("k", "transcode") if key in config}
    dictionary = build(values)
    expected = load_file(str(FORMATS / case / "expected.safetensors"))
    acts = encode(dictionary, expected["x"])
    assert (acts - expected["acts"]).abs().max() < 1e-5
    assert torch.equal((acts != 0).sum(-1).float(), expected["l0"].float())
    assert (decode(dictionary, acts, expected["x"])[0] - expected["out"]).abs().max() < 1e-5
