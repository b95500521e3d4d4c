"""circuit-tracer's cross-layer transcoders, written here from known tensors; every expectation is computed
here, in float64, from those tensors. And per-layer files that a config.yaml lists."""

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from ingest.dictionaries import At, JumpReLU, Read, ReLU, Space, describe_set
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Facts, Outline, opened, tensors, write_set

D, F, L = 8, 20, 3
HOOKS = {
    "model_kind": "cross_layer_transcoder",
    "feature_input_hook": "hook_resid_mid",
    "feature_output_hook": "hook_mlp_out",
}
X = np.random.default_rng(7).standard_normal((L, 30, D)) * np.logspace(-1, 1, 30)[:, None]


def layers(count=L, threshold=None):
    """By layer: W_enc, b_enc, b_dec, W_dec (F, count - layer, d), and thresholds where they are wanted."""
    made = []
    for layer in range(count):
        rng = np.random.default_rng(layer)
        values = {
            "W_enc": rng.standard_normal((F, D)),
            "b_enc": rng.standard_normal(F),
            "b_dec": 3 * rng.standard_normal(D),
            "W_dec": rng.standard_normal((F, count - layer, D)),
        }
        if threshold is not None:
            values["threshold"] = threshold + rng.random(F)
        made.append(values)
    return made


def write(folder, made, dtype=torch.float32, **config):
    folder.mkdir(parents=True, exist_ok=True)
    for layer, values in enumerate(made):
        named = {
            f"{key}_{layer}": torch.from_numpy(value).to(dtype).contiguous() for key, value in values.items()
        }
        decoder = {key: named.pop(key) for key in list(named) if key.startswith("W_dec")}
        save_file(named, str(folder / f"W_enc_{layer}.safetensors"))
        save_file(decoder, str(folder / f"W_dec_{layer}.safetensors"))
    keys = {key: value for key, value in {**HOOKS, **config}.items() if value is not None}
    (folder / "config.yaml").write_text(yaml.safe_dump(keys))
    return folder


def defined(made):
    """(activations by layer, outputs by layer) of the definition, written from the layer written to."""
    acts = []
    for values, x in zip(made, X, strict=True):
        pre = x @ values["W_enc"].T + values["b_enc"]
        acts.append(np.where(pre > values.get("threshold", np.zeros(F)), pre, 0.0))
    outs = []
    for target in range(L):
        out = np.tile(made[target]["b_dec"], (X.shape[1], 1))
        for source in range(target + 1):
            out = out + acts[source] @ made[source]["W_dec"][:, target - source]
        outs.append(out)
    return acts, outs


def refused(where, facts=None, **options):
    with pytest.raises(InputError) as error:
        opened(where, facts, **options).verify()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("threshold", [None, 0.3, -1.5])
def test_outputs_of_a_layer_sum_over_the_layers_below_and_add_its_b_dec_once(threshold, tmp_path):
    made = layers(threshold=threshold)
    found = opened(write(tmp_path / "clt", made))
    assert (found.format, found.kind) == ("circuit-tracer-clt", "cross-layer transcoder")
    acts, outs = defined(made)
    total = [0, 0, 0]
    for layer in range(L):
        dictionary = found.load(layer)
        assert dictionary.read == Read("mlp.in", Space.RAW)
        assert isinstance(dictionary.gate, ReLU if threshold is None else JumpReLU)
        assert dictionary.signed is (threshold == -1.5)
        own = encode(dictionary, torch.from_numpy(X[layer].astype(np.float32)))
        assert np.abs(own.numpy() - acts[layer]).max() < 1e-4
        assert [(w.layer, w.at) for w in dictionary.writes] == [(m, At.STREAM) for m in range(layer, L)]
        for write_, out in zip(dictionary.writes, decode(dictionary, own), strict=True):
            total[write_.layer] = total[write_.layer] + out.numpy().astype(np.float64)
    assert max(np.abs(got - one).max() for got, one in zip(total, outs, strict=True)) < 5e-4
    assert (acts[0] < 0).any() == (threshold == -1.5)


def test_layers_are_read_one_at_a_time_and_their_memory_is_known(tmp_path):
    made = layers()
    found = opened(write(tmp_path / "clt", made, torch.bfloat16), layers=[1])
    assert found.layers == (1,)
    assert found.layout.bytes == {1: 4 * (F * D + F + D + F * 2 * D)}
    assert found.layout.dtypes == ("BF16",)
    # What is left of the others is not looked at when one is loaded.
    for side in ("enc", "dec"):
        (tmp_path / "clt" / f"W_{side}_2.safetensors").unlink()
    dictionary = found.load(1)
    want = torch.from_numpy(made[1]["W_dec"]).bfloat16().float()
    assert all(torch.equal(w.W_dec, want[:, at]) for at, w in enumerate(dictionary.writes))
    assert all(w.W_dec.is_contiguous() for w in dictionary.writes)


