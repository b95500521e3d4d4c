"""The architectures whose residual stream is known, each one row of facts; and those refused, with the
reason. A row names configuration keys, never a behaviour: `read_facts` turns any row into Facts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ingest.errors import InputError
from ingest.models.facts import Facts, Norm
from ingest.models.libraries import library_errors

__all__ = ["FAMILIES", "Family", "read_facts"]


@dataclass(frozen=True)
class Family:
    """One architecture. A text is the configuration's key that holds the fact; anything else is the fact."""

    architecture: str
    centred: bool = False
    gain: str = "weight"
    norm_bias: bool = False
    eps: str | float = "rms_norm_eps"
    norm_before: bool = True
    norm_after: bool = False
    embedding_norm: bool = False
    parallel: str | bool = False
    one_norm: str | bool = False
    positions: str = "rotary"
    position_offset: int = 0
    embedding_factor: str | float = 1.0  # a key, or 'sqrt(d_model)'
    branch_multiplier: str | float = 1.0
    logit_multiplier: str | float = 1.0
    logit_divisor: str | float = 1.0
    logit_cap: str | None = None
    attention_scale: str = "1/sqrt(d_head)"  # or 'KEY', 'KEY^-1/2', '1'
    attention_cap: str | None = None
    gated: bool = True
    activation: str = "hidden_act"
    kv_heads: str | Callable[[Any], int] = "num_key_value_heads"
    # (key, the only value the algebra holds for, why any other is refused)
    needs: tuple[tuple[str, Any, str], ...] = ()


_LAYER_NORM: dict[str, Any] = {"centred": True, "norm_bias": True}
_GEMMA: dict[str, Any] = {
    "gain": "1 + weight",
    "embedding_factor": "sqrt(d_model)",
    "activation": "hidden_activation",
}
_PARALLEL: dict[str, Any] = {"parallel": True, "one_norm": True}
_NO_CLIP = ("clip_qkv", None, "clips queries, keys and values: the stream is not read linearly")


def _one_if_multi_query(config: Any) -> int:
    return 1 if config.multi_query else config.num_attention_heads


