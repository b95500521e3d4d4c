"""What each shape of residual stream computes, as plain matrices: a reference that knows nothing of
`ingest.models`.

From a checkpoint's tensors by the names Hugging Face gives them, in float64. The linear part of a norm is a
matrix, x -> x N: an encoder row e behind it reads the stream along e Nᵀ, and a branch's output d that it
stands behind joins as d N.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

LAYERS, D, HEADS = 3, 32, 4  # of tests.ingest.tiny_models
EYE = np.eye(D)
CENTRING = EYE - 1 / D

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Block:
    """One layer: the norms' matrices, weights as the modules have them, and what their outputs pass before
    they join the stream."""

    attention_norm: np.ndarray  # (d, d)
    mlp_norm: np.ndarray  # (d, d)
    W_V: np.ndarray  # (key-value heads, d, d_head)
    W_O: np.ndarray  # (heads, d_head, d)
    W_in: dict[str, np.ndarray]  # reading -> (d_mlp, d)
    W_out: np.ndarray  # (d_mlp, d)
    behind_attention: np.ndarray = field(default_factory=lambda: EYE)
    behind_mlp: np.ndarray = field(default_factory=lambda: EYE)


@dataclass(frozen=True)
class Stream:
    """A model: tokens as they join, the unembedding's rows, the final norm's matrix, the layers."""

    tokens: np.ndarray  # (vocabulary, d)
    logits: np.ndarray  # (vocabulary, d)
    final_norm: np.ndarray  # (d, d)
    blocks: list[Block]
    parallel: bool = False


def rms(gain: np.ndarray) -> np.ndarray:
    return np.diag(gain)


def layer_norm(gain: np.ndarray) -> np.ndarray:
    return CENTRING @ np.diag(gain)


def values(linear: np.ndarray, kv: int) -> np.ndarray:
    """(kv · d_head, d) of a Linear -> (kv, d, d_head)."""
    return linear.reshape(kv, -1, D).transpose(0, 2, 1)


def outputs(linear: np.ndarray) -> np.ndarray:
    """(d, heads · d_head) of a Linear -> (heads, d_head, d)."""
    return linear.T.reshape(HEADS, -1, D)


def gated(h: Tensors) -> dict[str, np.ndarray]:
    return {"gate": h["mlp.gate_proj"], "up": h["mlp.up_proj"]}


def layers(t: Tensors, prefix: str) -> list[Tensors]:
    """Each layer's weights by their names within it."""
    return [
        {k.removeprefix(f"{prefix}.{n}."): v for k, v in t.items() if k.startswith(f"{prefix}.{n}.")}
        for n in range(LAYERS)
    ]


def gpt2(t: Tensors) -> Stream:
    blocks = [
        Block(
            layer_norm(h["ln_1"]),
            layer_norm(h["ln_2"]),
            # Conv1D keeps (d_in, d_out); query, key and value lie side by side.
            h["attn.c_attn"][:, 2 * D :].reshape(D, HEADS, -1).transpose(1, 0, 2),
            h["attn.c_proj"].reshape(HEADS, -1, D),
            {"in": h["mlp.c_fc"].T},
            h["mlp.c_proj"],
        )
        for h in layers(t, "transformer.h")
    ]
    return Stream(t["transformer.wte"], t["transformer.wte"], layer_norm(t["transformer.ln_f"]), blocks)


def neox(t: Tensors, parallel: bool) -> Stream:
    blocks = [
        Block(
            layer_norm(h["input_layernorm"]),
            layer_norm(h["post_attention_layernorm"]),
            # Query, key and value of one head, then of the next.
            h["attention.query_key_value"].reshape(HEADS, 3, -1, D)[:, 2].transpose(0, 2, 1),
            outputs(h["attention.dense"]),
            {"in": h["mlp.dense_h_to_4h"]},
            h["mlp.dense_4h_to_h"].T,
        )
        for h in layers(t, "gpt_neox.layers")
    ]
    final = layer_norm(t["gpt_neox.final_layer_norm"])
    return Stream(t["gpt_neox.embed_in"], t["embed_out"], final, blocks, parallel)


def gptj(t: Tensors) -> Stream:
    blocks = [
        Block(
            layer_norm(h["ln_1"]),
            layer_norm(h["ln_1"]),
            values(h["attn.v_proj"], HEADS),
            outputs(h["attn.out_proj"]),
            {"in": h["mlp.fc_in"]},
            h["mlp.fc_out"].T,
        )
        for h in layers(t, "transformer.h")
    ]
    return Stream(
        t["transformer.wte"], t["lm_head"], layer_norm(t["transformer.ln_f"]), blocks, parallel=True
    )


