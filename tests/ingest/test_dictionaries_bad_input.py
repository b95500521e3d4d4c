"""Every way a dictionary's files can be wrong: one clear line that names the file, what was expected and
found."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from ingest.dictionaries import describe_set
from ingest.errors import InputError
from tests.ingest.small_dictionaries import THRESHOLD, Facts, Outline, opened, tensors, write_set


def refused(folder, facts=None, **options):
    """The one line with which a set is refused at the latest by verify."""
    with pytest.raises(InputError) as caught:
        opened(folder, facts, **options).verify()
    line = str(caught.value)
    assert "\n" not in line
    return line


def broken(tmp_path, change, **config):
    """A set of one layer whose tensors were changed."""
    values = tensors(threshold=config.pop("threshold", False))
    change(values)
    return write_set(tmp_path / "set", {0: values}, **config)


# --- files --------------------------------------------------------------------------------------------------


def test_missing_directory(tmp_path):
    assert "nowhere: no such file or directory" in refused(tmp_path / "nowhere")


def test_directory_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    line = refused(tmp_path)
    assert "no known dictionary format (circuit-tracer" in line and "; found notes.txt" in line


def test_empty_directory(tmp_path):
    assert "found nothing" in refused(tmp_path)


def test_missing_config(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()})
    (folder / "config.yaml").unlink()
    line = refused(folder)
    assert "config.yaml: no such file" in line
    assert "feature_input_hook" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\x05", "truncated or no safetensors file (1 bytes"),
        (b"not a safetensors file at all", "truncated or no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_layer_file_that_is_none(tmp_path, content, said):
    folder = write_set(tmp_path / "set", {0: tensors(), 1: tensors()})
    (folder / "layer_1.safetensors").write_bytes(content)
    line = refused(folder)
    assert f"layer_1.safetensors: {said}" in line


@pytest.mark.parametrize("left", [0.1, 0.5, 0.999])
def test_truncated_layer_file_is_found_before_any_weight_is_read(tmp_path, left):
    folder = write_set(tmp_path / "set", {0: tensors(), 2: tensors()})
    path = folder / "layer_2.safetensors"
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    with pytest.raises(InputError, match=r"layer_2\.safetensors: truncated"):
        describe_set(folder, Facts())


def test_unreadable_layer_file(tmp_path):
    """A link to itself: unreadable for the super-user too, which permissions are not."""
    folder = write_set(tmp_path / "set", {0: tensors()})
    (folder / "layer_0.safetensors").unlink()
    (folder / "layer_0.safetensors").symlink_to(folder / "layer_0.safetensors")
    assert "layer_0.safetensors: cannot be read" in refused(folder)


def test_directory_named_like_a_layer(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()})
    (folder / "layer_1.safetensors").mkdir()
    assert "layer_1.safetensors: is not a file" in refused(folder)


def test_file_of_another_format_beside(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()})
    save_file({"W_dec_0": torch.ones(1)}, str(folder / "W_dec_0.safetensors"))
    assert "files of several formats (circuit-tracer, circuit-tracer-clt)" in refused(folder)
    message = refused(folder, format="circuit-tracer")
    assert "W_dec_0.safetensors: is left over beside layer_*.safetensors" in message


# --- tensors ------------------------------------------------------------------------------------------------


def test_tensor_missing(tmp_path):
    line = refused(broken(tmp_path, lambda values: values.pop("b_dec")))
    assert "layer_0.safetensors: tensor missing: b_dec; expected W_dec, W_enc, b_dec, b_enc" in line
    assert "found W_dec, W_enc, b_enc" in line


def test_tensor_left_over(tmp_path):
    line = refused(broken(tmp_path, lambda values: values.update(b_pre=torch.zeros(8))))
    assert "tensor left over: b_pre" in line


def test_missing_and_left_over_are_both_named(tmp_path):
    line = refused(broken(tmp_path, lambda values: values.update(bias=values.pop("b_enc"))))
    assert "tensor missing: b_enc; tensor left over: bias" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"W_dec": (21, 8)}, "W_enc has shape (20, 8) and W_dec (21, 8)"),
        (
            {"W_enc": (8, 20)},
            "W_enc has shape (8, 20) and W_dec (20, 8); expected (F, d) and (F, d) with the same F; one",
        ),
        ({"W_enc": (20,)}, "W_enc has shape (20) and W_dec (20, 8)"),
        ({"W_enc": (0, 8), "W_dec": (0, 8)}, "W_enc has shape (0, 8) and W_dec (0, 8)"),
        (
            {"W_dec": (20, 9)},
            "W_dec has shape (20, 9), so width 9, the model's d_model is 8 (SmallForCausalLM)",
        ),
        ({"b_enc": (8,)}, "b_enc has shape (8), expected (20): one for each of the 20 rows of W_enc"),
        ({"b_dec": (20,)}, "b_dec has shape (20), expected (8): W_dec is (20, 8)"),
        ({"W_skip": (8, 20)}, "W_skip has shape (8, 20), expected (8, 8): the model's d_model is 8"),
        ({THRESHOLD: (1,)}, f"{THRESHOLD} has shape (1), expected (20)"),
    ],
)
def test_wrong_shape_names_both(tmp_path, change, said):
    shapes = {key: torch.ones(*shape) for key, shape in change.items()}
    line = refused(broken(tmp_path, lambda values: values.update(shapes)))
    assert f"layer_0.safetensors: {said}" in line


def test_dictionary_for_another_width(tmp_path):
    line = refused(write_set(tmp_path / "set", {0: tensors()}), Facts(d_model=16))
    assert "W_enc has shape (20, 8), so width 8, the model's d_model is 16 (SmallForCausalLM)" in line
    assert "another model" in line


@pytest.mark.parametrize("key", ["W_enc", "b_enc", "W_dec", "b_dec", THRESHOLD])
@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (-float("inf"), "inf")]
)
def test_values_that_are_not_finite(tmp_path, key, value, said):
    def spoil(values):
        values[key].view(-1)[5] = value

    line = refused(broken(tmp_path, spoil, threshold=True))
    place = "[0, 5]" if key.startswith("W") else "[5]"
    assert f"layer_0.safetensors: {key}{place} is {said}" in line
    assert "1 of " in line


def test_values_that_cancel_are_found(tmp_path):
    """Finding them by a sum alone would be fooled: inf - inf is NaN, and large finite values overflow a
    sum."""

    def spoil(values):
        values["W_enc"][0, 0], values["W_enc"][0, 1] = float("inf"), -float("inf")

    assert "W_enc[0, 0] is infinite (2 of 160" in refused(broken(tmp_path, spoil))


def test_large_finite_weights_are_no_error(tmp_path):
    def enlarge(values):
        values["W_enc"][:] = 3e38

    opened(broken(tmp_path, enlarge)).verify()


def test_float16_overflow_says_so(tmp_path):
    values = tensors(dtype=torch.float16)
    values["W_dec"][2, 3] = 70_000.0  # beyond float16: becomes infinite
    line = refused(write_set(tmp_path / "set", {0: values}))
    assert "W_dec[2, 3] is infinite" in line
    assert "float16 ends at 65504" in line


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_types_that_float32_cannot_hold(tmp_path, dtype):
    line = refused(broken(tmp_path, lambda values: values.update(W_enc=values["W_enc"].to(dtype))))
    assert "layer_0.safetensors: W_enc: type" in line
    assert "save it as float32" in line


# --- layers and models --------------------------------------------------------------------------------------


def test_layer_that_the_model_lacks(tmp_path):
    line = refused(write_set(tmp_path / "set", {0: tensors(), 3: tensors()}))
    assert "has a dictionary for layer 3, the model has layers 0 to 2" in line


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ([1], "layer 1 was asked for, it has layers 0, 2"),
        ([7], "layer 7 was asked for, the model has layers 0 to 2"),
    ],
)
def test_layer_asked_for_that_is_not_there(tmp_path, wanted, said):
    assert said in refused(write_set(tmp_path / "set", {0: tensors(), 2: tensors()}), layers=wanted)


def test_dictionary_bound_to_another_model(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()}, model_hash="c" * 64)
    line = refused(folder)
    assert "model_hash: made for the model cccccccccccc…, found aaaaaaaaaaaa…" in line
    from ingest.dictionaries import open_set

    mine = dataclasses.replace(Outline(), hash="c" * 64)
    assert open_set(folder, name="tc", model=mine).layers == (0,)


def test_hook_that_a_parallel_block_has_not(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()}, feature_input_hook="hook_resid_mid")
    assert "hook_resid_mid does not exist in the parallel blocks" in refused(folder, Facts(parallel=True))


# --- config.yaml --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"feature_input_hook": None},
            "feature_input_hook: expected one of mlp.hook_in, hook_resid_mid, hook_mlp_in",
        ),
        ({"feature_input_hook": "hook_resid_post"}, "found 'hook_resid_post'"),
        ({"feature_input_hook": ["mlp.hook_in"]}, "found ['mlp.hook_in']"),
        (
            {"feature_output_hook": None},
            "feature_output_hook: expected one of mlp.hook_out, hook_mlp_out, found nothing",
        ),
        ({"feature_output_hook": "hook_resid_post"}, "found 'hook_resid_post'"),
        (
            {"scann": 1, "kk": 2},
            "kk: unknown key; did you mean 'k'?; scann: unknown key; did you mean 'scan'?",
        ),
        ({"dtype": "float16"}, "dtype: unknown key; expected activation or feature_input_hook"),
        (
            {"model_kind": "cross_layer_transcoder"},
            "model_kind: expected transcoder_set, found 'cross_layer_transcoder'",
        ),
        ({"transcoders": ["hf://a/b"]}, "transcoders: lists files kept elsewhere"),
        ({"activation": "gelu"}, "activation: expected relu, jumprelu or topk, found 'gelu'"),
        (
            {"activation": "topk"},
            "k: expected a whole number of 1 or more beside activation: topk, found None",
        ),
        ({"activation": "topk", "k": 0}, "found 0"),
        ({"activation": "topk", "k": True}, "found True"),
        ({"activation": "topk", "k": "32"}, "found '32'"),
        ({"activation": "topk", "k": 21}, "W_enc has 20 latents, config.yaml says k: 21"),
        ({"k": 4}, "k: 4 stands without `activation: topk`"),
        ({"activation": "jumprelu"}, f"tensor missing: {THRESHOLD}"),
    ],
)
def test_config_that_is_not_understood(tmp_path, config, said):
    assert said in refused(write_set(tmp_path / "set", {0: tensors()}, **config))


@pytest.mark.parametrize("activation", [{"activation": "relu"}, {"activation": "topk", "k": 4}])
def test_threshold_beside_another_activation(tmp_path, activation):
    folder = write_set(tmp_path / "set", {0: tensors(threshold=True)}, **activation)
    assert (
        f"{THRESHOLD} belongs to JumpReLU, but config.yaml says activation: {activation['activation']}"
        in refused(folder)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected keys and values, found nothing"),
        ("- a\n- b\n", "expected keys and values, found ['a', 'b']"),
        ("a: [1,\n", "not YAML"),
        ("\xff\xfe", "not YAML"),
        ("feature_input_hook: !!python/object/apply:os.system ['true']\n", "not YAML"),
        ("a: " + 20_000 * "[", "not YAML"),
        ("scan: 2024-13-45\n", "not YAML: month must be"),
        ("scan: &a [1]\nmodel_name: *a\n", "aliases"),
        ("activation: topk\nk: 3\nactivation: relu\n", "line 3: activation: stands twice (first on line 1)"),
    ],
)
def test_config_that_is_no_mapping(tmp_path, text, said):
    folder = write_set(tmp_path / "set", {0: tensors()})
    (folder / "config.yaml").write_bytes(text.encode("latin-1"))
    line = refused(folder)
    assert "config.yaml: " in line and said in line


# --- formats ------------------------------------------------------------------------------------------------


def test_unknown_format(tmp_path):
    line = refused(write_set(tmp_path / "set", {0: tensors()}), format="saelense")
    assert "unknown dictionary format 'saelense'; known: circuit-tracer" in line


def test_neurons_have_no_path(tmp_path):
    assert "leave the path out" in refused(write_set(tmp_path / "set", {0: tensors()}), format="neurons")


def test_files_need_a_path():
    assert "needs a path" in refused(None, format="circuit-tracer")
    assert "needs a path, or format: neurons" in refused(None)


def test_named_format_without_its_files(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "feature_input_hook: mlp.hook_in\nfeature_output_hook: mlp.hook_out\n"
    )
    assert "has no layer_0.safetensors" in refused(tmp_path, format="circuit-tracer")