# Hugging Face's model_type -> facts. Each is checked in tests/ingest/test_models_architectures.py.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel", **_LAYER_NORM, eps="layer_norm_epsilon", positions="learned", gated=False,
        activation="activation_function", kv_heads="num_attention_heads",
        needs=(("add_cross_attention", False, "reads an encoder through cross-attention"),),
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM", **_LAYER_NORM, eps="layer_norm_epsilon", positions="learned", gated=False,
        activation="activation_function", kv_heads=_one_if_multi_query,
        needs=(
            ("add_cross_attention", False, "reads an encoder through cross-attention"),
            ("multi_query", True, "(a key-value head for each head) is not taken apart by TransformerBridge"),
        ),
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM", **_LAYER_NORM, eps="layer_norm_epsilon", positions="learned", gated=False,
        activation="activation_function", attention_scale="1", kv_heads="num_attention_heads",
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", **_LAYER_NORM, eps="layer_norm_eps", parallel="use_parallel_residual",
        gated=False, kv_heads="num_attention_heads",
    ),
    "gptj": Family(
        "GPTJForCausalLM", **_LAYER_NORM, **_PARALLEL, eps="layer_norm_epsilon", gated=False,
        activation="activation_function", kv_heads="num_attention_heads",
    ),
    "phi": Family(
        "PhiForCausalLM", **_LAYER_NORM, **_PARALLEL, eps="layer_norm_eps", gated=False,
    ),
    "opt": Family(
        "OPTForCausalLM", **_LAYER_NORM, eps=1e-5, positions="learned", position_offset=2, gated=False,
        activation="activation_function", kv_heads="num_attention_heads",
        needs=(
            ("do_layer_norm_before", True, "puts its norms on the residual stream itself"),
            ("_remove_final_layer_norm", False, "has no final norm"),
        ),
    ),
    "falcon": Family(
        "FalconForCausalLM", **_LAYER_NORM, eps="layer_norm_epsilon", parallel="parallel_attn",
        one_norm="parallel_attn", gated=False, activation="activation", kv_heads=_one_if_multi_query,
        needs=(("new_decoder_architecture", False,
                "(Falcon 40B's block) is computed wrongly by TransformerBridge"),),
    ),
    "bloom": Family(
        "BloomForCausalLM", **_LAYER_NORM, eps="layer_norm_epsilon", positions="alibi", gated=False,
        embedding_norm=True, activation="=gelu_pytorch_tanh", kv_heads="num_attention_heads",
        needs=(("apply_residual_connection_post_layernorm", False,
                "puts its norms on the residual stream itself"),),
    ),
    "mpt": Family(
        "MptForCausalLM", centred=True, eps="layer_norm_epsilon", positions="alibi", gated=False,
        activation="=gelu", kv_heads="num_attention_heads",
    ),
    "stablelm": Family(
        "StableLmForCausalLM", **_LAYER_NORM, eps="layer_norm_eps", parallel="use_parallel_residual",
        one_norm="use_parallel_residual",
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", **_LAYER_NORM, eps="norm_epsilon", gated=False,
    ),
    "nemotron": Family(
        "NemotronForCausalLM", **_LAYER_NORM, gain="1 + weight", eps="norm_eps", gated=False,
    ),
    "cohere": Family(
        "CohereForCausalLM", centred=True, **_PARALLEL, eps="layer_norm_eps", logit_multiplier="logit_scale",
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM", centred=True, **_PARALLEL, eps="layer_norm_eps", logit_multiplier="logit_scale",
    ),
    "olmo": Family("OlmoForCausalLM", centred=True, gain="none", eps=1e-5, needs=(_NO_CLIP,)),
    "olmo2": Family("Olmo2ForCausalLM", norm_before=False, norm_after=True),
    "olmo3": Family("Olmo3ForCausalLM", norm_before=False, norm_after=True),
    "exaone4": Family("Exaone4ForCausalLM", norm_before=False, norm_after=True),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "ministral3": Family("Ministral3ForCausalLM"),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "phi3": Family("Phi3ForCausalLM"),
    "glm": Family("GlmForCausalLM"),
    "glm4": Family("Glm4ForCausalLM", norm_after=True),
    "ernie4_5": Family("Ernie4_5ForCausalLM"),
    "seed_oss": Family("SeedOssForCausalLM"),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM"),
    "arcee": Family("ArceeForCausalLM", gated=False),
    "granite": Family(
        "GraniteForCausalLM", embedding_factor="embedding_multiplier",
        branch_multiplier="residual_multiplier", logit_divisor="logits_scaling",
        attention_scale="attention_multiplier",
    ),
    "gemma": Family("GemmaForCausalLM", **_GEMMA | {"activation": "hidden_act"}),
    "gemma2": Family(
        "Gemma2ForCausalLM", **_GEMMA, norm_after=True, logit_cap="final_logit_softcapping",
        attention_cap="attn_logit_softcapping", attention_scale="query_pre_attn_scalar^-1/2",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", **_GEMMA, norm_after=True, logit_cap="final_logit_softcapping",
        attention_cap="attn_logit_softcapping", attention_scale="query_pre_attn_scalar^-1/2",
    ),
}  # fmt: skip

_RECURRENT = "has linear-attention, state-space or convolution layers: attention has no pattern to freeze"
_EXPERTS = "is a mixture of experts, which the residual view does not cover yet"
_ENCODER = "is an encoder, not a causal language model"
_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert", "deberta", "deberta-v2",
         "modernbert", "camembert", "mpnet", "nomic_bert", "vit", "clip"), _ENCODER),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "rwkv", "jamba", "bamba", "zamba", "zamba2",
         "recurrent_gemma", "qwen3_next", "qwen3_5_text", "lfm2", "lfm2_moe", "granitemoehybrid",
         "nemotron_h", "minimax", "olmo_hybrid", "kimi_linear"), _RECURRENT),
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe", "granitemoeshared",
         "phimoe", "dbrx", "jetmoe", "llama4", "llama4_text", "deepseek_v2", "deepseek_v3", "glm4_moe",
         "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2"), _EXPERTS),
    "gpt_oss": "has attention sinks (pattern rows sum to less than 1) and experts",
    "gemma3n_text": "keeps several streams and per-layer embeddings",
    "gemma3n": "keeps several streams and per-layer embeddings",
    "openai-gpt": "puts its norms on the residual stream itself",
    "ctrl": "has attention whose factors TransformerBridge does not offer",
    "apertus": "has an activation with parameters of its own (xIELU)",
    "xglm": "has positions that are no tensor of the model",
}  # fmt: skip


