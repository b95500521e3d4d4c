"""SAELens' files of every age, where a dictionary stands by them, and every way they can be wrong."""

import pytest
import torch

from ingest.dictionaries import At, Declared, Read, Space, TopK, describe_set
from ingest.errors import InputError
from tests.ingest.saelens_files import (
    LAYER_NORM,
    MLP_OUT,
    NORMALISED,
    POST,
    D,
    F,
    current,
    legacy,
    random,
    transcoder,
    weights,
    written,
)  # fmt: skip
from tests.ingest.small_dictionaries import Facts, opened

# --- older files --------------------------------------------------------------------------------------------


def test_the_same_dictionary_has_one_hash_whatever_the_files_age(tmp_path):
    old = legacy(hook_name=None, hook_layer=None, hook_point=POST, hook_point_layer=1, architecture=None)
    hashes = {
        opened(written(tmp_path / str(place), weights(), config)).hash_of(1)
        for place, config in enumerate([current(), legacy(), old, legacy(lr=4e-4, l1_coefficient=5)])
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["activation_fn_str", "activation_fn"])
def test_topk_hides_under_standard(tmp_path, name):
    config = legacy(**{"activation_fn_str": None, name: "topk", "activation_fn_kwargs": {"k": 3}})
    assert opened(written(tmp_path, weights(), config)).load(1).gate == TopK(3)


def test_what_old_files_leave_out_is_defaulted_and_said(tmp_path):
    config = legacy(
        architecture=None, apply_b_dec_to_input=None, normalize_activations=True,
        model_from_pretrained_kwargs=None,
    )  # fmt: skip
    found = opened(written(tmp_path, weights(), config))
    assert found.load(1).b_in is not None
    said = "; ".join(found.notes)
    for part in ("read as standard", "b_dec is subtracted", "factor is not in the file", "the folded one"):
        assert part in said


# --- where it stands ----------------------------------------------------------------------------------------


def test_heads_side_by_side_are_a_site_of_their_own(tmp_path):
    config = current(hook="blocks.1.attn.hook_z", reshape_activations="hook_z")
    folder = written(tmp_path, weights(), config)
    found = opened(folder, Facts(d_model=6))
    assert (found.layout.read, found.site) == (Read("attn.z", Space.Z), "attn.z")
    assert found.layout.writes[1] == ((1, "attn.z", At.MODULE),)
    with pytest.raises(InputError, match="has width 8, the model's n_heads times d_head is 12"):
        opened(folder, Facts(n_heads=6))


@pytest.mark.parametrize(
    ("hook", "metadata", "read"),
    [
        ("blocks.1.hook_mlp_out", {}, Read("mlp.out", Space.BRANCH_OUTPUT)),
        ("model.layers.1", {"model_class_name": "AutoModelForCausalLM"}, Read("resid_post", Space.RAW)),
    ],
)
def test_hooks_of_either_library(tmp_path, hook, metadata, read):
    assert opened(written(tmp_path, weights(), current(hook=hook, metadata=metadata))).layout.read == read


@pytest.mark.parametrize(
    ("metadata", "space"),
    [
        ({}, Space.NORMALISED_WITH_GAIN),
        ({"model_from_pretrained_kwargs": {"fold_ln": True}}, Space.NORMALISED),
        ({"model_class_name": "TransformerBridge"}, Space.NORMALISED),
    ],
)
def test_hook_normalized_is_before_the_gain_where_the_model_was_folded(tmp_path, metadata, space):
    config = transcoder()
    config["metadata"] |= metadata
    found = opened(written(tmp_path, weights(), config), Facts(norm=LAYER_NORM))
    assert found.layout.read == Read("mlp.in", space)


def test_a_folder_above_several_layers_is_one_set(tmp_path):
    for layer in (0, 2):
        written(tmp_path / f"l{layer}", weights(), current(hook=f"blocks.{layer}.hook_resid_post"))
    assert opened(tmp_path).layers == (0, 2)
    assert opened(tmp_path / "l2" / "sae_weights.safetensors").layers == (2,)
    written(tmp_path / "mlp", weights(), current(hook=MLP_OUT))
    with pytest.raises(InputError, match=r"several sites.*resid_post.*mlp\.out.*deeper path"):
        opened(tmp_path)


