"""Llamascopium (Language-Model-SAEs since the middle of 2025): `config.json` and `sae_weights.safetensors`.

    W_E (d, F)  b_E (F)  W_D (F, d)  b_D (d)
    activation_function.log_jumprelu_threshold (F)    the logarithm of JumpReLU's threshold
    dataset_average_activation_norm.HOOK ()           of the hook read and the hook written

Both norms stand in the file whether they apply or not, arbitrary numbers where they were never set.
ingest.dictionaries.scope has the formulas; cross-layer transcoders are llamascopium-clt.
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
    encoder="W_E",
    encoder_bias="b_E",
    decoder="W_D",
    decoder_bias="b_D",
    threshold="activation_function.log_jumprelu_threshold",
    encoder_turned=True,
    decoder_turned=False,
)


def _claims(folder: Path) -> bool:
    """W_E, or what other kinds of the library's dictionaries have; weights in another container, or that
    cannot be read, are claimed too, to be reported."""
    keys = keys_in(folder)
    return not keys or ("W_E" in keys and "W_D.0" not in keys) or {"W_Q", "W_K"} <= keys


def _found(folder: Path, facts: Facts | None, declared: Declared) -> Found:
    fields = configured(folder)
    fields.ignore("jump_relu_threshold")  # of the layout before; here the weights hold it
    return found_sae(folder, _KEYS, config_of(fields), fields, facts, declared)


FORMAT = FolderFormat(
    name="llamascopium",
    hub_files=("*config.json", "*sae_weights.safetensors"),
    files=FILES,
    holds=holds,
    found=_found,
    claims=_claims,
)