def read_facts(config: Any, dtype: str, where: object) -> Facts:
    """Facts from a transformers configuration (or anything with its attributes).

    Raises InputError, with the architecture's name and the reason, for a model whose stream is not linear
    or not known.
    """
    model_type = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{where}: {model_type} is an encoder-decoder; a decoder-only model is needed")
    if model_type in _REFUSED:
        raise InputError(f"{where}: {model_type} is refused: it {_REFUSED[model_type]}")
    family = FAMILIES.get(model_type)
    if family is None:
        raise InputError(
            f"{where}: {model_type} is not on the list of architectures whose residual stream is known: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    for key, needed, reason in (*family.needs, _NO_CLIP):
        for part in (config, getattr(config, "attn_config", None)):
            if (value := getattr(part, key, needed)) != needed:
                raise InputError(f"{where}: {model_type} with {key}={value!r} is refused: it {reason}")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise InputError(
            f"{where}: {model_type} with word_embed_proj_dim={config.word_embed_proj_dim} is refused: its "
            f"embeddings are projected into the stream of width {config.hidden_size}"
        )
    if getattr(config, "quantization_config", None):
        raise InputError(f"{where}: its weights are quantised; give the unquantised model, or a GGUF file")
    with library_errors(f"{where}: its configuration lacks a value or holds one that makes no sense"):
        return _facts(family, config, dtype)


def _facts(family: Family, config: Any, dtype: str) -> Facts:
    def fact(value: Any) -> Any:
        return getattr(config, value) if isinstance(value, str) else value

    d_model, n_heads = config.hidden_size, config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or d_model // n_heads
    kv = family.kv_heads
    n_kv_heads = kv(config) if callable(kv) else getattr(config, kv, None) or n_heads
    factor = (
        math.sqrt(d_model) if family.embedding_factor == "sqrt(d_model)" else fact(family.embedding_factor)
    )
    activation = (
        family.activation[1:] if family.activation[0] == "=" else getattr(config, family.activation, None)
    )
    if activation is None:  # Gemma 1 as first published
        activation = config.hidden_act
    positions = family.positions
    if positions == "rotary" and getattr(config, "alibi", False):
        positions = "alibi"
    return Facts(
        architecture=family.architecture,
        model_type=config.model_type,
        n_layers=config.num_hidden_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_mlp=_d_mlp(config),
        d_vocab=config.vocab_size,
        n_ctx=getattr(config, "max_position_embeddings", 0) or 0,
        norm=Norm(family.centred, family.gain, family.norm_bias, float(fact(family.eps))),
        norm_before=family.norm_before,
        norm_after=family.norm_after,
        parallel=bool(fact(family.parallel)),
        one_norm=bool(fact(family.one_norm)),
        embedding_norm=family.embedding_norm,
        positions=positions,
        position_offset=family.position_offset,
        embedding_factor=float(factor),
        branch_multiplier=float(fact(family.branch_multiplier)),
        logit_multiplier=float(fact(family.logit_multiplier)) / float(fact(family.logit_divisor)),
        logit_cap=fact(family.logit_cap) if family.logit_cap else None,
        attention_scale=_attention_scales(family.attention_scale, config, d_head),
        attention_cap=fact(family.attention_cap) if family.attention_cap else None,
        gated=family.gated,
        activation=str(activation),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=dtype,
    )


def _d_mlp(config: Any) -> int:
    for key in ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"):
        width = getattr(config, key, None)
        if width:
            return int(width)
    return getattr(config, "expansion_ratio", 4) * config.hidden_size


def _attention_scales(rule: str, config: Any, d_head: int) -> tuple[float, ...]:
    """The factor on q·k, layer by layer: GPT-2 can divide by the layer's number as well."""
    if rule == "1/sqrt(d_head)":
        scale = d_head**-0.5 if getattr(config, "scale_attn_weights", True) else 1.0
    elif rule == "1":
        scale = 1.0
    elif rule.endswith("^-1/2"):
        scale = getattr(config, rule.removesuffix("^-1/2")) ** -0.5
    else:
        scale = float(getattr(config, rule))
    by_layer = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (layer + 1 if by_layer else 1) for layer in range(config.num_hidden_layers))
