"""GGUF: the same model as the Hugging Face directory it came from; damaged files are named."""

import gguf
import numpy as np
import pytest
import torch

from ingest.errors import InputError
from ingest.models import describe_model, open_model
from ingest.models.gguf_file import GGUFFile
from tests.ingest.tiny_models import tiny_model, tokens

torch.set_num_threads(1)
KINDS = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "granite": "granite",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3",
}  # fmt: skip
PERMUTED, SHIFTED = ("llama", "granite"), ("gemma", "gemma2", "gemma3")
TEXTS = ["<s>", "Ġthe", "âĢ", "Hi", *(f"t{n}" for n in range(57))]


def write_gguf(path, model, kind, kind_of_weights=gguf.GGMLQuantizationType.F32, extra=(), without=()):
    """A file as llama.cpp's converter writes it: its names, rows of Q and K permuted, gains shifted."""
    config, writer = model.config, gguf.GGUFWriter(path, kind)
    n_heads, n_kv = config.num_attention_heads, config.num_key_value_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv)
    writer.add_key_length(d_head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if kind == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TEXTS)
    for key, value in extra:
        writer.add_uint32(f"{kind}.{key}", value)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy().copy()
        stem, _, suffix = name.rpartition(".")
        if kind in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = n_heads if "q_proj" in name else n_kv
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if kind in SHIFTED and name.endswith("norm.weight"):
            values = values + 1
        if values.ndim > 1 and kind_of_weights != gguf.GGMLQuantizationType.F32:
            stored = gguf.quantize(values, kind_of_weights)
            writer.add_tensor(f"{table.get_name(stem)}.{suffix}", stored, raw_dtype=kind_of_weights)
        else:
            writer.add_tensor(f"{table.get_name(stem)}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(kind, **changes):
    # The file does not hold a score scale: Gemma's is its head width.
    return tiny_model(
        kind, **changes | ({"query_pre_attn_scalar": 12} if kind in ("gemma2", "gemma3") else {})
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_the_model_it_was_written_from(kind, tmp_path):
    """Logits and hash are those of the Hugging Face directory."""
    model = tiny(kind)
    with torch.no_grad():
        logits = model(tokens()[None]).logits[0]
    model.save_pretrained(tmp_path / "directory")
    opened = open_model(write_gguf(tmp_path / "tiny.gguf", model, KINDS[kind]))
    # Gemma's gains lose a bit where llama.cpp adds 1 to them.
    exact = kind not in SHIFTED
    torch.testing.assert_close(opened.trace(tokens()).logits, logits, atol=1e-4, rtol=1e-4)
    assert (opened.hash == open_model(tmp_path / "directory").hash) == exact
    assert opened.name == "tiny"


def test_dequantised_tensors_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama", intermediate_size=64)
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    ours = open_model(path)
    assert ours.facts.dtype == "Q8_0"
    assert theirs.keys() == ours.tensors.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours.tensors[name]), name


def test_facts_and_texts_come_from_the_metadata(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), "llama")
    facts = describe_model(path)
    assert (facts.n_layers, facts.d_model, facts.n_kv_heads, facts.d_vocab) == (3, 32, 2, 61)
    assert facts.norm.eps == 1e-6  # as written, not the nearest float32's digits
    assert not facts.tied
    assert open_model(path).token_texts()[:4] == ["<s>", " the", "\\xe2\\x80", "Hi"]


def test_each_damage_is_named(tmp_path):
    model = tiny_model("llama")
    good = write_gguf(tmp_path / "good.gguf", model, "llama").read_bytes()

    def refused(content, match):
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(InputError, match=match):
            open_model(path)

    refused(b"", "empty")
    refused(b"PK\x03\x04" + good[4:], "not a GGUF file")
    refused(good[:4] + b"\x00\x00\x00\x03" + good[8:], "version")
    refused(good[:200], "damaged or truncated")
    refused(good[:-5000], "truncated: tensor")
    for length in range(0, 2000, 97):  # cut anywhere in the header
        refused(good[:length], "empty|not a GGUF|damaged or truncated")


def test_what_is_not_read_is_refused(tmp_path):
    model = tiny_model("llama")

    def refused(match, **options):
        path = tmp_path / "bad.gguf"
        path.unlink(missing_ok=True)
        with pytest.raises(InputError, match=match):
            open_model(write_gguf(path, model, **{"kind": "llama"} | options))

    refused(r"llama\.attention\.unheard_of=1: the effect of this key is not known",
            extra=[("attention.unheard_of", 1)])  # fmt: skip
    refused(r"llama\.attention\.sliding_window=4: the effect", extra=[("attention.sliding_window", 4)])
    refused("mixture of experts", extra=[("expert_count", 8)])
    refused("16 rotary dimensions", extra=[("rope.dimension_count", 16)])
    refused(r"model\.norm\.weight missing", without=("model.norm.weight",))
    path = tmp_path / "bad.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="'mamba' is not read"):
        describe_model(path)


def test_a_left_over_tensor_is_refused(tmp_path):
    """A fourth layer that the metadata does not count."""
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama")
    content = path.read_bytes()
    key = b"llama.block_count"
    at = content.index(key) + len(key) + 4  # the value's type
    assert int.from_bytes(content[at : at + 4], "little") == 3
    path.write_bytes(content[:at] + (2).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(InputError, match=r"blk\.2.* left over"):
        open_model(path)


def test_a_non_finite_tensor_is_named(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        open_model(write_gguf(tmp_path / "tiny.gguf", model, "llama"))


def test_the_header_keeps_every_kind_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.texts", ["x", "", "ü"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_bool("a.flag", True)
    writer.add_float64("a.double", 0.1)
    writer.add_float32("a.single", 0.1)
    writer.add_int64("a.long", -(1 << 40))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "values.gguf").metadata
    assert metadata["a.text"] == "Grüße"
    assert metadata["a.texts"] == ["x", "", "ü"]
    assert metadata["a.numbers"] == [1, -2, 3]
    assert metadata["a.flag"] is True
    assert metadata["a.double"] == metadata["a.single"] == 0.1
    assert metadata["a.long"] == -(1 << 40)
