"""What has no linear residual stream, or does not fit its configuration, is refused before any work, by name
and reason; and the load check finds every wrong fact."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingest.errors import InputError
from ingest.models import describe_model, open_model
from ingest.models.architectures import FAMILIES
from tests.ingest.tiny_models import TINY, tiny_model

torch.set_num_threads(1)


def directory(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def saved(tmp_path):
    """A function that saves a tiny model and gives its folder."""

    def save(name, **changes):
        folder = tmp_path / name
        tiny_model(name, **changes).save_pretrained(folder)
        return folder

    return save


# --- by configuration alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bert"}, "bert is refused: it is an encoder"),
        ({"model_type": "modernbert"}, "is an encoder"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "qwen3_next"}, "linear-attention"),
        ({"model_type": "recurrent_gemma"}, "linear-attention"),
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe is refused: it is a mixture of experts"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": 6}}, "clip_qkv=6 .* clips"),
        ({"model_type": "apertus"}, "xIELU"),
        ({"model_type": "openai-gpt"}, "norms on the residual stream"),
        (
            {"model_type": "opt", "do_layer_norm_before": False},
            "do_layer_norm_before=False .* norms on the res",
        ),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim=512 .* projected"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "norms on the residual"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv=8.0 .* clips"),
        ({"model_type": "falcon", "new_decoder_architecture": True}, "computed wrongly by TransformerBridge"),
        ({"model_type": "gpt_bigcode", "multi_query": False}, "multi_query=False"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "persimmon"}, "persimmon is not on the list .* gpt2, .*qwen3"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"model_type": "no_such_model"}, "'no_such_model' is not known to the transformers library"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "transformers refuses this configuration"),
        ({"hidden_size": 8}, "has no model_type"),
    ],
)
def test_refused_by_name_with_the_reason(tmp_path, config, reason):
    folder = directory(tmp_path / "model", **config)
    for refuse in (describe_model, open_model):
        with pytest.raises(InputError, match=reason) as caught:
            refuse(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"hidden_size": -1}),
        ("llama", {"hidden_act": "unheard of"}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("granite", {"logits_scaling": 0}),
        ("gemma3", {"sliding_window": None}),
        ("gpt2", {"layer_norm_epsilon": None}),
    ],
)
def test_values_that_make_no_sense_are_one_line(saved, name, values):
    """The libraries raise whatever comes to them: a division by zero, a negative dimension."""
    file = saved(name) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(InputError) as caught:
        open_model(file.parent)
    assert "\n" not in str(caught.value)
    assert str(file.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "cannot be read as JSON"), (b"{", "as JSON"), (b"[1]", "no model_type")]
)
def test_a_damaged_configuration_is_named(tmp_path, content, reason):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=reason):
        describe_model(tmp_path)


def test_nothing_there_is_named(tmp_path):
    with pytest.raises(InputError, match="no config"):
        describe_model(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        describe_model(tmp_path / "missing")


# --- by tensors ---------------------------------------------------------------------------------------------


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(UP), rf"tensor {UP} missing"),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight missing"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": t[UP].clone()}), "layers.3.* left over"),
        (lambda t: t.update({"score.weight": t[UP].clone()}), "score.weight left over"),
        (
            lambda t: t.update({UP: t[UP][:-1].clone()}),
            rf"{UP} has shape \(39, 32\); the .* needs \(40, 32\)",
        ),
        (lambda t: t[UP].view(-1)[7:8].fill_(float("nan")), f"{UP} holds NaN"),
        (lambda t: t[UP].view(-1)[7:8].fill_(float("-inf")), f"{UP} holds NaN or inf"),
        (lambda t: t.update({UP: t[UP].to(torch.int8)}), f"{UP} is torch.int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(saved, change, reason):
    folder = saved("llama")
    change_tensors(folder, change)
    with pytest.raises(InputError, match=reason):
        open_model(folder)


def test_damaged_weight_files_are_named(saved):
    folder = saved("llama")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for damaged in (b"", content[:100], content[:-100]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"model\.safetensors: damaged, truncated or empty"):
            open_model(folder)
    file.unlink()
    with pytest.raises(InputError, match="no weights"):
        open_model(folder)


def test_an_index_that_names_what_is_not_there(saved):
    folder = saved("llama")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {UP: "model-2.safetensors"}}))
    with pytest.raises(InputError, match=r"names model-2\.safetensors, which is not in"):
        open_model(folder)
    index.write_text(json.dumps({"weight_map": {UP: "../model.safetensors"}}))
    with pytest.raises(InputError, match="which is not in"):
        open_model(folder)
    index.write_text(json.dumps({"weight_map": {"absent": "model.safetensors"}}))
    with pytest.raises(InputError, match="names absent"):
        open_model(folder)
    index.write_text("{}")
    with pytest.raises(InputError, match="as an index"):
        open_model(folder)


def test_code_in_a_pickle_is_not_run(saved, tmp_path):
    folder = saved("llama")
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "was here"

    class Code:
        def __reduce__(self):
            return (mark.touch, ())

    torch.save({"model.norm.weight": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be read as weights alone"):
        open_model(folder)
    assert not mark.exists()


# --- by the identities --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("gpt2", {"centred": False}),
        ("gpt2", {"position_offset": 1}),
        ("gpt2", {"parallel": True}),
        ("gpt2", {"positions": "rotary"}),
        ("gpt2", {"norm_bias": False}),
        ("gpt2", {"eps": 1e-3}),
        ("gpt_neox-parallel", {"parallel": False}),
        ("gpt_neox-parallel", {"one_norm": True}),
        ("gptj", {"one_norm": False}),
        ("opt", {"position_offset": 0}),
        ("bloom", {"embedding_norm": False}),
        ("llama", {"centred": True}),
        ("llama", {"gain": "1 + weight"}),
        ("llama", {"gain": "none"}),
        ("llama", {"norm_after": True}),
        ("llama", {"norm_before": False}),
        ("llama", {"kv_heads": "num_attention_heads"}),
        ("llama", {"gated": False}),
        ("llama", {"attention_scale": "1"}),
        ("gpt2", {"attention_scale": "1"}),
        ("gemma2", {"attention_scale": "1/sqrt(d_head)"}),
        ("granite", {"attention_scale": "1/sqrt(d_head)"}),
        ("bloom", {"activation": "=relu"}),
        ("llama", {"activation": "=gelu"}),
        ("llama", {"logit_multiplier": 2.0}),
        ("olmo2", {"norm_after": False}),
        ("olmo2", {"norm_before": True}),
        ("nemotron", {"gain": "weight"}),
        ("cohere", {"logit_multiplier": 1.0}),
        ("cohere", {"parallel": False}),
        ("granite", {"embedding_factor": 1.0}),
        ("granite", {"branch_multiplier": 1.0}),
        ("granite", {"logit_divisor": 1.0}),
        ("gemma2", {"gain": "weight"}),
        ("gemma2", {"embedding_factor": 1.0}),
        ("gemma2", {"norm_after": False}),
        ("gemma2", {"logit_cap": None}),
        ("glm4", {"norm_after": False}),
    ],
)
def test_the_load_check_finds_a_wrong_fact(saved, monkeypatch, name, fact):
    """Each fact of the table, made wrong, is contradicted by the model itself."""
    model_type = TINY[name][0]
    monkeypatch.setitem(FAMILIES, model_type, replace(FAMILIES[model_type], **fact))
    # Where the fact meets a module that says otherwise it is refused at once, else by an identity.
    with pytest.raises(InputError, match=r"is not what its configuration says|expect|facts|has shape"):
        open_model(saved(name))


def test_a_wrong_grouping_of_heads_is_found(saved, monkeypatch):
    """h % n_kv instead of h // group: plausible, and wrong."""
    from ingest.models.residual import ResidualModel

    monkeypatch.setattr(ResidualModel, "kv", lambda self, head: head % self.facts.n_kv_heads)
    with pytest.raises(InputError, match="of the model and of the algebra differ"):
        open_model(saved("llama"))


def test_a_freeze_that_does_nothing_is_found(saved, monkeypatch):
    """As where hooks are read-only: the second forward of the check contradicts the algebra."""
    from ingest.models import runtime

    for name in ("_freeze_norm", "_freeze_heads"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, lambda *_: None)
            with pytest.raises(InputError, match="all frozen"):
                open_model(saved("llama"))


def test_without_the_check_names_and_shapes_are_still_compared(saved, monkeypatch):
    folder = saved("llama")
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], logit_multiplier=2.0))
    open_model(folder, check=False)  # the identities are what the check leaves out
    change_tensors(folder, lambda tensors: tensors.pop(UP))
    with pytest.raises(InputError, match="missing"):
        open_model(folder, check=False)


def test_a_copy_of_a_good_model_is_not_refused(saved, tmp_path):
    """The refusals above come from the change, not from the way these tests save a model."""
    folder = saved("llama")
    change_tensors(folder, lambda tensors: None)
    shutil.copytree(folder, tmp_path / "copy")
    assert open_model(tmp_path / "copy").hash == open_model(folder).hash