def test_neither_reader_takes_the_others_files(tmp_path):
    per_layer = write_set(tmp_path / "plt", {0: tensors()})
    cross = write(tmp_path / "clt", layers())
    assert describe_set(per_layer, None).format == "circuit-tracer"
    assert describe_set(cross, None).format == "circuit-tracer-clt"
    assert "expected cross_layer_transcoder, found 'transcoder_set'" in refused(
        write(tmp_path / "clt", layers(), model_kind="transcoder_set")
    )
    assert "W_dec_0.safetensors: is left over" in refused(cross, format="circuit-tracer")


@pytest.mark.parametrize(
    ("layer", "change", "told"),
    [
        (1, {"b_enc": None}, "tensor missing: b_enc_1"),
        (1, {"more": np.zeros(3)}, "tensor left over: more_1"),
        (0, {"W_skip": np.zeros((D, D))}, "W_skip_0: a skip connection of a cross-layer transcoder"),
        (1, {"W_dec": np.zeros((F, 3, D))}, "expected (F, 2, d) and (F, d)"),
        (1, {"W_dec": np.zeros((D, 2, F))}, "expected (F, 2, d) and (F, d)"),
        (2, {"b_dec": np.zeros(D + 1)}, "b_dec_2 has shape (9), expected (8)"),
        (2, {"b_enc": np.zeros(F + 1)}, "b_enc_2 has shape (21), expected (20)"),
        (2, {"threshold": np.zeros(F + 1)}, "threshold_2 has shape (21), expected (20)"),
        (2, {"W_enc": np.zeros((F, 9)), "W_dec": np.zeros((F, 1, 9))}, "width 9, the model's d_model is 8"),
        (0, {"W_dec": np.full((F, 3, D), np.nan)}, "W_dec_0[:, 0][0, 0] is NaN"),
    ],
)
def test_files_that_are_not_what_they_should_be(layer, change, told, tmp_path):
    made = layers()
    made[layer] = {key: value for key, value in (made[layer] | change).items() if value is not None}
    assert told in refused(write(tmp_path / "clt", made))


def test_a_layer_or_half_of_one_is_missing(tmp_path):
    where = write(tmp_path / "clt", layers())
    (where / "W_dec_1.safetensors").unlink()
    assert "has no W_dec_1.safetensors, but files up to layer 2" in refused(where)
    (where / "W_enc_1.safetensors").unlink()
    assert "has no W_enc_1.safetensors" in refused(where)
    assert "3 layers, the model has 4" in refused(write(tmp_path / "clt", layers()), Facts(n_layers=4))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"feature_input_hook": None}, "feature_input_hook: expected one of"),
        ({"transcoders": ["a.safetensors"]}, "remove the list"),
        ({"activation": "topk", "k": 3}, "activation: expected relu or jumprelu"),
        ({"k": 3}, "k: 3 stands without"),
        ({"activation": "jumprelu"}, "has no threshold_0, config.yaml says activation: jumprelu"),
        ({"kind": "x"}, "kind: unknown key"),
    ],
)
def test_a_configuration_that_is_not_understood(config, told, tmp_path):
    where = write(tmp_path / "clt", layers(), **config)
    assert told in refused(where, format="circuit-tracer-clt")


def test_a_model_hash_binds_a_cross_layer_set(tmp_path):
    where = write(tmp_path / "clt", layers(), model_hash="b" * 64)
    assert "model_hash: made for the model bbbbbbbbbbbb" in refused(where)
    assert opened(write(where, layers(), model_hash=Outline().hash)).layers == (0, 1, 2)


# --- per-layer files that config.yaml lists -----------------------------------------------------------------


def test_listed_files_are_the_layers_in_order(tmp_path):
    folder = write_set(tmp_path / "set", {}, transcoders=["b.safetensors", "more/a.safetensors"])
    (folder / "more").mkdir()
    first, second = tensors(1), tensors(2)
    save_file(first, str(folder / "b.safetensors"))
    save_file(second, str(folder / "more" / "a.safetensors"))
    found = opened(folder)
    assert (found.format, found.layers) == ("circuit-tracer", (0, 1))
    assert torch.equal(found.load(0).writes[0].W_dec, first["W_dec"])
    assert torch.equal(found.load(1).writes[0].W_dec, second["W_dec"])
    (folder / "b.safetensors").unlink()
    assert "b.safetensors: no such file" in refused(folder)


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (["hf://owner/name/layer_0.safetensors"], "lists files kept elsewhere (hf://owner/name/"),
        (["../layer_0.safetensors"], "leads out of the folder"),
        (["/tmp/layer_0.safetensors"], "leads out of the folder"),
        (["layer_0/params.npz"], "read by its own reader"),
        ([], "expected a list of files"),
        ([3], "expected a list of files"),
        ("a.safetensors", "expected a list of files"),
    ],
)
def test_a_list_that_cannot_be_read(listed, told, tmp_path):
    assert told in refused(write_set(tmp_path / "set", {0: tensors()}, transcoders=listed))


def test_the_norm_says_what_hook_normalized_is(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()}, feature_input_hook="ln2.hook_normalized")
    assert opened(folder).layout.read == Read("mlp.in", Space.NORMALISED)
    layout = describe_set(folder, None)
    assert any("ln2.hook_normalized" in note for note in layout.notes)
