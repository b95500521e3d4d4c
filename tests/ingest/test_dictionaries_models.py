"""Dictionaries on real models: neurons are the model's own MLPs, and what does not fit a model is refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ingest.dictionaries import describe_set, open_set
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from ingest.models import describe_model, open_model
from tests.ingest.small_dictionaries import tensors, write_set

SIZES = {"vocab_size": 17, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def saved(request, tmp_path_factory):
    """A tiny random model's folder, and its MLPs as Hugging Face runs them."""
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=16, n_inner=12, **SIZES)
        model = GPT2LMHeadModel(config).eval().requires_grad_(False)
        mlps = [block.mlp for block in model.transformer.h]
    else:
        config = LlamaConfig(
            num_hidden_layers=2, hidden_size=8, intermediate_size=12, num_attention_heads=2,
            num_key_value_heads=1, mlp_bias=True, **SIZES,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        mlps = [layer.mlp for layer in model.model.layers]
    for mlp in mlps:
        for parameter in mlp.parameters():
            parameter.normal_()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, mlps


def test_neurons_are_the_models_mlps(saved):
    folder, mlps = saved
    model = open_model(folder, name="small")
    found = open_set(None, name="neurons", model=model, format="neurons")
    assert (
        dict(found.sizes)
        == dict(describe_set(None, describe_model(folder), format="neurons").sizes)
        == {0: 12, 1: 12}
    )
    assert found.key(1) == "small/neurons/L01.mlp"
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    for layer, mlp in enumerate(mlps):
        dictionary = found.load(layer)
        torch.testing.assert_close(decode(dictionary, encode(dictionary, x))[0], mlp(x), atol=1e-5, rtol=1e-5)


def test_a_set_bound_to_this_model_by_hash(saved, tmp_path):
    folder, _ = saved
    model = open_model(folder, name="small")
    mine = write_set(tmp_path / "mine", {0: tensors()}, model_hash=model.hash)
    assert open_set(mine, name="tc", model=model).load(0).size == 20
    other = write_set(tmp_path / "other", {0: tensors()}, model_hash="0" * 64)
    with pytest.raises(InputError, match="model_hash: made for the model 0000"):
        open_set(other, name="tc", model=model)
