"""`atlas dictionary inspect`: what files are, as a person and a program are told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas.cli import main
from tests.atlas.tiny_source import LATENTS, LAYERS, WIDTH, write_transcoders


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model by its configuration alone, and transcoders for it."""
    folder = tmp_path_factory.mktemp("inspected")
    (folder / "model").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": WIDTH,
        "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_transcoders(folder / "transcoders")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """`atlas dictionary inspect` with these arguments: (exit code, stdout, stderr)."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["dictionary", "inspect", *map(str, arguments)])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return command


@pytest.fixture
def told(run):
    """The same as the JSON it prints."""

    def command(*arguments: str | Path):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return command


def write_sae(folder: Path, layer: int = 1, **config: object) -> Path:
    """One SAE in sparsify's layout, for the residual stream."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    tensors = {
        "encoder.weight": rng.standard_normal((64, WIDTH)),
        "encoder.bias": rng.standard_normal(64),
        "W_dec": rng.standard_normal((64, WIDTH)),
        "b_dec": rng.standard_normal(WIDTH),
    }
    save_file({key: value.astype(np.float32) for key, value in tensors.items()}, folder / "sae.safetensors")
    fields = {"activation": "topk", "expansion_factor": 2, "num_latents": 0, "k": 5, "d_in": WIDTH, **config}
    (folder / "cfg.json").write_text(json.dumps(fields))
    return folder


def test_a_set_by_its_headers(told, source):
    found = told(source / "transcoders", "--headers")
    assert found["format"] == "circuit-tracer" and found["kind"] == "transcoder"
    assert found["reads"] == "mlp.in: normalised, after the norm's gain"
    assert found["writes"] == "mlp, at the module's output"
    assert (found["activation"], found["layers"], found["types_on_disk"]) == ("ReLU", "0 to 2", "F32")
    assert found["features"] == LAYERS * LATENTS
    of_a_layer = 4 * (2 * LATENTS * WIDTH + LATENTS + WIDTH)
    assert found["memory_bytes"] == LAYERS * of_a_layer
    row = {"features": LATENTS, "d_in": WIDTH, "d_out": WIDTH, "declared_L0": None}
    row["memory_bytes"] = of_a_layer
    assert found["by_layer"] == [
        {"layer": layer, "written_layers": str(layer), **row} for layer in range(LAYERS)
    ]
    assert "norms" not in found and "fits" not in found
    assert any("--weights reads them" in note for note in found["notes"])


def test_the_weights_tell_norms_and_what_happens_to_the_input(told, tmp_path):
    folder = write_sae(tmp_path / "layers.1")
    tensors = load_file(folder / "sae.safetensors")
    tensors["W_dec"][7] = 0.0
    save_file(tensors, folder / "sae.safetensors")
    found = told(folder)
    assert (found["kind"], found["activation"], found["declared_L0"]) == ("sae", "TopK 5", "5")
    assert (found["input"], found["skip"]) == ("a bias is subtracted", "no")
    [row] = found["norms"]
    assert (row["layer"], row["silent"]) == (1, 1)
    for key, name in (("encoder_norms", "encoder.weight"), ("decoder_norms", "W_dec")):
        norms = np.sort(np.linalg.norm(tensors[name].astype(float), axis=1))
        assert np.allclose(row[key], [norms[0], norms[31], norms[-1]], rtol=1e-5)
    assert any("compared with no model" in note for note in found["notes"])


def test_with_a_model_it_is_said_to_fit(told, source):
    found = told(source / "transcoders", "--model", source / "model")
    assert found["fits"] == f"LlamaForCausalLM, {LAYERS} layers, d_model {WIDTH}"
    assert not any("compared with no model" in note for note in found["notes"])


def test_what_does_not_fit_is_an_error(run, source, tmp_path):
    wide = write_transcoders(tmp_path / "wide", width=2 * WIDTH)
    code, out, err = run(wide, "--model", source / "model")
    assert (code, out) == (2, "") and f"the model's d_model is {WIDTH}" in err and err.count("\n") == 1
    assert run(wide)[0] == 0
    many = write_transcoders(tmp_path / "many", layers=LAYERS + 1)
    code, _, err = run(many, "--model", source / "model")
    assert code == 2 and "has a dictionary for layer 3, the model has layers 0 to 2" in err


def test_what_files_do_not_say_is_said_with_options(run, told, tmp_path):
    folder = write_sae(tmp_path / "mine")
    code, _, err = run(folder)
    assert code == 2 and "say reads and writes" in err
    found = told(folder, "--reads", "resid_pre", "--layer", "2")
    assert found["reads"] == "resid_pre: the stream itself" and found["layers"] == "2"
    assert found["writes"] == "resid_pre"
    code, _, err = run(folder, "--reads", "resid_pre", "--layer", "-1")
    assert code == 2 and "--layer" in err


def test_a_format_can_be_named(run, told, tmp_path):
    folder = write_sae(tmp_path / "layers.0")
    assert told(folder, "--format", "sparsify")["format"] == "sparsify"
    code, _, err = run(folder, "--format", "sparsefy")
    assert code == 2 and "unknown dictionary format 'sparsefy'" in err
    code, _, err = run(tmp_path / "absent")
    assert code == 2 and "no such file or directory" in err


def test_for_people_it_is_a_page(run, source, tmp_path):
    code, out, err = run(source / "transcoders", "--model", source / "model")
    assert (code, err) == (0, "")
    for said in ("circuit-tracer", "mlp, at the module's output", "0 to 2", "norms of encoder", "LlamaFor"):
        assert said in out
    assert max(map(len, out.splitlines())) <= 100
    code, out, _ = run(write_sae(tmp_path / "layers.1"))
    assert "declared L0" in out and "a bias is subtracted" in out


def test_weights_that_are_not_finite_are_found(run, source, tmp_path):
    folder = write_transcoders(tmp_path / "spoilt")
    tensors = load_file(folder / "layer_1.safetensors")
    tensors["W_enc"][3, 4] = np.nan
    save_file(tensors, folder / "layer_1.safetensors")
    assert run(folder, "--headers")[0] == 0
    code, out, err = run(folder)
    assert (code, out) == (2, "") and "W_enc[3, 4] is NaN" in err


def test_many_bytes_are_read_only_when_asked(monkeypatch, told, source):
    monkeypatch.setattr("atlas.inspection.READ_UP_TO", 100.0)
    assert "norms" not in told(source / "transcoders")
    assert len(told(source / "transcoders", "--weights")["norms"]) == LAYERS
