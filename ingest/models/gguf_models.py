"""What a GGUF file's metadata and tensors mean to Hugging Face: its configuration, names, and the changes
llama.cpp makes to some tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingest.errors import InputError
from ingest.models.gguf_file import GGUFFile

__all__ = ["gguf_config", "gguf_names", "gguf_tensor"]

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Read, and without effect on what the model computes; or covered by another key.
_WITHOUT_EFFECT = {
    "vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.type", "expert_count",
    "attention.causal", "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    model_type: str
    permuted: bool = False  # rows of Q and K
    gain_offset: float = 0.0  # added to the gains by llama.cpp
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# The largest Gemmas divide scores by √(d_model / n_heads), not by √d_head; the file does not say.
_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3_text", 62)}

_KINDS = {
    "llama": _Kind("llama", permuted=True),
    "qwen2": _Kind("qwen2"),
    "qwen3": _Kind("qwen3"),
    "olmo2": _Kind("olmo2"),
    "granite": _Kind(
        "granite", permuted=True,
        keys={"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
              "logit_scale": "logits_scaling", "attention.scale": "attention_multiplier"},
    ),
    "gemma": _Kind("gemma", gain_offset=1.0),
    "gemma2": _Kind("gemma2", gain_offset=1.0, keys=_WINDOW | _CAPS),
    "gemma3": _Kind("gemma3_text", gain_offset=1.0, keys=_WINDOW | _CAPS),
}  # fmt: skip


def _kind(file: GGUFFile) -> _Kind:
    architecture = file.metadata.get("general.architecture")
    if architecture not in _KINDS:
        raise InputError(
            f"{file.path}: GGUF architecture {architecture!r} is not read (known: {', '.join(sorted(_KINDS))}"
            f"); give the model as a Hugging Face directory"
        )
    return _KINDS[architecture]


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The keys of Hugging Face's configuration that the metadata gives, `model_type` among them.

    Raises InputError for an architecture that is not read, a missing key, or one whose effect is unknown.
    """
    kind, metadata = _kind(file), file.metadata
    prefix = metadata["general.architecture"] + "."
    keys = {**_KEYS, **kind.keys}
    config: dict[str, Any] = {"model_type": kind.model_type, **kind.defaults}
    for name, value in metadata.items():
        if not name.startswith(prefix) or (key := name.removeprefix(prefix)) in _WITHOUT_EFFECT - keys.keys():
            continue
        if key not in keys:
            raise InputError(f"{file.path}: {name}={value!r}: the effect of this key is not known")
        config[keys[key]] = value
    if metadata.get(prefix + "rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.shapes:
        raise InputError(
            f"{file.path}: scaled rotary positions are not read from GGUF; give the Hugging Face directory"
        )
    if metadata.get(prefix + "expert_count", 0):
        raise InputError(f"{file.path}: is a mixture of experts, which the residual view does not cover yet")
    for gguf_key, key in _KEYS.items():
        if gguf_key.startswith(("block", "embedding", "feed", "attention.head_count")) and key not in config:
            raise InputError(f"{file.path}: the metadata lacks {prefix}{gguf_key}")
    d_head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if (rotary := metadata.get(prefix + "rope.dimension_count", d_head)) != d_head:
        raise InputError(f"{file.path}: {rotary} rotary dimensions of {d_head} are not read from GGUF")
    config["vocab_size"] = file.shapes.get("token_embd.weight", (0,))[0]
    config["tie_word_embeddings"] = "output.weight" not in file.shapes
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta", 10000.0)}
    if "attn_q.bias" in {name.split(".", 2)[-1] for name in file.names()} and kind.model_type == "llama":
        config["attention_bias"] = True
    if kind.model_type == "gemma3_text":
        # Two rotary bases: the file has the global layers' one.
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    if kind.model_type in ("gemma2", "gemma3_text"):
        largest = (kind.model_type, config["num_hidden_layers"]) in _LARGEST_GEMMAS
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if largest else d_head
    for token in ("bos", "eos", "padding", "unknown"):
        if (number := metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            config[{"padding": "pad", "unknown": "unk"}.get(token, token) + "_token_id"] = number
    return config


def gguf_names(file: GGUFFile, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Hugging Face name -> the file's name, for every tensor of the file.

    A tensor of the file that no name of the model maps to keeps its own name on both sides, so that the
    comparison with the model sees it as left over.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = file.metadata["general.architecture"]
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(arch, file.metadata[f"{architecture}.block_count"])
    names = {}
    for name in wanted:
        stem, _, suffix = name.rpartition(".")
        found = table.get_name(stem)
        if found is not None and f"{found}.{suffix}" in file.shapes:
            names[name] = f"{found}.{suffix}"
    if len(set(names.values())) < len(names):
        raise InputError(f"{file.path}: two tensors of the model map to one of the file")
    return names | {name: name for name in file.shapes.keys() - names.values()}


def gguf_tensor(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor of the file as Hugging Face has it, float32."""
    kind, values = _kind(file), file.tensor(name)
    prefix = file.metadata["general.architecture"] + "."
    if kind.permuted:
        heads = file.metadata[prefix + "attention.head_count"]
        if ".attn_k." in name:
            heads = file.metadata.get(prefix + "attention.head_count_kv", heads)
        if ".attn_q." in name or ".attn_k." in name:
            if len(values) % (2 * heads):
                raise InputError(
                    f"{file.path}: tensor {name} has {len(values)} rows, which are no {heads} heads"
                )
            values = _unpermute(values, heads)
    if kind.gain_offset and name.endswith("norm.weight"):
        values = values - np.float32(kind.gain_offset)
    return values


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates adjacent pairs, Hugging Face halves: (h, d_head/2, 2, …) -> (h, 2, d_head/2, …)."""
    split = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