def opt(t: Tensors) -> Stream:
    blocks = [
        Block(
            layer_norm(h["self_attn_layer_norm"]),
            layer_norm(h["final_layer_norm"]),
            values(h["self_attn.v_proj"], HEADS),
            outputs(h["self_attn.out_proj"]),
            {"in": h["fc1"]},
            h["fc2"].T,
        )
        for h in layers(t, "model.decoder.layers")
    ]
    tokens = t["model.decoder.embed_tokens"]
    return Stream(tokens, tokens, layer_norm(t["model.decoder.final_layer_norm"]), blocks)


def gemma2(t: Tensors) -> Stream:
    blocks = [
        Block(
            rms(1 + h["input_layernorm"]),
            rms(1 + h["pre_feedforward_layernorm"]),
            values(h["self_attn.v_proj"], 2),
            outputs(h["self_attn.o_proj"]),
            gated(h),
            h["mlp.down_proj"].T,
            behind_attention=rms(1 + h["post_attention_layernorm"]),
            behind_mlp=rms(1 + h["post_feedforward_layernorm"]),
        )
        for h in layers(t, "model.layers")
    ]
    tokens = t["model.embed_tokens"]
    # The model keeps √d as a float32 number. PROMOTES speaks of the logit before its cap.
    return Stream(tokens * float(np.float32(D**0.5)), tokens, rms(1 + t["model.norm"]), blocks)


def olmo2(t: Tensors) -> Stream:
    blocks = [
        Block(
            EYE,
            EYE,
            values(h["self_attn.v_proj"], 2),
            outputs(h["self_attn.o_proj"]),
            gated(h),
            h["mlp.down_proj"].T,
            behind_attention=rms(h["post_attention_layernorm"]),
            behind_mlp=rms(h["post_feedforward_layernorm"]),
        )
        for h in layers(t, "model.layers")
    ]
    return Stream(t["model.embed_tokens"], t["lm_head"], rms(t["model.norm"]), blocks)


def llama_like(t: Tensors, embedding: float = 1, branch: float = 1, logit: float = 1) -> Stream:
    blocks = [
        Block(
            rms(h["input_layernorm"]),
            rms(h["post_attention_layernorm"]),
            values(h["self_attn.v_proj"], 2),
            outputs(h["self_attn.o_proj"]),
            gated(h),
            h["mlp.down_proj"].T,
            behind_attention=branch * EYE,
            behind_mlp=branch * EYE,
        )
        for h in layers(t, "model.layers")
    ]
    return Stream(t["model.embed_tokens"] * embedding, t["lm_head"] * logit, rms(t["model.norm"]), blocks)


def cohere(t: Tensors) -> Stream:
    blocks = [
        Block(
            layer_norm(h["input_layernorm"]),
            layer_norm(h["input_layernorm"]),
            values(h["self_attn.v_proj"], 2),
            outputs(h["self_attn.o_proj"]),
            gated(h),
            h["mlp.down_proj"].T,
        )
        for h in layers(t, "model.layers")
    ]
    tokens = t["model.embed_tokens"]
    return Stream(tokens, tokens * 0.3, layer_norm(t["model.norm"]), blocks, parallel=True)


# name in tests.ingest.tiny_models (its settings hold the multipliers written here) -> the algebra
STREAMS: dict[str, Callable[[Tensors], Stream]] = {
    "gpt2": gpt2,
    "gpt_neox-parallel": lambda t: neox(t, parallel=True),
    "gpt_neox-sequential": lambda t: neox(t, parallel=False),
    "gptj": gptj,
    "opt": opt,
    "gemma2": gemma2,
    "olmo2": olmo2,
    "granite": lambda t: llama_like(t, embedding=3.0, branch=0.4, logit=0.5),
    "cohere": cohere,
    "qwen3": llama_like,
}


def stream_of(name: str, folder: Path) -> Stream:
    """The stream of a saved model of tests.ingest.tiny_models. Biases are no part of any weight."""
    tensors = load_file(folder / "model.safetensors")
    weights = {k.removesuffix(".weight"): v.astype(np.float64) for k, v in tensors.items()}
    return STREAMS[name]({k: v for k, v in weights.items() if not k.endswith(".bias")})
