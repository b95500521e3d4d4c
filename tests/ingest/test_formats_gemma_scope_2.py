"""Gemma Scope 2's safetensors, single dictionaries and cross-layer transcoders, written here from known
tensors; every expectation is computed here, in float64, from those tensors."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ingest.dictionaries import At, Read, Space, describe_set
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.layout import Declared
from ingest.errors import InputError
from tests.ingest.gemma_files import D, F, X, activations, params, tensor
from tests.ingest.small_dictionaries import Facts, opened

GEMMA3 = Facts(n_layers=3, architecture="Gemma3ForCausalLM", norm_after=True)
CONFIG = {
    "hf_hook_point_in": "model.layers.2.pre_feedforward_layernorm.output",
    "hf_hook_point_out": "model.layers.2.post_feedforward_layernorm.output",
    "model_name": "google/gemma-3-1b-pt", "architecture": "jump_relu", "width": F, "l0": 20,
    "affine_connection": False, "type": "transcoder",
}  # fmt: skip


def save(path, values, dtype=torch.float32):
    path.parent.mkdir(parents=True, exist_ok=True)
    lower = {key.lower(): torch.from_numpy(value).to(dtype).contiguous() for key, value in values.items()}
    save_file(lower, str(path))


def write(folder, values=None, dtype=torch.float32, **config):
    save(folder / "params.safetensors", params() if values is None else values, dtype)
    keys = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def cross(layers=3, skip=True):
    """A cross-layer transcoder as its files hold it, W_dec (F, layers, d) zero before its own."""
    files = []
    for layer in range(layers):
        rng = np.random.default_rng(100 + layer)
        decoder = rng.standard_normal((F, layers, D))
        decoder[:, :layer] = 0
        also = {"affine_skip_connection": rng.standard_normal((D, D))} if skip else {}
        files.append(params(layer) | {"W_dec": decoder} | also)
    return files


def write_cross(folder, files):
    for layer, values in enumerate(files):
        save(folder / f"params_layer_{layer}.safetensors", values)
    return folder


def refused(where, facts=GEMMA3, **options):
    with pytest.raises(InputError) as error:
        opened(where, facts, **options).verify()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_transcoder_reads_behind_the_gain_and_writes_what_joins_the_stream(tmp_path):
    values = params()
    found = opened(write(tmp_path / "a", values), GEMMA3)
    assert (found.format, found.kind, found.layers) == ("gemma-scope-2", "transcoder", (2,))
    dictionary = found.load(2)
    assert dictionary.read == Read("mlp.in", Space.NORMALISED_WITH_GAIN)
    assert [(w.layer, w.site, w.at) for w in dictionary.writes] == [(2, "mlp", At.STREAM)]
    acts = encode(dictionary, tensor(X))
    assert np.abs(acts.numpy() - activations(values, X)).max() < 1e-5
    out = activations(values, X) @ values["W_dec"] + values["b_dec"]
    assert np.abs(decode(dictionary, acts)[0].numpy() - out).max() < 1e-4
    assert found.layout.l0 == {2: 20.0}
    assert found.layout.provenance == {"model_name": "google/gemma-3-1b-pt", "type": "transcoder"}


def test_the_skip_is_not_transposed(tmp_path):
    skip = np.random.default_rng(5).standard_normal((D, D))
    values = params() | {"affine_skip_connection": skip}
    dictionary = opened(write(tmp_path / "a", values, affine_connection=True), GEMMA3).load(2)
    acts = activations(values, X)
    out = acts @ values["W_dec"] + values["b_dec"] + X @ skip
    got = decode(dictionary, encode(dictionary, tensor(X)), tensor(X))[0].numpy()
    assert np.abs(got - out).max() < 2e-4
    assert np.abs(got - (out - X @ skip + X @ skip.T)).max() > 1


@pytest.mark.parametrize(
    ("hook", "read", "written"),
    [
        ("model.layers.2.output", Read("resid_post", Space.RAW), ("resid_post", At.STREAM)),
        ("model.layers.2.post_feedforward_layernorm.output", Read("mlp.out", Space.BRANCH_OUTPUT),
         ("mlp", At.STREAM)),
        ("model.layers.2.self_attn.o_proj.input", Read("attn.z", Space.Z), ("attn.z", At.MODULE)),
    ],
)  # fmt: skip
def test_an_sae_writes_what_it_reads(hook, read, written, tmp_path):
    where = write(tmp_path / "a", hf_hook_point_in=hook, hf_hook_point_out=None, type="sae")
    layout = describe_set(where, GEMMA3)
    assert (layout.kind, layout.read) == ("sae", read)
    assert layout.writes == {2: ((2, *written),)}


def test_bfloat16_weights_are_widened_exactly(tmp_path):
    values = params()
    found = opened(write(tmp_path / "a", values, torch.bfloat16), GEMMA3)
    assert found.layout.dtypes == ("BF16",)
    want = torch.from_numpy(values["W_enc"]).bfloat16().float().T
    assert torch.equal(found.load(2).encoders[0].W_enc, want)


def test_without_a_configuration_the_user_says_the_hook(tmp_path):
    where = write(tmp_path / "resid_post" / "layer_2_width_16k_l0_big")
    (where / "config.json").unlink()
    assert "has no config.json" in refused(where)
    layout = describe_set(where, GEMMA3, declared=Declared("resid_post", None, 1))
    assert layout.writes == {1: ((1, "resid_post", At.STREAM),)}
    assert "nothing says its layer" in refused(where, declared=Declared("resid_post"))


def test_a_set_of_layers_from_a_folder_above(tmp_path):
    for layer in (0, 2):
        hook = f"model.layers.{layer}.output"
        write(tmp_path / f"layer_{layer}_width_16k_l0_medium", params(layer), l0=20 + layer,
              hf_hook_point_in=hook, hf_hook_point_out=hook)  # fmt: skip
    found = opened(tmp_path, GEMMA3)
    assert (found.layers, found.layout.l0) == ((0, 2), {0: 20.0, 2: 22.0})
    write(tmp_path / "layer_2_width_16k_l0_big", hf_hook_point_in=hook, hf_hook_point_out=hook)
    message = refused(tmp_path)
    assert "layer_2_width_16k_l0_big" in message
    assert "layer_2_width_16k_l0_medium" in message


def test_a_cross_layer_transcoder_adds_each_b_dec_and_skip_once_to_its_own_layer(tmp_path):
    files = cross()
    found = opened(write_cross(tmp_path / "clt" / "width_262k_l0_medium", files), GEMMA3)
    assert (found.kind, found.layers) == ("cross-layer transcoder", (0, 1, 2))
    assert any("clt" in note for note in found.notes)
    xs = [X, X[::-1], np.roll(X, 1, axis=0)]
    acts = [activations(values, x) for values, x in zip(files, xs, strict=True)]
    want = [
        sum(acts[source] @ files[source]["W_dec"][:, target] for source in range(target + 1))
        + files[target]["b_dec"]
        + xs[target] @ files[target]["affine_skip_connection"]
        for target in range(3)
    ]
    total = [0, 0, 0]
    for layer in range(3):
        dictionary = found.load(layer)
        own = encode(dictionary, tensor(xs[layer]))
        assert np.abs(own.numpy() - acts[layer]).max() < 1e-5
        assert [w.layer for w in dictionary.writes] == list(range(layer, 3))
        assert {w.at for w in dictionary.writes} == {At.STREAM}
        for written, out in zip(dictionary.writes, decode(dictionary, own, tensor(xs[layer])), strict=True):
            total[written.layer] = total[written.layer] + out.numpy().astype(np.float64)
    assert max(np.abs(got - one).max() for got, one in zip(total, want, strict=True)) < 5e-4
    assert found.layout.bytes[1] == 4 * (D * F + 2 * F * D + 2 * F + D + D * D)


def test_a_cross_layer_transcoder_of_which_one_layer_is_read(tmp_path):
    files = cross(skip=False)
    found = opened(write_cross(tmp_path / "clt", files), GEMMA3, layers=[1])
    assert found.layers == (1,)
    assert found.layout.writes == {1: ((1, "mlp", At.STREAM), (2, "mlp", At.STREAM))}
    assert [w.b_out is None for w in found.load(1).writes] == [False, True]


def test_a_decoder_below_its_own_layer_is_an_error(tmp_path):
    files = cross()
    files[2]["W_dec"][3, 1, 4] = 1e-3
    message = refused(write_cross(tmp_path / "clt", files))
    assert "params_layer_2" in message
    assert "writes to layer 1, below layer 2" in message


def test_a_cross_layer_transcoder_that_is_incomplete_or_elsewhere(tmp_path):
    where = write_cross(tmp_path / "clt", cross())
    (where / "params_layer_1.safetensors").unlink()
    assert "has no params_layer_1.safetensors" in refused(where)
    where = write_cross(tmp_path / "2" / "clt", cross(2))
    assert "2 layers, the model has 3" in refused(where)
    where = write_cross(tmp_path / "mine", cross())
    assert "nothing says what this reads and writes" in refused(where)
    declared = Declared("pre_feedforward_layernorm.output", "mlp.hook_out")
    assert describe_set(where, GEMMA3, declared=declared).writes[2] == ((2, "mlp", At.MODULE),)
    wrong = Declared("hook_resid_post", "hook_resid_post")
    assert "expected a cross-layer transcoder of the MLPs" in refused(where, declared=wrong)
    write(tmp_path / "mine" / "more")
    assert "a cross-layer transcoder among them" in refused(tmp_path / "mine")


@pytest.mark.parametrize(
    ("change", "config", "told"),
    [
        ({"threshold": None}, {}, "tensor missing: threshold"),
        ({"W_skip": np.zeros((D, D))}, {}, "tensor left over: w_skip"),
        ({"W_enc": params()["W_enc"].T}, {}, "looks transposed"),
        ({"affine_skip_connection": np.zeros((D, D + 1))}, {"affine_connection": True}, "expected (8, 8)"),
        ({}, {"affine_connection": True}, "has no affine_skip_connection"),
        ({"affine_skip_connection": np.zeros((D, D))}, {}, "has an affine_skip_connection"),
        ({}, {"width": 16384}, "says width 16384"),
        ({}, {"architecture": "topk"}, "architecture: expected one of"),
        ({}, {"hf_hook_point_in": None}, "hf_hook_point_in: is missing"),
        ({}, {"hf_hook_point_in": "model.layers.2.elsewhere"}, "hf_hook_point_in: unknown hook"),
        ({}, {"hf_hook_point_in": "model.layers.7.output"}, "layer 7"),
        ({}, {"normalise": True}, "normalise: unknown key"),
        (params(d_in=16, d_out=16), {}, "width 16, the model's d_model is 8"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_what_it_should_be(change, config, told, tmp_path):
    values = {key: value for key, value in (params() | change).items() if value is not None}
    assert told in refused(write(tmp_path / "a", values, **config))


def test_what_the_user_says_may_not_differ_from_the_file(tmp_path):
    where = write(tmp_path / "a")
    assert "leave reads out" in refused(where, declared=Declared("hook_resid_post"))
    assert "leave layer out" in refused(where, declared=Declared(layer=1))
