"""Llama Scope's first layout (Language-Model-SAEs, 2024): hyperparams.json, checkpoints/final.safetensors.

    encoder.weight (F, d)  encoder.bias (F)  decoder.weight (d, F)  decoder.bias (d)

The scales are numbers of hyperparams.json, and so is one `jump_relu_threshold` for all latents. That
threshold is compared after the library has loaded the weights, which means folded them, in this order:

    b_enc / s_in,  b_dec / s_out,  W_dec s_in / s_out        s = sqrt(d) / average norm, `in` and `out`
    W_enc n,  b_enc n,  W_dec / n                            n = |W_dec|, with sparsity_include_decoder_norm
    pre = (x - b_dec) @ W_enc + b_enc             the folded b_dec, with apply_decoder_bias_to_pre_encoder
    a = pre where pre > jump_relu_threshold, or the k largest, or max(pre, 0)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.configs import Fields, read_json
from ingest.dictionaries.found import FolderFormat, Found
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.scope import Config, Scale, config_of
from ingest.dictionaries.scope_sae import Folded, Keys, Weights, found_sae, keys_in, weights_of
from ingest.dictionaries.types import Gate, ReLU, ScalarThreshold, TopK
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_CONFIG = "hyperparams.json"
_KEYS = Keys(
    encoder="encoder.weight",
    encoder_bias="encoder.bias",
    decoder="decoder.weight",
    decoder_bias="decoder.bias",
    threshold=None,
    encoder_turned=False,
    decoder_turned=True,
)
_TRAINING = (
    "seed", "bias_init_method", "decoder_exactly_fixed_norm", "decoder_exactly_unit_norm",
    "init_decoder_norm", "init_encoder_norm", "init_encoder_with_decoder_transpose", "lp", "l1_coefficient",
    "l1_coefficient_warmup_steps", "initial_k", "k_warmup_steps", "use_batch_norm_mse", "use_ghost_grads",
    "remove_gradient_parallel_to_decoder_directions", "tp_size", "ddp_size", "exp_name", "exp_result_path",
)  # fmt: skip


def _holds(folder: Path) -> bool:
    return (folder / _CONFIG).is_file() and weights_of(folder) is not None


def _claims(folder: Path) -> bool:
    keys = keys_in(folder)
    return not keys or {"encoder.weight", "decoder.weight"} <= keys


def _found(folder: Path, facts: Facts | None, declared: Declared) -> Found:
    fields = Fields(folder / _CONFIG, read_json(folder / _CONFIG))
    config = config_of(fields, centred=True, norms=("none",))
    latents = fields.take("d_sae", int, config.latents)
    if latents < max(1, config.k if config.activation == "topk" else 1):
        raise InputError(f"{fields.place('d_sae')}: expected latents, and at least top_k, found {latents}")
    threshold = fields.take("jump_relu_threshold", float, 0.0)
    if config.activation == "topk" and threshold > 0:
        fields.notes.append("jump_relu_threshold is not used: the library keeps the k largest")
    norms = fields.section("dataset_average_activation_norm")
    norms.ignore("in", "out")  # read where they apply
    fields.ignore(*_TRAINING)
    return found_sae(
        folder,
        _KEYS,
        replace(config, latents=latents),
        fields,
        facts,
        declared,
        folding=partial(_fold, threshold=threshold),
        activation=f"JumpReLU {threshold:g}" if config.activation == "jumprelu" else "",
        norms=norms,
    )


def _fold(weights: Weights, config: Config, scale: Scale, *, threshold: float) -> Folded:
    import torch

    weights.b_enc.div_(scale.into)
    weights.W_dec.mul_(scale.into / scale.out)
    if weights.b_dec is not None:
        weights.b_dec.div_(scale.out)
    if config.decoder_norm:
        norm = torch.linalg.vector_norm(weights.W_dec, dim=1)
        weights.W_enc.mul_(norm[:, None])
        weights.b_enc.mul_(norm)
        weights.W_dec.div_(torch.where(norm > 0, norm, 1.0)[:, None])  # a latent without a decoder stays at 0
    gates: dict[str, Gate] = {
        "relu": ReLU(),
        "jumprelu": ScalarThreshold(threshold, relu_too=False),
        "topk": TopK(config.k or 1),
    }
    return Folded(weights, gates[config.activation], None, weights.b_dec if config.centred else None)


FORMAT = FolderFormat(
    name="llama-scope-2024",
    hub_files=("*hyperparams.json", "*checkpoints/final.safetensors", "*lm_config.json"),
    files=(_CONFIG, "checkpoints/final.safetensors"),
    holds=_holds,
    found=_found,
    claims=_claims,
)
