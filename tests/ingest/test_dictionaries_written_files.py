"""The files as their own formats define them: opened without our readers, computed in float64 with numpy; and
the dictionaries of the public formats written again, where those files are at hand."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from ingest.dictionaries import At, JumpReLU, TopK, open_set
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.writing import write_circuit_tracer, write_saelens
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Facts, Outline
from tests.ingest.test_formats_oracle import CASES, LOADED, ORACLE, REFUSED, scanned
from tests.ingest.written_dictionaries import X, back, made, sae

SHARED = ORACLE.parents[1]
x = X.numpy()


def wanted(dictionary):
    """What the dictionary computes, (activations, output), in float64 by its own definition."""
    acts = encode(dictionary, X)
    return acts.numpy(), decode(dictionary, acts, X)[0].numpy()


def check(found, dictionary):
    for one, other in zip(found, wanted(dictionary), strict=True):
        assert np.abs(one - other).max() <= 1e-6 * np.abs(other).max()
    assert np.array_equal(found[0] != 0, wanted(dictionary)[0] != 0)
    assert 0 < (found[0] != 0).mean() < 1


def top_k(pre, k, by=None):
    """pre where it is among the k largest of its row by `by`."""
    by = pre if by is None else by
    border = np.sort(by, axis=1)[:, -k][:, None]
    return np.where(by >= border, pre, 0)


def circuit_tracer(folder, layer):
    """x through a layer's file as circuit-tracer defines it, with our TopK."""
    t = {
        key: value.astype(np.float64)
        for key, value in load_file(folder / f"layer_{layer}.safetensors").items()
    }
    config = yaml.safe_load((folder / "config.yaml").read_text())
    pre = x @ t["W_enc"].T + t["b_enc"]
    acts = np.maximum(pre, 0)
    if "activation_function.threshold" in t:
        acts = pre * (pre > t["activation_function.threshold"])
    if config.get("activation") == "topk":
        acts = np.maximum(top_k(pre, config["k"]), 0)
    out = acts @ t["W_dec"] + t["b_dec"]
    return acts, out + x @ t["W_skip"].T if "W_skip" in t else out


def saelens(folder):
    """x through a dictionary's files as SAELens 6 defines it."""
    t = {
        key: value.astype(np.float64) for key, value in load_file(folder / "sae_weights.safetensors").items()
    }
    config = json.loads((folder / "cfg.json").read_text())
    given = x - t["b_dec"] if config["apply_b_dec_to_input"] else x
    kind = config["architecture"]
    if kind == "gated":
        opened = given @ t["W_enc"] + t["b_gate"] > 0
        acts = opened * np.maximum(given @ (t["W_enc"] * np.exp(t["r_mag"])) + t["b_mag"], 0)
    else:
        pre = given @ t["W_enc"] + t["b_enc"]
        acts = np.maximum(pre, 0)
        if "jumprelu" in kind:
            acts = acts * (pre > t["threshold"])
        elif kind == "topk":
            acts = np.maximum(top_k(pre, config["k"]), 0)
        elif kind == "abstopk":
            acts = top_k(pre, config["k"], np.abs(pre))
    out = acts @ t["W_dec"] + t["b_dec"]
    assert ("skip" in kind) is ("W_skip" in t)
    assert ("transcoder" in kind) is ("d_out" in config) is ("hook_name_out" in config["metadata"])
    assert (config["d_in"], config["d_sae"]) == t["W_enc"].shape
    return acts, out + x @ t["W_skip"].T if "skip" in kind else out


@pytest.mark.parametrize("b_in", [None, "own"])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gate", ["relu", "jumprelu", "negative thresholds", "negative thresholds with relu",
                                  "one threshold", "one negative threshold", "topk"])  # fmt: skip
def test_circuit_tracers_definition_gives_what_was_written(gate, skip, b_in, tmp_path):
    layers = [made(layer, gate, skip=skip, b_in=b_in) for layer in (0, 1)]
    folder = write_circuit_tracer(tmp_path / "set", layers).folder
    for one in layers:
        check(circuit_tracer(folder, one.layer), one)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["feature_input_hook"], config["feature_output_hook"]) == ("mlp.hook_in", "mlp.hook_out")
    assert {value.dtype.name for value in load_file(folder / "layer_1.safetensors").values()} == {"float32"}


SAE_ONLY = ("topk", "abstopk", "gated")


@pytest.mark.parametrize("b_in", [None, "own", "b_out"])
@pytest.mark.parametrize(
    "gate", ["relu", "jumprelu", "negative thresholds with relu", "one threshold", *SAE_ONLY]
)
def test_saelens_definition_gives_what_was_written(gate, b_in, tmp_path):
    one = sae(1, gate, b_in=b_in)
    folder = write_saelens(tmp_path / "sae", [one]).folder
    check(saelens(folder), one)
    assert json.loads((folder / "cfg.json").read_text())["apply_b_dec_to_input"] is (b_in == "b_out")
    if gate in SAE_ONLY:
        return
    layers = [made(layer, gate, skip=layer == 1, b_in=b_in) for layer in (0, 1)]
    folder = write_saelens(tmp_path / "transcoders", layers).folder
    for layer in layers:
        check(saelens(folder / f"layer_{layer.layer}"), layer)


