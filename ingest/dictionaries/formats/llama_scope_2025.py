"""Llama Scope's second layout (Language-Model-SAEs, early 2025): `config.json` and `sae_weights.safetensors`.

    encoder.weight (F, d)  encoder.bias (F)  decoder.weight (d, F)  decoder.bias (d)
    log_jumprelu_threshold (F)                        the logarithm of JumpReLU's threshold
    dataset_average_activation_norm.HOOK ()           of the hook read and the hook written

The weights may be bfloat16 beside float32 thresholds. ingest.dictionaries.scope has the formulas.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.found import FolderFormat, Found
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.scope import config_of
from ingest.dictionaries.scope_sae import FILES, Keys, configured, found_sae, holds, keys_in

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_KEYS = Keys(
    encoder="encoder.weight",
    encoder_bias="encoder.bias",
    decoder="decoder.weight",
    decoder_bias="decoder.bias",
    threshold="log_jumprelu_threshold",
    encoder_turned=False,
    decoder_turned=True,
)


def _claims(folder: Path) -> bool:
    return {"encoder.weight", "decoder.weight"} <= keys_in(folder)


def _found(folder: Path, facts: Facts | None, declared: Declared) -> Found:
    fields = configured(folder)
    config = config_of(fields)
    if fields.take("jump_relu_threshold", float, 0.0) > 0 and config.activation == "topk":
        fields.notes.append("jump_relu_threshold is not used: the library keeps the k largest")
    return found_sae(folder, _KEYS, config, fields, facts, declared)


FORMAT = FolderFormat(
    name="llama-scope-2025",
    hub_files=("*config.json", "*sae_weights.safetensors"),
    files=FILES,
    holds=holds,
    found=_found,
    claims=_claims,
)
