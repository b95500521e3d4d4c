"""Tiny random Hugging Face models, one for each architecture and setting that the residual view accepts.

Run as a programme it saves them all with the logits that Hugging Face's eager attention gives, in a process
where no TransformerBridge was ever built (building one replaces the attention of some classes).
"""

import sys
import warnings
from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_PLAIN: dict[str, Any] = _SIZES | _ENDS
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 12}  # n_heads · d_head ≠ d_model
_GPT2: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64} | {
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_FALCON = {
    key: _PLAIN[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
}
_FALCON |= _ENDS

# name -> (model_type, configuration)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-inverse-layer": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "gpt_neo": ("gpt_neo", {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "intermediate_size": 40,
        "max_position_embeddings": 64, "attention_types": [[["global", "local"], 2]], "window_size": 4,
        **_ENDS,
    }),
    "gpt_neox-parallel": ("gpt_neox", _PLAIN | {"rotary_pct": 0.5}),
    "gpt_neox-sequential": ("gpt_neox", _PLAIN | {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "gptj": ("gptj", _GPT2 | {"rotary_dim": 4, "n_inner": 40}),
    "phi": ("phi", _PLAIN | {"partial_rotary_factor": 0.5}),
    "opt": ("opt", {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 1, "bos_token_id": 0,
    }),
    "falcon-parallel": ("falcon", _FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon-sequential": ("falcon", _FALCON | {
        "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True,
    }),
    "bloom": ("bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": ("mpt", {"vocab_size": 61, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "stablelm-sequential": ("stablelm", _GROUPED),
    "stablelm-parallel": ("stablelm", _GROUPED | {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm-qk-norm": ("stablelm", _GROUPED | {"qk_layernorm": True}),
    "starcoder2": ("starcoder2", _GROUPED),
    "nemotron": ("nemotron", _WIDE),
    "cohere": ("cohere", _GROUPED | {"logit_scale": 0.3}),
    "cohere-qk-norm": ("cohere", _GROUPED | {"use_qk_norm": True}),
    "cohere2": ("cohere2", _GROUPED | {"logit_scale": 0.3, "sliding_window": 4}),
    "olmo": ("olmo", _GROUPED),
    "olmo2": ("olmo2", _GROUPED),
    "olmo3": ("olmo3", _GROUPED | {"sliding_window": 4}),
    "exaone4": ("exaone4", _GROUPED | {"sliding_window": 4, "sliding_window_pattern": 2}),
    "llama": ("llama", _GROUPED),
    "llama-biases": ("llama", _WIDE | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", _GROUPED | {"tie_word_embeddings": True}),
    "mistral": ("mistral", _WIDE | {"sliding_window": 4}),
    "ministral3": ("ministral3", _WIDE),
    "smollm3": ("smollm3", _GROUPED),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", _WIDE),
    "phi3": ("phi3", _GROUPED),
    "glm": ("glm", _WIDE),
    "glm4": ("glm4", _WIDE),
    "ernie4_5": ("ernie4_5", _WIDE),
    "seed_oss": ("seed_oss", _WIDE),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _WIDE),
    "arcee": ("arcee", _WIDE),
    "granite": ("granite", _GROUPED | {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    }),
    "gemma": ("gemma", _WIDE),
    "gemma2": ("gemma2", _WIDE | {
        "query_pre_attn_scalar": 9, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0,
        "sliding_window": 4,
    }),
    "gemma3": ("gemma3_text", _WIDE | {"query_pre_attn_scalar": 9, "sliding_window": 4}),
}  # fmt: skip


def tiny_model(name: str, **changes: Any) -> Any:
    """The model in eval mode. Gains and biases are random too: trivial ones would hide a wrong algebra."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = TINY[name]
    config = AutoConfig.for_model(model_type, **values | changes)
    torch.manual_seed(sorted(TINY).index(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in key:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter *= 8
    return model


def tokens(n: int = 9) -> Any:
    import torch

    return torch.tensor([(5 + 17 * at) % 61 for at in range(n)])


def _save_all(folder: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logits = {}
    for name in TINY:
        model = tiny_model(name)
        with torch.no_grad():
            logits[name] = model(tokens()[None]).logits[0].contiguous()
        model.save_pretrained(folder / name)
    save_file(logits, folder / "logits.safetensors")


if __name__ == "__main__":
    _save_all(Path(sys.argv[1]))
