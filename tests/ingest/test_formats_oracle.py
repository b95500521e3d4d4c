"""Every case of the public formats, as their own libraries wrote the files and computed on them: where those
files are at hand."""

import dataclasses
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingest.dictionaries import Declared, describe_set, formats
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.hooks import mlp_input, read_hook, write_hook
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Facts, Outline

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "formats"
CASES = {path.parent.name: json.loads(path.read_text()) for path in sorted(ORACLE.glob("*/case.json"))}
LOADED = [name for name, case in CASES.items() if case["expect"] == "load"]
HOSTILE = [name for name, case in CASES.items() if case["expect"] == "refuse"]

FACTS = Facts(n_layers=16, d_model=24, n_heads=4, d_head=6)
# A transcoder between streams of two widths fits no model: read without one.
WITHOUT_MODEL = {"saelens-transcoder"}
# A dictionary of embeddings before the factor that the model puts on them.
FACTOR = 24**0.5
EMBEDDING = "gemmascope-embedding-sae"
# What a case's files do not say of themselves, and a user would.
DECLARED = {
    "gemmascope-sae": Declared(reads="hook_resid_post"),
    "gemmascope-transcoder": Declared(reads="ln2.hook_normalized", writes="hook_mlp_out"),
}
# Where the format's library refuses, or a reader may by the case's own word.
REFUSED = {
    "saelens-batchtopk-checkpoint": "batchtopk is not supported: it is a training checkpoint",
    "saelens-matching-pursuit": "matching_pursuit is not supported: it is a code found by iterative",
}
SIGNED = {"ct-plt-jumprelu-negative-threshold", "saelens-abstopk"}

pytestmark = pytest.mark.skipif(not CASES, reason="the formats' files are not here")


def outline_of(name):
    """The facts of a model that the case's dictionary fits; a cross-layer one has its number of layers."""
    if name in WITHOUT_MODEL:
        return None
    several = CASES[name]["reads"] if isinstance(CASES[name].get("reads"), list) else None
    facts = dataclasses.replace(FACTS, n_layers=len(several) if several else FACTS.n_layers)
    return dataclasses.replace(facts, embedding_factor=FACTOR) if name == EMBEDDING else facts


def scanned(name):
    return describe_set(ORACLE / name / "files", outline_of(name), declared=DECLARED.get(name, Declared()))


def computed(layout, x):
    """Activations of each layer read, and what all of them write in each layer of the model."""
    acts, out = {}, defaultdict(float)
    for layer, given in zip(layout.layers, x, strict=True):
        dictionary = layout.load(layer, Outline(FACTS))
        acts[layer] = encode(dictionary, given)
        for write, written in zip(dictionary.writes, decode(dictionary, acts[layer], given), strict=True):
            out[write.layer] = out[write.layer] + written
    return acts, out


def input_factors(name):
    """By what Llamascopium multiplies an input before it computes activations: its are in those units, ours
    in the raw input's."""
    files = ORACLE / name / "files"
    config = files / "config.json"
    if not config.exists() or json.loads(config.read_text()).get("norm_activation") != "dataset-wise":
        return defaultdict(lambda: 1.0)
    norms = {
        key.removeprefix("dataset_average_activation_norm."): float(value)
        for key, value in load_file(str(files / "sae_weights.safetensors")).items()
        if key.startswith("dataset_average_activation_norm.")
    }
    reads = CASES[name]["reads"]
    reads = [reads] if isinstance(reads, str) else reads
    return {read_hook(hook, FACTS, "reads").layer: FACTOR / norms[hook] for hook in reads}


@pytest.mark.parametrize("name", [name for name in LOADED if name not in REFUSED])
def test_activations_and_outputs_are_the_librarys(name):
    expected = load_file(str(ORACLE / name / "expected.safetensors"))
    x, wanted, wanted_out, l0 = (expected[key] for key in ("x", "acts", "out", "l0"))
    if name == EMBEDDING:  # its library left b_dec out of the factor; the file as it stands leads
        wanted_out = expected["out_unscaled"] * FACTOR
    if x.dim() == 2:
        x, wanted, wanted_out, l0 = x[None], wanted[None], wanted_out[None], l0[None]
    layout, factors = scanned(name), input_factors(name)
    acts, out = computed(layout, x)
    assert sorted(out) == list(layout.layers)
    for place, layer in enumerate(layout.layers):
        assert (factors[layer] * acts[layer] - wanted[place]).abs().max() < 1e-5
        assert (out[layer] - wanted_out[place]).abs().max() < 1e-5
        assert torch.equal((acts[layer] != 0).sum(-1), l0[place].long())
        dictionary = layout.load(layer, Outline(FACTS))
        assert dictionary.signed is (name in SIGNED) is bool((wanted < 0).any())
        assert layout.sizes[layer] == dictionary.size == wanted.shape[-1]
        shapes = dictionary.encoders[0].W_enc.shape[1], dictionary.writes[0].W_dec.shape[1]
        assert layout.widths[layer] == shapes
        assert layout.read == dictionary.read
        assert layout.writes[layer] == tuple((one.layer, one.site, one.at) for one in dictionary.writes)


def hook_of(text):
    """`layers.2.mlp (module input)`, `output of resid_post_layer_4 (…)` or a hook, as a hook."""
    if module := re.fullmatch(r"(\S+) \(module (input|output)\)", text):
        return f"{module[1]}.{module[2]}"
    submodule = re.match(r"output of (\w+)", text)
    return submodule[1] if submodule else text


@pytest.mark.parametrize("name", [name for name in LOADED if name not in REFUSED])
def test_sites_and_layers_are_those_that_the_case_names(name):
    reads, writes = (CASES[name][key] for key in ("reads", "writes"))
    reads, writes = ([one] if isinstance(one, str) else one for one in (reads, writes))
    layout = scanned(name)
    read = [read_hook(hook_of(one), FACTS, "reads") for one in reads]
    assert [one.layer for one in read] == list(layout.layers)
    assert {mlp_input(one.read) for one in read} == {mlp_input(layout.read)}
    write = [write_hook(hook_of(one), FACTS, "writes") for one in writes]
    for layer, told in zip(layout.layers, write, strict=True):
        first = layout.writes[layer][0]
        assert first == (told.layer, told.site, told.at)
        assert {at for _, _, at in layout.writes[layer]} == {first[2]}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_read_is_refused_by_name(name):
    with pytest.raises(InputError) as caught:
        scanned(name)
    assert str(ORACLE / name / "files") in str(caught.value)
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_with_a_payload_is_refused_and_runs_nothing(name, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    monkeypatch.setenv("ATLAS_MARKER", str(marker))
    with pytest.raises(InputError) as caught:
        layout = scanned(name)
        layout.load(layout.layers[0], Outline(FACTS))
    line = str(caught.value)
    assert any(file.split("/")[-1] in line for file in CASES[name]["files"])
    assert "\n" not in line
    assert not marker.exists()


def test_no_case_is_left_out():
    """Neither a folder of the oracle nor a format read here: what is not compared above is named."""
    assert len(CASES) == 51
    assert set(CASES) - {*LOADED, *HOSTILE} == set()
    assert all("refuse by name" in CASES[name]["expect_note"] for name in REFUSED)
    compared = {scanned(name).format for name in LOADED if name not in REFUSED}
    assert set(formats()) - compared == {"neurons"}
