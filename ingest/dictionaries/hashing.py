"""Provenance: the hash of what a dictionary is and means on a model, whatever file, type or name it came
under."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ingest.dictionaries.types import Dictionary, Gated, JumpReLU

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["derived_hash", "dictionary_hash", "set_hash"]

_VERSION = 1  # of the canonical form below


def dictionary_hash(dictionary: Dictionary, model_hash: str) -> str:
    """sha256 (hex) of the float32 tensors and all that decides what they compute: layer, sites, spaces, gate.

    The model's hash is part of it: the same file on another model has other reading vectors and so other
    edges. The set's name and kind, and the type on disk, are not.
    """
    tensors: dict[str, Tensor | None] = {
        "b_in": dictionary.b_in,
        "W_skip": dictionary.W_skip,
        "decoder_norm_in_gate": dictionary.decoder_norm_in_gate,
    }
    for encoder in dictionary.encoders:
        tensors[f"W_enc.{encoder.reading}"] = encoder.W_enc
        tensors[f"b_enc.{encoder.reading}"] = encoder.b_enc
    for index, write in enumerate(dictionary.writes):
        tensors[f"W_dec.{index}"] = write.W_dec
        tensors[f"b_out.{index}"] = write.b_out
    if isinstance(dictionary.gate, JumpReLU):
        tensors["threshold"] = dictionary.gate.threshold
    elif isinstance(dictionary.gate, Gated):
        tensors |= {"gate.scale": dictionary.gate.scale, "b_gate": dictionary.gate.b_gate}
    present = {name: tensor for name, tensor in sorted(tensors.items()) if tensor is not None}
    digest = _digest(
        {
            "model": model_hash,
            "layer": dictionary.layer,
            "read": [dictionary.read.site, dictionary.read.space],
            "writes": [[write.layer, write.site, write.at] for write in dictionary.writes],
            "gate": _scalars(dictionary.gate),
            "input_norm": _scalars(dictionary.input_norm),
            "tensors": {name: list(tensor.shape) for name, tensor in present.items()},
        }
    )
    for tensor in present.values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def derived_hash(model_hash: str, what: str, layer: int) -> str:
    """The hash of a dictionary that is wholly determined by the model, such as its own neurons: no tensor is
    read."""
    return _digest({"model": model_hash, "derived": what, "layer": layer}).hexdigest()


def set_hash(hashes: dict[int, str]) -> str:
    """The hash of a set: that of its dictionaries by layer."""
    return _digest({"set": {str(layer): digest for layer, digest in sorted(hashes.items())}}).hexdigest()


def _digest(meaning: dict[str, Any]) -> hashlib._Hash:
    text = json.dumps({"version": _VERSION, **meaning}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\0")


def _scalars(value: object) -> Any:
    """Class name and plain fields; tensor fields are hashed as tensors."""
    if value is None:
        return None
    fields = {
        name: field for name, field in vars(value).items() if isinstance(field, bool | int | float | str)
    }
    return [type(value).__name__, fields]
