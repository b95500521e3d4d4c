"""`atlas dictionary inspect`: what files are, as a person and a program are told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas.cli import main
from tests.atlas.tiny_source import LATENTS, LAYERS, TOKENS, WIDTH, write_model, write_transcoders


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
        assert code == 0 and all(line.startswith("measuring") for line in err.splitlines())
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


# --- on a text ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, transcoders with a declared k, and token ids to run them on."""
    folder = tmp_path_factory.mktemp("live")
    write_model(folder / "model")
    write_transcoders(folder / "transcoders")
    hooks = "feature_input_hook: mlp.hook_in\nfeature_output_hook: mlp.hook_out\n"
    (folder / "transcoders" / "config.yaml").write_text(hooks + "activation: topk\nk: 4\n")
    for path in (folder / "transcoders").glob("layer_*.safetensors"):
        tensors = load_file(path)
        tensors["W_dec"] *= 1e-3
        if path.stem == "layer_2":
            tensors["b_enc"] -= 1e3  # nothing fires there
        if path.stem == "layer_1":
            tensors["W_dec"] *= 1e6
        save_file(tensors, path)
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, TOKENS, (6, 12)).astype(np.int32))
    return folder


@pytest.fixture
def measured(live: Path) -> list[str | Path]:
    """The arguments that measure the transcoders on the tokens."""
    return [live / "transcoders", "--model", live / "model", "--text", live / "tokens.npy"]


def test_a_text_tells_how_well_it_describes_the_model(told, live, measured):
    from ingest.contexts import make_contexts
    from ingest.corpora import open_corpus
    from ingest.dictionaries import open_set
    from ingest.models import open_model
    from workers.evaluation import evaluate

    found = told(*measured, "--contexts", "5")
    model = open_model(live / "model")
    opened = open_set(live / "transcoders", name="t", model=model)
    wanted = evaluate(model, [opened], make_contexts(open_corpus(live / "tokens.npy"), None, limit=5))
    for row, one in zip(found["measured"], wanted.sets[0].layers, strict=True):
        assert row["L0"] == pytest.approx(one.l0.value) and row["FVU"] == pytest.approx(one.fvu.value)
        assert row["CE_recovered"] == pytest.approx(one.recovered.value)
        assert row["dead_share"] == pytest.approx(one.dead_share)
        assert row["declared_L0"] == 4.0
    assert found["CE_of_the_model"] == pytest.approx(wanted.ce.value)
    assert found["CE_recovered_all_in_place"] == pytest.approx(wanted.sets[0].together.recovered.value)
    assert any(note.startswith("5 contexts, 60 tokens") for note in found["notes"])


def test_it_warns_where_the_measured_l0_is_far_from_the_declared_and_where_nothing_is_described(
    told, measured
):
    found = told(*measured)
    warnings = [note for note in found["notes"] if note.startswith("warning")]
    fires = [one for one in warnings if "features fire on a token" in one]
    assert len(fires) == 1 and "layer 2: 0 features fire on a token, the files declare 4" in fires[0]
    unexplained = {row["layer"] for row in found["measured"] if row["FVU"] >= 1}
    assert 1 in unexplained  # its decoder is a thousand times too large
    assert len(warnings) == len(fires) + len(unexplained)


def test_some_layers_of_a_set(told, measured):
    assert [row["layer"] for row in told(*measured, "--layers", "0,2")["measured"]] == [0, 2]


def test_what_a_text_needs(run, source, live):
    code, _, err = run(source / "transcoders", "--text", live / "tokens.npy")
    assert code == 2 and "say which with --model" in err
    code, _, err = run(live / "transcoders", "--model", live / "model", "--text", live / "absent.txt")
    assert code == 2 and "absent.txt: no such file or directory" in err
    code, _, err = run(live / "transcoders", "--layers", "0;1")
    assert code == 2 and "expected numbers of layers" in err
    code, _, err = run(live / "transcoders", "--layers", "0,7")
    assert code == 2 and "layer 7 was asked for, it has layers 0 to 2" in err