def test_saelens_fields_are_those_of_its_version_6(tmp_path):
    """Every field that the library's own files of that version have, and hooks by TransformerLens' names."""
    one = made(5, "jumprelu", skip=True)
    folder = write_saelens(tmp_path / "tc", [one], dtype="float16", extra={"model_name": "small"}).folder
    assert json.loads((folder / "cfg.json").read_text()) == {
        "architecture": "jumprelu_skip_transcoder", "d_in": 8, "d_sae": 20, "d_out": 8, "dtype": "float32",
        "device": "cpu", "apply_b_dec_to_input": False, "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            "sae_lens_version": "6.0.0",
            "model_name": "small", "hook_name": "blocks.5.mlp.hook_in", "model_from_pretrained_kwargs": {},
            "hook_name_out": "blocks.5.mlp.hook_out", "model_class_name": "TransformerBridge",
        },
    }  # fmt: skip
    types = {key: value.dtype.name for key, value in load_file(folder / "sae_weights.safetensors").items()}
    assert types == {
        **dict.fromkeys(("W_enc", "W_dec", "W_skip"), "float16"),
        **dict.fromkeys(("b_enc", "b_dec", "threshold"), "float32"),
    }


@pytest.mark.parametrize(("site", "reshaped"), [("attn.z", "hook_z"), ("resid_post", "none")])
def test_heads_side_by_side_are_saelens_hook_z(site, reshaped, tmp_path):
    folder = write_saelens(tmp_path / "sae", [sae(1, site=site, at=At.MODULE)]).folder
    config = json.loads((folder / "cfg.json").read_text())
    assert config["reshape_activations"] == reshaped
    assert "model_class_name" not in config["metadata"]


def test_encoder_and_decoder_may_be_one_tensor(tmp_path):
    def tied(one):
        write = dataclasses.replace(one.writes[0], W_dec=one.encoders[0].W_enc)
        return dataclasses.replace(one, writes=(write,))

    check(saelens(write_saelens(tmp_path / "sae", [tied(sae(b_in="b_out"))]).folder), tied(sae(b_in="b_out")))
    check(circuit_tracer(write_circuit_tracer(tmp_path / "set", [tied(made(0))]).folder, 0), tied(made(0)))


# --- the public formats, written again ----------------------------------------------------------------------

WRITTEN_AGAIN = [name for name in LOADED if name not in REFUSED]


def refusals(name, layout, dictionary):
    """Why a case cannot be written in each layout; None where it can."""
    case = CASES[name]
    cross = len(dictionary.writes) > 1
    groups = "GroupMax" if type(dictionary.gate).__name__ == "GroupMax" else None
    topk = isinstance(dictionary.gate, TopK)
    place = layout.kind != "transcoder" or dictionary.read.site != "mlp.in"
    width = "as many" if len(set(layout.widths[layout.layers[0]])) > 1 else None
    negative = isinstance(dictionary.gate, JumpReLU) and dictionary.signed
    thresholds = topk and layout.kind == "transcoder"
    assert case["expect"] == "load"
    return (
        "cross-layer" if cross else "MLPs alone" if place else width or groups,
        "cross-layer"
        if cross
        else groups or ("negative" if negative else "thresholds" if thresholds else None),
    )


@pytest.mark.skipif(not CASES, reason="the formats' files are not here")
@pytest.mark.parametrize("name", WRITTEN_AGAIN)
def test_the_public_formats_dictionaries_come_back_from_both_layouts(name, tmp_path):
    layout = scanned(name)
    given = load_torch(str(ORACLE / name / "expected.safetensors"))["x"]
    given = given[None] if given.dim() == 2 else given
    dictionaries = [layout.load(layer, Outline()) for layer in layout.layers]
    writers = (write_circuit_tracer, "circuit-tracer"), (write_saelens, "saelens")
    for (write, format), refused in zip(writers, refusals(name, layout, dictionaries[0]), strict=True):
        if refused:
            with pytest.raises(InputError, match=refused):
                write(tmp_path / format, dictionaries)
            continue
        written = write(tmp_path / format, dictionaries)
        found = back(written, format, None)
        assert list(found) == list(layout.layers)
        for original, values in zip(dictionaries, given, strict=True):
            again, values = found[original.layer], values.double()
            acts = encode(original, values)
            acts_again = encode(again, values)
            scale = 1.0
            if original.decoder_norm_in_gate is not None and isinstance(original.gate, TopK):
                scale = original.decoder_norm_in_gate
                assert "times decoder norm" in " ".join(written.notes)
            assert (acts_again - acts * scale).abs().max() <= 1e-6 * acts.abs().max()
            assert torch.equal(acts_again != 0, acts != 0)
            out = decode(original, acts, values)[0]
            assert (decode(again, acts_again, values)[0] - out).abs().max() <= 2e-6 * out.abs().max()


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the trained transcoders are not here")
def test_trained_transcoders_written_again_have_the_same_hash(tmp_path):
    facts = Facts(n_layers=30, d_model=576)
    options = {"name": "tc", "model": Outline(facts), "layers": (0, 17)}
    found = open_set(SHARED / "data" / "smollm2-transcoders", **options)
    layers = [found.load(layer) for layer in found.layers]
    written = write_circuit_tracer(tmp_path / "set", layers, dtype="float16")
    again = open_set(written.folder, **options)
    assert again.hash == found.hash
    assert again.layout.dtypes == found.layout.dtypes
    assert not [note for note in written.notes if "rounded" in note or "folded" in note]
