"""Per-layer sets that circuit-tracer wrote, and a large trained one: where those files are at hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingest.dictionaries import TopK
from ingest.dictionaries.encode import decode, encode
from tests.ingest.small_dictionaries import Facts, opened

SHARED = Path(__file__).resolve().parents[3] / "shared"
CASES = ["relu", "jumprelu", "bfloat16", "jumprelu-negative-threshold"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="circuit-tracer's files are not here")
def test_activations_and_outputs_are_circuit_tracers(case):
    folder = SHARED / "oracle" / "formats" / f"ct-plt-{case}"
    expected = load_file(str(folder / "expected.safetensors"))
    count = len(expected["x"])
    found = opened(folder / "files", Facts(n_layers=count, d_model=24))
    assert found.layers == tuple(range(count))
    for layer in found.layers:
        dictionary, x = found.load(layer), expected["x"][layer]
        acts = encode(dictionary, x)
        assert (acts - expected["acts"][layer]).abs().max() < 1e-5
        assert (decode(dictionary, acts, x)[0] - expected["out"][layer]).abs().max() < 1e-5
        assert torch.equal((acts != 0).sum(-1).float(), expected["l0"][layer].float())
        assert dictionary.signed is ("negative" in case)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="circuit-tracer's files are not here")
def test_the_oracle_models_transcoders_open(model):
    found = opened(SHARED / "oracle" / model / "transcoders", Facts(d_model=32))
    found.verify()
    assert dict(found.sizes) == {0: 96, 1: 96, 2: 96}


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the trained transcoders are not here")
def test_thirty_trained_layers_are_read_one_at_a_time():
    found = opened(SHARED / "data" / "smollm2-transcoders", Facts(n_layers=30, d_model=576))
    assert sum(found.sizes.values()) == 69_120
    assert found.layout.dtypes == ("F16", "F32")
    dictionary = found.load(12)
    assert dictionary.gate == TopK(32)
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))
    assert ((encode(dictionary, x) != 0).sum(-1) <= 32).all()