def test_a_hook_that_is_not_in_the_file_is_declared(tmp_path):
    folder = written(tmp_path, weights(), current(hook=None))
    with pytest.raises(InputError, match=r"metadata\.hook_name: is missing, and so is reads"):
        opened(folder)
    with pytest.raises(InputError, match="says no layer"):
        opened(folder, declared=Declared(reads="resid_post"))
    found = opened(folder, declared=Declared(reads="resid_post", layer=2))
    assert (found.layers, found.site) == ((2,), "resid_post")
    with pytest.raises(InputError, match=r"reads says blocks\.2\.hook_resid_post"):
        opened(written(tmp_path, weights(), current()), declared=Declared(reads="blocks.2.hook_resid_post"))


def test_headers_need_no_model(tmp_path):
    layout = describe_set(written(tmp_path, weights(), transcoder()), None)
    assert (layout.layers, dict(layout.sizes), layout.bytes) == ((1,), {1: F}, {1: 4 * (2 * D * F + F + D)})
    assert any("say which model" in note for note in layout.notes)


# --- bad input ----------------------------------------------------------------------------------------------


def refused(folder, values, config, **options):
    with pytest.raises(InputError) as caught:
        opened(written(folder, values, config), **options).verify()
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line
    return line


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (current("batchtopk", k=4), "batchtopk is not supported: it is a training checkpoint"),
        (current("matryoshka_batchtopk", k=4), "matryoshka_batchtopk is not supported: it is a training"),
        (current("matching_pursuit"), "matching_pursuit is not supported: it is a code found by iterative"),
        (current("temporal"), "temporal is not supported: it is a code of a whole sequence"),
        (current("jumpreluu"), "'jumpreluu' is not known; did you mean 'jumprelu'?; known: standard, topk,"),
        (current(None), "architecture: is missing"),
        (current(new_option=1), "new_option: unknown key"),
        (current("topk"), "k: is missing"),
        (current("topk", k=0), "k: expected 1 or more, found 0"),
        (current("topk", k=F + 1), "k: expected at most the 20 latents"),
        (current("topk", k=2.5), "k: expected a whole number, found 2.5"),
        (current(normalize_activations="unit"), 'normalize_activations: expected one of "none"'),
        (current(reshape_activations="hook_q"), 'reshape_activations: expected one of "none", "hook_z"'),
        (transcoder(apply_b_dec_to_input=True), "apply_b_dec_to_input: expected false"),
        (current("transcoder", NORMALISED, apply_b_dec_to_input=False, d_out=D), "hook_name_out: is missing"),
        (current(hook="blocks.1.hook_resid_pots"), "unknown hook 'blocks.1.hook_resid_pots'"),
        (current(hook="blocks.7.hook_resid_post"), "dictionary for layer 7, the model has layers 0 to 2"),
        (current(metadata={"hook_layer": 2}), "of which layer? the hook's name says 1, cfg.json: hook_layer"),
        (current(metadata={"hook_head_index": 3}), "hook_head_index: a dictionary of one head"),
        (current(d_in=9), "W_enc has shape (8, 20), expected (9, 20): cfg.json says d_in 9, d_sae 20"),
        (legacy(activation_fn_str="tanh-relu"), 'activation_fn_str: expected one of "relu", "topk"'),
        (legacy(activation_fn_kwargs={"k": 3}), "activation_fn_kwargs.k: unknown key"),
        (legacy(hook_point="blocks.0.hook_resid_post"), "hook_point: 'blocks.0.hook_resid_post' is not hook"),
        (legacy(architecture="abstopk"), "'abstopk' is not known; did you mean 'topk'"),
        (legacy(d_inn=3), "d_inn: unknown key; did you mean 'd_in'?"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_understood(tmp_path, config, said):
    assert said in refused(tmp_path, weights(), config)


def test_metadata_is_free_in_form_and_what_is_not_known_of_it_is_told(tmp_path):
    found = opened(written(tmp_path, weights(), current(metadata={"mood": "good"})))
    assert "metadata has mood, not known here and not used" in found.notes


def test_a_dictionary_for_another_width(tmp_path):
    line = refused(tmp_path, weights(), current(), facts=Facts(d_model=16))
    assert "W_enc has width 8, the model's d_model is 16 (SmallForCausalLM)" in line


@pytest.mark.parametrize(
    ("architecture", "change", "said"),
    [
        ("standard", {"b_enc": None}, "tensor missing: b_enc"),
        ("jumprelu", {}, "tensor missing: threshold"),
        ("standard", {"threshold": torch.ones(F)}, "tensor left over: threshold"),
        ("standard", {"b_enc": torch.ones(D)}, "b_enc has shape (8), expected (20)"),
        ("standard", {"W_enc": random(1, F, D)}, "W_enc has shape (20, 8), expected (8, 20)"),
        ("standard", {"W_dec": random(1, F, D).double()}, "W_dec: type F64"),
        ("standard", {"W_enc": (70_000 * random(1, D, F)).half()}, "float16 ends at 65504"),
        ("standard", {"b_dec": torch.full((D,), float("nan"))}, "b_dec[0] is NaN"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, architecture, change, said):
    values = {key: value for key, value in (weights() | change).items() if value is not None}
    assert said in refused(tmp_path, values, current(architecture))


def test_a_truncated_file_is_found_before_any_weight_is_read(tmp_path):
    path = written(tmp_path, weights(), current()) / "sae_weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"sae_weights\.safetensors: truncated"):
        describe_set(tmp_path, None)


def test_the_tensors_types_win_over_the_declared_one(tmp_path):
    values = {key: value.bfloat16() for key, value in weights().items()}
    found = opened(written(tmp_path, values, current()))
    assert found.layout.dtypes == ("BF16",)
    assert torch.equal(found.load(1).encoders[0].W_enc, values["W_enc"].T.float())
    assert "cfg.json says float32, the tensors are BF16: they decide" in found.notes


# --- what contradicts itself, or overflows ------------------------------------------------------------------


@pytest.mark.parametrize("architecture, metadata, told", [
    ("standard", {"hook_name_out": MLP_OUT}, "hook_name_out: expected blocks.1.hook_resid_post, as an SAE"),
    ("transcoder", {"hook_name_out": MLP_OUT, "hook_layer_out": 2}, "hook_layer_out: expected 1, .* found 2"),
    ("transcoder", {"hook_name_out": "blocks.0.hook_mlp_out"}, "reads layer 1 and writes layer 0"),
])  # fmt: skip
def test_what_is_written_must_agree_with_itself(tmp_path, architecture, metadata, told):
    config = transcoder() if architecture == "transcoder" else current()
    config["metadata"] |= metadata
    with pytest.raises(InputError, match=told):
        opened(written(tmp_path, weights(), config))


def test_an_sae_may_say_twice_where_it_stands(tmp_path):
    found = opened(
        written(tmp_path, weights(), current(metadata={"hook_name_out": POST, "hook_layer_out": 1}))
    )
    assert found.layout.writes == {1: ((1, "resid_post", At.STREAM),)}


@pytest.mark.parametrize("r_mag", [100.0, -110.0])
def test_a_gate_whose_scale_overflows_is_refused(tmp_path, r_mag):
    values = weights("b_gate", "r_mag", "b_mag")
    values["r_mag"][3] = r_mag
    with pytest.raises(InputError, match=r"(encoder .*|exp\(-r_mag\))\[3.* is infinite"):
        opened(written(tmp_path, values, current("gated"))).verify()


def test_norms_that_overflow_the_encoder_are_refused(tmp_path):
    values = weights()
    values["W_dec"][2] = 1e38
    values["W_enc"] *= 1e3
    config = current("topk", k=3, rescale_acts_by_decoder_norm=True)
    with pytest.raises(InputError, match=r"the encoder with its factors folded in\[2, 0\] is infinite"):
        opened(written(tmp_path, values, config)).verify()


@pytest.mark.parametrize("norm", [LAYER_NORM, Facts().norm])
def test_a_hook_may_be_said_again_where_it_is_before_the_gain(tmp_path, norm):
    config = transcoder()
    config["metadata"]["model_from_pretrained_kwargs"] = {"fold_ln": True}
    said = Declared(reads="ln2.hook_normalized", writes="hook_mlp_out")
    found = opened(written(tmp_path, weights(), config), Facts(norm=norm), declared=said)
    assert found.layout.read == Read("mlp.in", Space.NORMALISED)
    with pytest.raises(InputError, match=r"reads says mlp\.in"):  # which is after the gain
        opened(tmp_path, Facts(norm=norm), declared=Declared(reads="mlp.in"))


def test_no_mean_is_said_to_be_taken_out_where_norms_take_none(tmp_path):
    kwargs = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    folder = written(tmp_path, weights(), current(metadata=kwargs))
    for norm, said in ((LAYER_NORM, True), (Facts().norm, False)):
        assert any("folded model" in note for note in opened(folder, Facts(norm=norm)).notes) is said


@pytest.mark.parametrize("text, told", [
    ('{"architecture": "standard", "d_in": ' + 5000 * "1" + "}", "is not JSON"),
    ('{"architecture": "standard", "d_in": ' + 400 * "1" + "}", "d_in: expected a finite number"),
])  # fmt: skip
def test_numbers_without_end_are_refused(tmp_path, text, told):
    folder = written(tmp_path, weights(), current())
    (folder / "cfg.json").write_text(text)
    with pytest.raises(InputError, match=told):
        opened(folder)
