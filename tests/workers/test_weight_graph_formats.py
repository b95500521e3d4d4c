"""Sets in folders of their own, told what their files do not say: the steps open them again from their
parameters, and the edges are those of the same dictionaries in circuit-tracer's layout."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.ingest.small_dictionaries import tensors, write_set
from tests.ingest.tiny_models import tiny_model
from tests.workers.building import build

LAYERS, D, SIZE = 3, 32, 20
SPEC = """
atlas: 1
models: {{tiny: {{path: model}}}}
dictionaries: {{{sets}}}
edges: [{{types: [DIRECT, VIA_HEAD], keep: everything}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model; a transcoder for each layer as circuit-tracer has it (`tc`), as SAELens has it with hooks
    (`lens`) and without (`bare`)."""
    where = tmp_path_factory.mktemp("formats")
    tiny_model("gpt2").save_pretrained(where / "model")
    layers = {layer: tensors(seed=layer, size=SIZE, width=D) for layer in range(LAYERS)}
    write_set(where / "tc", layers)
    for layer, values in layers.items():
        for name, metadata in {
            "lens": {
                "hook_name": f"blocks.{layer}.mlp.hook_in",
                "hook_name_out": f"blocks.{layer}.mlp.hook_out",
            },
            "bare": {"model_name": "tiny"},
        }.items():
            own = where / name / f"l{layer}"
            own.mkdir(parents=True)
            save_file(values | {"W_enc": values["W_enc"].T.contiguous()}, own / "sae_weights.safetensors")
            config = {
                "architecture": "transcoder",
                "d_in": D,
                "d_sae": SIZE,
                "d_out": D,
                "metadata": metadata,
            }
            (own / "cfg.json").write_text(json.dumps(config))
    return where


def edges(built, name):
    """The table's rows without the step they came from, in one order."""
    rows = built.table(name).to_pylist()
    return sorted(tuple(row.items()) for row in rows)


def test_folders_of_dictionaries_have_the_edges_of_one_folder_of_files(folder, tmp_path):
    one = build(SPEC.format(sets="t: {model: tiny, path: tc}"), folder, tmp_path / "one")
    many = build(SPEC.format(sets="t: {model: tiny, path: lens}"), folder, tmp_path / "many")
    assert many.sets["t"].hash == one.sets["t"].hash
    for name, count in (("DIRECT", 3 * SIZE**2), ("VIA_HEAD", 4 * (1 + 2 + 1) * SIZE**2)):
        assert len(edges(one, name)) == count
        assert edges(many, name) == edges(one, name)


def test_what_is_declared_reaches_the_steps(folder, tmp_path):
    sets = ", ".join(
        f"t{layer}: {{model: tiny, path: bare/l{layer}, layer: {layer}, reads: mlp.in, writes: mlp.hook_out}}"
        for layer in range(LAYERS)
    )
    told = build(SPEC.format(sets=sets), folder, tmp_path / "told")
    one = build(SPEC.format(sets="t: {model: tiny, path: tc}"), folder, tmp_path / "one")
    assert edges(told, "DIRECT") == edges(one, "DIRECT")
    assert torch.equal(told.sets["t2"].load(2).writes[0].W_dec, one.sets["t"].load(2).writes[0].W_dec)
