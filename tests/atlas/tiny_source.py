"""What a tiny build reads: a random Llama, random transcoders, specs whose plans have steps of every kind."""

from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

__all__ = ["HEADER", "LATENTS", "LAYERS", "WIDTH", "write_model", "write_source", "write_transcoders"]

LAYERS, WIDTH, LATENTS, NEURONS, TOKENS = 3, 32, 20, 24, 50

HEADER = """atlas: 1
models: {m: {path: model}}
dictionaries: {n: {model: m, format: neurons}, t: {model: m, path: transcoders}}
"""


def write_model(folder: Path) -> Path:
    """A Llama with grouped-query heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=NEURONS, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_transcoders(folder: Path, layers: int = LAYERS, width: int = WIDTH) -> Path:
    """One for each layer, in circuit-tracer's layout."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for layer in range(layers):
        encoder, decoder = rng.standard_normal((2, LATENTS, width))
        tensors = {"W_enc": encoder, "W_dec": decoder, "b_enc": np.zeros(LATENTS), "b_dec": np.zeros(width)}
        path = folder / f"layer_{layer}.safetensors"
        save_file({name: values.astype(np.float32) for name, values in tensors.items()}, path)
    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out"}
    (folder / "config.yaml").write_text(yaml.safe_dump(hooks))
    return folder


def write_source(folder: Path) -> Path:
    """Model, transcoders and a spec, `spec.yaml`; `before.yaml` asks for other edges of the same."""
    write_model(folder / "model")
    write_transcoders(folder / "transcoders")
    tokens = "  - {types: [EMBEDS, PROMOTES], keep: {top: 3}}\n"
    keep = "{any: [{z: 2}, {top: 2, per: target}, {top: 1, per: target×head}, {top: 1, per: source}]}"
    edges = f"edges:\n  - {{types: [DIRECT, VIA_HEAD], keep: {keep}}}\n{tokens}"
    (folder / "spec.yaml").write_text(HEADER + edges, encoding="utf-8")
    few = f"edges:\n  - {{types: [DIRECT, VIA_HEAD], keep: {{top: 1, per: source}}}}\n{tokens}"
    (folder / "before.yaml").write_text(HEADER + few, encoding="utf-8")
    return folder
