"""Files of Language-Model-SAEs that do not hold, and kinds of its dictionaries that are none of ours: one
line that names the file and the key."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingest.dictionaries.layout import Declared
from ingest.errors import InputError
from tests.ingest.scope_files import HOOK, NORM, D, F, known, write_2024, write_2025, write_now
from tests.ingest.small_dictionaries import Facts, opened

WRITERS = {"now": write_now, "2025": write_2025, "2024": write_2024}
MLP_OUT = "blocks.1.hook_mlp_out"


def refused(folder, message, *facts, **options):
    with pytest.raises(InputError, match=message) as caught:
        opened(folder, *facts, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", list(WRITERS))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "batchtopk"}, "act_fn: batchtopk keeps the k largest of a whole batch.* jumprelu"),
        ({"act_fn": "gelu"}, 'act_fn: expected one of "relu", "jumprelu", "topk", found "gelu"'),
        ({"act_fn": ...}, "act_fn: is missing; expected a text; found .*d_model"),
        ({"act_fn": "topk", "top_k": 0}, r"top_k: act_fn is topk; expected 1 to 24 \(the latents\), found 0"),
        ({"act_fn": "topk", "top_k": 25}, "expected 1 to 24 .*, found 25"),
        ({"norm_activation": "batch-wise"}, "norm_activation: batch-wise norms are those of a whole batch"),
        ({"norm_activation": "layer-wise"}, 'norm_activation: expected one of "dataset-wise", "token-wise"'),
        ({"norm_activation": ...}, "norm_activation: is missing"),
        (
            {"use_glu_encoder": True},
            "use_glu_encoder: a latent that multiplies two readings is not supported",
        ),
        ({"d_model": 0}, "d_model: expected more than 0, found 0"),
        ({"d_model": 16}, r"has shape .*, expected .*: the configuration says \d+ latents of d_model 16"),
        ({"sparsity_include_decoder_norm": "yes"}, "sparsity_include_decoder_norm: expected true or false"),
        (
            {"sparsity_includes_decoder_norm": True},
            "unknown key; did you mean 'sparsity_include_decoder_norm'",
        ),
        ({"hook_point_in": ...}, "hook_point_in: is missing"),
        ({"hook_point_in": "blocks.1.hook_resid_pots"}, "hook_point_in: unknown hook .* did you mean"),
        ({"hook_point_in": "blocks.1.mlp.hook_post"}, "hook_point_in: .* space of the MLP's neurons"),
        (
            {"hook_point_out": "blocks.0.hook_resid_post"},
            "hook_point_out: writes layer 0, but layer 1 is read",
        ),
        (
            {"norm_activation": "token-wise", "hook_point_out": MLP_OUT},
            "token-wise and blocks.1.hook_mlp_out",
        ),
    ],
)
def test_a_configuration_that_does_not_hold(tmp_path, layout, change, message):
    line = refused(WRITERS[layout](tmp_path, known(), **change), message)
    assert str(tmp_path) in line


@pytest.mark.parametrize("kind", ["lorsa", "molt", "crosscoder", "mixcoder", "other"])
def test_other_kinds_of_dictionaries_are_refused_by_name(tmp_path, kind):
    refused(write_now(tmp_path, known(), sae_type=kind), rf"config.json: sae_type: .*{kind}")


def test_an_attention_replacement_is_recognised_and_refused(tmp_path):
    folder = write_now(tmp_path, known(), sae_type="lorsa")
    heads = {key: torch.zeros(2, 3) for key in ("W_Q", "W_K", "W_V", "W_O")}
    save_file(heads, str(folder / "sae_weights.safetensors"))
    refused(folder, "lorsa replaces an attention layer")


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("now", lambda t: t.pop("b_E"), "tensor missing: b_E; expected .*, found W_D, W_E, b_D"),
        ("2025", lambda t: t.pop("encoder.bias"), "tensor missing: encoder.bias; .* found"),
        ("2024", lambda t: t.pop("decoder.bias"), "tensor missing: decoder.bias"),
        ("now", lambda t: t.update(W_x=torch.zeros(2)), "tensor left over: W_x"),
        ("now", lambda t: t.update(W_E=torch.zeros(F, D)), r"W_E has shape \(24, 8\), expected \(8, 2"),
        ("2025", lambda t: t.update({"decoder.weight": torch.zeros(F, D)}), "decoder.weight has shape"),
        ("now", lambda t: t.update(b_D=torch.zeros(F)), r"b_D has shape \(24\), expected \(8\)"),
        ("now", lambda t: t.pop(NORM + HOOK), "resid_post: is missing: .* the average norm"),
        ("now", lambda t: t.update({NORM + HOOK: torch.tensor(0.0)}), "is 0.0, .* never set"),
        ("now", lambda t: t.update({NORM + HOOK: torch.tensor(float("nan"))}), "is nan, .* never set"),
        ("now", lambda t: t.update({NORM + HOOK: torch.zeros(3)}), "expected one number"),
        ("now", lambda t: t.update(b_E=t["b_E"].double()), "b_E: type F64, expected one that float32"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path, layout, change, message):
    folder = WRITERS[layout](tmp_path, known())
    path = next(folder.rglob("*.safetensors"))
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path))
    assert path.name in refused(folder, message)


@pytest.mark.parametrize("layout", list(WRITERS))
def test_jumprelu_needs_its_thresholds(tmp_path, layout):
    folder = WRITERS[layout](tmp_path, known())
    name = "hyperparams.json" if layout == "2024" else "config.json"
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**config, "act_fn": "jumprelu"}))
    if layout == "2024":
        assert opened(folder).layers == (1,)  # a number of the configuration
    else:
        refused(folder, "tensor missing: .*log_jumprelu_threshold")


def test_2024_norms_of_the_configuration(tmp_path):
    folder = write_2024(tmp_path, known(), dataset_average_activation_norm={"in": 3.0})
    refused(folder, "hyperparams.json: dataset_average_activation_norm.out: is missing: norm_activation is")
    folder = write_2024(tmp_path, known(), dataset_average_activation_norm={"in": 3.0, "out": -1})
    refused(folder, "dataset_average_activation_norm.out is -1.0, expected an average norm above 0")
    folder = write_2024(tmp_path, known(), dataset_average_activation_norm={"in": 3.0, "ouf": 1.0})
    refused(folder, "dataset_average_activation_norm.ouf: unknown key")
    refused(write_2024(tmp_path, known(), d_sae=0), "d_sae: expected latents, and at least top_k, found 0")


@pytest.mark.parametrize("layout", list(WRITERS))
def test_truncated_empty_and_not_finite(tmp_path, layout):
    folder = WRITERS[layout](tmp_path, known())
    path = next(folder.rglob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    refused(folder, r"safetensors: truncated or no safetensors file")
    path.write_bytes(b"")
    refused(folder, r"is empty \(0 bytes\)")
    path.write_bytes(whole)
    tensors = load_file(str(path))
    bias = next(key for key in tensors if key in ("b_E", "encoder.bias"))
    tensors[bias][5] = float("inf")
    save_file(tensors, str(path))
    with pytest.raises(InputError, match=rf"{bias}\[5\] is infinite"):
        opened(folder).verify()


@pytest.mark.parametrize("name", ["sae_weights.dcp", "sae_weights.pt"])
def test_other_containers_are_named(tmp_path, name):
    folder = write_now(tmp_path, known())
    (folder / "sae_weights.safetensors").unlink()
    (folder / name).mkdir() if name.endswith("dcp") else (folder / name).write_bytes(b"x")
    refused(folder, rf"{name}: only safetensors are read; .* save_pretrained")


@pytest.mark.parametrize("layout", list(WRITERS))
def test_what_the_user_says_otherwise_than_the_file_is_an_error(tmp_path, layout):
    folder = WRITERS[layout](tmp_path, known())
    agreeing = Declared(reads="hook_resid_post", writes=HOOK, layer=1)
    assert opened(folder, declared=agreeing).hash == opened(folder).hash
    refused(
        folder, "reads resid_post .* but reads says hook_resid_pre", declared=Declared(reads="hook_resid_pre")
    )
    refused(folder, "writes resid_post .* but writes says mlp.out", declared=Declared(writes="mlp.out"))
    refused(folder, "is of layer 1, but layer says 2; leave layer out", declared=Declared(layer=2))


def test_a_hook_without_a_layer_needs_the_users_word(tmp_path):
    own = {"hook_point_in": "hook_resid_post", "hook_point_out": "hook_resid_post"}
    folder = write_now(tmp_path, known(), {"hook_resid_post": 3.0}, **own)
    refused(folder, "hook_point_in: hook_resid_post names no layer; say it with layer")
    assert opened(folder, declared=Declared(layer=2)).layers == (2,)


def test_another_models_dictionary(tmp_path):
    folder = write_now(tmp_path, known())
    refused(folder, "W_E has width 8, the model's d_model is 16", Facts(d_model=16))
    refused(folder, "has a dictionary for layer 1, the model has layers 0 to 0", Facts(n_layers=1))


def test_two_dictionaries_of_one_layer(tmp_path):
    for name in ("a", "b"):
        write_2024(tmp_path / name, known())
    refused(tmp_path, "layer 1 has 2 dictionaries: .*a, .*b; .* deeper path")


def test_a_layer_norm_model_is_told_that_the_files_do_not_say_which_form(tmp_path):
    from ingest.models import Norm

    folder = write_now(tmp_path, known())
    assert opened(folder).notes == ("no dictionary for layer 0, 2 of 0 to 2",)
    centred = Facts(norm=Norm(centred=True, gain="weight", bias=True, eps=1e-5))
    assert any(
        "the files do not say on which form of the model" in note for note in opened(folder, centred).notes
    )


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e300])
def test_a_factor_that_is_no_size_is_refused(tmp_path, factor):
    write_now(tmp_path, known(), expansion_factor=factor)
    refused(tmp_path, "expansion_factor: expected a finite number")


def test_norms_that_overflow_the_decoder_are_refused(tmp_path):
    write_now(
        tmp_path,
        known(),
        {HOOK: 1e-30, MLP_OUT: 1e30},
        hook_point_out=MLP_OUT,
        norm_activation="dataset-wise",
    )
    with pytest.raises(InputError, match=r"the decoder with its norms folded in.* is infinite"):
        opened(tmp_path).verify()
