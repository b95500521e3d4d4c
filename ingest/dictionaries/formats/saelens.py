"""SAELens: a folder with `cfg.json` and `sae_weights.safetensors`, of version 6 or before.

    W_enc (d_in, F)  b_enc (F)  W_dec (F, d_out)  b_dec (d_out)       x' = norm(x) - b_dec, or norm(x)
    threshold (F)                     JumpReLU: max(pre, 0) where pre > threshold
    b_gate, r_mag, b_mag (F)          gated: W_enc and b_gate decide, W_enc * exp(r_mag) and b_mag measure
    W_skip (d_out, d_in)              a skip transcoder adds x @ W_skip.T of the raw input
    scaling_factor (F)                activations times this, in the decoder alone

An SAE undoes the norm of its input on its output, a transcoder never; b_dec is subtracted behind the norm.
`rescale_acts_by_decoder_norm` reports activations times the decoder's norms and selects by them: folded into
the encoder, with decoder rows of length one. The weights of a dictionary that was made where
`center_writing_weights` had taken the mean out of the stream are made to read the stream as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.found import FolderFormat, Found, check_declared, check_width
from ingest.dictionaries.hooks import ReadHook, WriteHook, mlp_input, read_hook, write_hook
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.saelens_config import Config, read_config
from ingest.dictionaries.tensor_files import (
    Entry,
    check_finite,
    check_keys,
    check_shape,
    read_header,
    read_tensors,
)
from ingest.dictionaries.types import (
    Dictionary,
    Encoder,
    Gate,
    Gated,
    InputNorm,
    JumpReLU,
    LayerNormInput,
    ReLU,
    RescaledInput,
    Space,
    TopK,
    Write,
)
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.models import Facts

__all__ = ["FORMAT"]

_CONFIG, _WEIGHTS = "cfg.json", "sae_weights.safetensors"
_FACTORS = ("scaling_factor", "finetuning_scaling_factor")  # of the file, and of the library's own attribute
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _holds(folder: Path) -> bool:
    return (folder / _CONFIG).is_file() and (folder / _WEIGHTS).is_file()


@dataclass(frozen=True)
class _Place:
    """Where a dictionary stands, on this model."""

    read: ReadHook
    write: WriteHook
    layer: int
    centred: bool  # it was made on a stream of mean zero, where this model's is not


def _found(folder: Path, facts: Facts | None, declared: Declared) -> Found:
    path, config = folder / _WEIGHTS, read_config(folder / _CONFIG)
    place = _place(config, facts, declared)
    header = read_header(path)
    factor = _check(path, header, config)
    check_width(f"{path}: W_enc", config.d_in, place.read.read.site, facts)
    check_width(f"{path}: W_dec", config.d_out, place.write.site, facts)
    written = place.layer if place.write.layer is None else place.write.layer
    dtypes = frozenset(entry.dtype for entry in header.values())
    notes = [*config.notes, *(note for note in (place.read.note, place.write.note) if note)]
    if config.dtype in _DTYPES and dtypes != {_DTYPES[config.dtype]}:
        notes.append(
            f"{_CONFIG} says {config.dtype}, the tensors are {', '.join(sorted(dtypes))}: they decide"
        )
    return Found(
        where=folder,
        kind="transcoder" if config.transcoder else "sae",
        layer=place.layer,
        size=config.d_sae,
        read=place.read.read,
        writes=((written, place.write.site, place.write.at),),
        activation=_activation(config),
        bytes=4 * sum(entry.count for entry in header.values()),
        dtypes=dtypes,
        widths=(config.d_in, config.d_out),
        load=partial(_load, path, header, config, place, written, factor),
        l0=config.l0,
        provenance=config.origin.provenance,
        notes=tuple(notes),
        folded=config.origin.centred,
    )


# --- where it stands ----------------------------------------------------------------------------------------


def _place(config: Config, facts: Facts | None, declared: Declared) -> _Place:
    origin = config.origin
    hook = origin.hook or declared.reads
    if hook is None:
        raise InputError(f"{origin.hook_key}: is missing, and so is reads; say what it reads with reads")
    said = origin.hook_key if origin.hook else "reads"
    read = read_hook(hook, facts, said, folded=origin.plain)
    if config.transcoder:
        read = dataclasses.replace(read, read=mlp_input(read.read))
        out, told = origin.hook_out or declared.writes, "hook_name_out"
        if out is None:
            raise InputError(f"{config.path}: hook_name_out: is missing; say what it writes with writes")
        write = write_hook(out, facts, f"{config.path}: {told}" if origin.hook_out else "writes")
    else:
        write = write_hook(hook, facts, said)
    layer = _layer(config, read, declared)
    read = dataclasses.replace(read, layer=layer)
    write = dataclasses.replace(write, layer=_layer_written(config, layer, write))
    if origin.hook is not None:
        check_declared(declared, read, write, facts, said, folded=origin.plain)
    if origin.folded_values and read.read.site == "attn.z":
        raise InputError(
            f"{config.path}: made where fold_value_biases had taken the values' biases out of {hook}, which"
            " this model has there; not supported"
        )
    raw = read.read.space in (Space.RAW, Space.BRANCH_OUTPUT)
    centred = origin.centred and raw and facts is not None and facts.norm.centred
    if centred and config.norm == "constant_norm_rescale":
        raise InputError(
            f"{config.path}: rescales the norm of a stream whose mean center_writing_weights took out; not"
            " supported"
        )
    return _Place(read, write, layer, centred)


def _layer(config: Config, read: ReadHook, declared: Declared) -> int:
    told = {
        "the hook's name": read.layer, f"{_CONFIG}: hook_layer": config.origin.layer, "layer": declared.layer
    }  # fmt: skip
    said = {where: layer for where, layer in told.items() if layer is not None}
    if not said:
        raise InputError(f"{config.path}: says no layer; say it with layer")
    if len(set(said.values())) > 1 and read.read.site != "embed":
        listed = ", ".join(f"{where} says {layer}" for where, layer in said.items())
        raise InputError(f"{config.path}: of which layer? {listed}")
    return next(iter(said.values()))


def _layer_written(config: Config, layer: int, write: WriteHook) -> int:
    beside = config.origin.layer_out
    if write.layer is not None and beside not in (None, write.layer) and write.site != "embed":
        raise InputError(
            f"{config.path}: hook_layer_out: expected {write.layer}, as the hook's name says, found {beside}"
        )
    written = next((one for one in (write.layer, beside) if one is not None), layer)
    if written < layer:
        raise InputError(
            f"{config.path}: reads layer {layer} and writes layer {written}; expected none before it"
        )
    return written


# --- the weights --------------------------------------------------------------------------------------------


def _check(path: Path, header: Mapping[str, Entry], config: Config) -> str | None:
    """The key of the finetuning factor, where there is one. Raises InputError for tensors missing, left over
    or of another shape."""
    d_in, d_out, size = config.d_in, config.d_out, config.d_sae
    told = f"{_CONFIG} says d_in {d_in}, d_sae {size}" + (f", d_out {d_out}" if config.transcoder else "")
    shapes: dict[str, tuple[int, ...]] = {"W_enc": (d_in, size), "W_dec": (size, d_out), "b_dec": (d_out,)}
    if config.architecture == "gated":
        shapes |= dict.fromkeys(("b_gate", "r_mag", "b_mag"), (size,))
    else:
        shapes["b_enc"] = (size,)
    if "jumprelu" in config.architecture:
        shapes["threshold"] = (size,)
    if "skip" in config.architecture:
        shapes["W_skip"] = (d_out, d_in)
    factor = None
    if config.finetuned:
        factor = next((key for key in _FACTORS if key in header), _FACTORS[0])
        shapes[factor] = (size,)
    check_keys(path, header, set(shapes))
    for key, shape in shapes.items():
        check_shape(path, key, header[key], shape, told)
    return factor


def _load(
    path: Path, header: Mapping[str, Entry], config: Config, place: _Place, written: int, factor: str | None
) -> Dictionary:
    tensors = read_tensors(path, header)
    if "r_mag" in tensors:
        check_finite(path, "exp(-r_mag)", (-tensors["r_mag"]).exp(), "F32")
    W_enc, W_dec, b_dec = tensors["W_enc"].T, tensors["W_dec"], tensors["b_dec"]  # (F, d_in), (F, d_out)
    gate, W_enc, b_enc = _gate(config, tensors, W_enc)
    if config.scales:
        norm = W_dec.norm(dim=-1)
        W_enc, b_enc = W_enc * norm[:, None], b_enc * norm
        W_dec = W_dec / norm.where(norm > 0, 1)[:, None]
    if factor is not None:
        W_dec = W_dec * tensors[factor][:, None]
    if place.centred and config.norm == "none":
        gate, W_enc, b_enc = _centred(gate, W_enc, b_enc, b_dec if config.subtracts else None)
    for what, tensor in (("the encoder", W_enc), ("the encoder's bias", b_enc), ("the decoder", W_dec)):
        check_finite(path, f"{what} with its factors folded in", tensor, "F32")
    skip = tensors.get("W_skip")
    return Dictionary(
        set="",
        kind="transcoder" if config.transcoder else "sae",
        layer=place.layer,
        read=place.read.read,
        encoders=(Encoder("in", W_enc.contiguous(), b_enc),),
        writes=(Write(written, place.write.site, place.write.at, W_dec.contiguous(), b_dec),),
        gate=gate,
        b_in=b_dec if config.subtracts else None,
        W_skip=None if skip is None else skip.T.contiguous(),
        input_norm=_input_norm(config),
    )


def _gate(config: Config, tensors: Mapping[str, Tensor], W_enc: Tensor) -> tuple[Gate, Tensor, Tensor]:
    """The gate, and the encoder (F, d_in) and its bias that it reads."""
    if config.architecture == "gated":
        scale = tensors["r_mag"].exp()
        return Gated(1 / scale, tensors["b_gate"]), W_enc * scale[:, None], tensors["b_mag"]
    gate: Gate = ReLU()
    if config.k is not None:
        by_magnitude = config.architecture == "abstopk"
        gate = TopK(config.k, by_magnitude, relu_too=not by_magnitude)
    elif "threshold" in tensors:
        gate = JumpReLU(tensors["threshold"], relu_too=True)
    return gate, W_enc, tensors["b_enc"]


def _centred(gate: Gate, W_enc: Tensor, b_enc: Tensor, b_in: Tensor | None) -> tuple[Gate, Tensor, Tensor]:
    """The same of x as they were of x C: (x C - b) W.T is (x - b) (W C).T less mean(W) Σ b."""
    mean = W_enc.mean(dim=-1)
    if b_in is not None:
        lost = mean * b_in.sum()
        b_enc = b_enc - lost
        if isinstance(gate, Gated):
            gate = Gated(gate.scale, gate.b_gate - lost * gate.scale)
    return gate, W_enc - mean[:, None], b_enc


def _input_norm(config: Config) -> InputNorm | None:
    if config.norm == "layer_norm":
        return LayerNormInput(restores=not config.transcoder)
    if config.norm == "constant_norm_rescale":
        return RescaledInput(config.d_in**0.5, restores=not config.transcoder)
    return None


def _activation(config: Config) -> str:
    if config.k is not None:
        return f"TopK {config.k}" + (" by magnitude" if config.architecture == "abstopk" else "")
    named = "gated ReLU" if config.architecture == "gated" else "ReLU"
    return ("JumpReLU" if "jumprelu" in config.architecture else named) + (
        " with skip" if "skip" in config.architecture else ""
    )


FORMAT = FolderFormat(
    name="saelens",
    hub_files=("*cfg.json", "*sae_weights.safetensors"),
    files=(_CONFIG, _WEIGHTS),
    holds=_holds,
    found=_found,
)
