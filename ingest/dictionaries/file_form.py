"""A dictionary as a format's file can hold it: its gate in the format's terms, b_in folded, weights rounded.

    W_enc (F, d_in)  W_dec (F, d_out)  W_skip (d_in, d_out)      in the type asked for
    b_enc (F)  b_out (d_out)  threshold (F)                      float32

What is subtracted from the input, where the format subtracts nothing, goes into the encoder's bias by the
weights as they are rounded:  (x - b_in) W.T + b_enc = x W.T + (b_enc - W b_in). A gate that chooses by
pre · n (n the decoder's norms) becomes one that chooses by its own value: W_enc and b_enc times n, W_dec by
n. A negative threshold with ReLU is a threshold of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ingest.dictionaries.types import (
    Dictionary,
    Gate,
    Gated,
    JumpReLU,
    ReLU,
    ScalarThreshold,
    TopK,
)
from ingest.errors import InputError

__all__ = [
    "DTYPES",
    "FileForm",
    "FileGate",
    "Say",
    "file_form",
    "single_write",
    "thresholded",
    "with_thresholds",
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Say = Callable[[str], None]  # takes a note
FileGate = ReLU | JumpReLU | TopK | Gated


@dataclass(frozen=True, eq=False)
class FileForm:
    """What goes into a file."""

    W_enc: Tensor  # (F, d_in); of a gated dictionary the gate's reading, scaled
    b_enc: Tensor  # (F,); of a gated dictionary the magnitudes'
    W_dec: Tensor  # (F, d_out)
    b_out: Tensor  # (d_out,), zeros where the dictionary has none
    W_skip: Tensor | None  # (d_in, d_out)
    gate: FileGate
    subtracts: bool  # b_out from the (normalised) input


def single_write(dictionary: Dictionary, where: str) -> None:
    """InputError for a cross-layer dictionary. `where` begins it."""
    if len(dictionary.writes) > 1:
        layers = ", ".join(str(write.layer) for write in dictionary.writes)
        raise InputError(f"{where}: writes to layers {layers}; cross-layer dictionaries cannot be written")


def thresholded(gate: Gate, size: int, *, relu: bool, where: str, say: Say) -> FileGate:
    """The gate with JumpReLU for one threshold, and thresholds that mean the same to a library that applies
    ReLU as well (`relu`), or that does not.

    Raises InputError where a library's JumpReLU cannot say it, and for neurons and groups.
    """
    if isinstance(gate, ScalarThreshold):
        say(f"one threshold for all latents is written as JumpReLU with {size} equal ones")
        gate = JumpReLU(torch.full((size,), gate.threshold, dtype=torch.float32), gate.relu_too)
    if isinstance(gate, JumpReLU) and (negative := int((gate.threshold < 0).sum())):
        if relu and not gate.relu_too:
            raise InputError(
                f"{where}: {negative} thresholds are negative and let negative values pass, which SAELens"
                " cuts off; write it in circuit-tracer's layout"
            )
        if not relu and gate.relu_too:
            say("negative thresholds are written as 0, the same where negative values are cut off")
            gate = JumpReLU(gate.threshold.clamp(min=0), gate.relu_too)
    if not isinstance(gate, FileGate):
        raise InputError(
            f"{where}: has the gate {type(gate).__name__}; expected ReLU, JumpReLU, a threshold, TopK or a"
            " gated dictionary"
        )
    return gate


def with_thresholds(
    dictionary: Dictionary, gate: TopK, thresholds: Mapping[int, Tensor] | None, where: str, say: Say
) -> JumpReLU:
    """JumpReLU in place of TopK, with the thresholds given for the layer: F of them, or one. Raises
    InputError where there is none, and for another number of them."""
    size = dictionary.size
    if gate.by_magnitude or not gate.relu_too:
        raise InputError(f"{where}: its TopK keeps negative values, which no threshold does; not supported")
    if thresholds is None or dictionary.layer not in thresholds:
        raise InputError(
            f"{where}: no thresholds for layer {dictionary.layer}, and TopK {gate.k} is to be written as"
            f" JumpReLU; give thresholds, {size} or one for the layer"
        )
    given = thresholds[dictionary.layer].detach().to("cpu", torch.float32)
    if given.numel() != 1 and tuple(given.shape) != (size,):
        raise InputError(
            f"{where}: thresholds have shape {tuple(given.shape)}; expected ({size},), one for each latent,"
            " or a single number"
        )
    if not given.isfinite().all():
        raise InputError(f"{where}: thresholds are not all finite; expected finite numbers")
    say(
        f"TopK {gate.k} is written as JumpReLU with the thresholds given: how many latents are active then"
        " differs from token to token"
    )
    return JumpReLU(given.reshape(-1).expand(size).clone(), relu_too=True)


def file_form(
    dictionary: Dictionary, gate: FileGate, dtype: str, where: str, say: Say, *, may_subtract: bool
) -> FileForm:
    """The tensors of one dictionary, with the gate already in the format's terms. `dtype`, one of
    DTYPES, is the weights'; `may_subtract`: the format can take b_out from the input.

    Raises InputError for a value that the type cannot hold, and for one that is not finite.
    """
    write, kind = dictionary.writes[0], DTYPES[dtype]
    W_enc, b_enc = (_plain(t) for t in (dictionary.encoders[0].W_enc, dictionary.encoders[0].b_enc))
    W_dec, b_out = _plain(write.W_dec), torch.zeros(write.W_dec.shape[1])
    if write.b_out is not None:
        b_out = _plain(write.b_out)
    norm = dictionary.decoder_norm_in_gate
    if norm is not None and isinstance(gate, TopK):
        norm = _plain(norm)
        if not bool((norm > 0).all()):
            raise InputError(f"{where}: its TopK weighs a latent by 0; expected decoder norms above 0")
        say(
            "latents are chosen by activation times decoder norm: activations are written times that norm and"
            " the decoder divided by it, the output is the same"
        )
        W_enc, b_enc, W_dec = W_enc * norm[:, None], b_enc * norm, W_dec / norm[:, None]
    scale: Tensor | float = 1.0
    if isinstance(gate, Gated):
        scale = _plain(gate.scale)
        if not bool((scale > 0).all()):
            raise InputError(f"{where}: a gate's scale is not above 0; expected exp(-r_mag)")
        W_enc = W_enc * scale[:, None]
    skip = None if dictionary.W_skip is None else _plain(dictionary.W_skip)
    exact = [W_enc, W_dec, *([] if skip is None else [skip])]
    W_enc, W_dec = _rounded(W_enc, kind, f"{where}: W_enc"), _rounded(W_dec, kind, f"{where}: W_dec")
    skip = None if skip is None else _rounded(skip, kind, f"{where}: W_skip")
    rounded = [W_enc, W_dec, *([] if skip is None else [skip])]
    if not all(torch.equal(a, b.float()) for a, b in zip(exact, rounded, strict=True)):
        say(f"weights are rounded to {dtype}; biases and thresholds are float32")
    b_in = None if dictionary.b_in is None else _plain(dictionary.b_in)
    subtracts = may_subtract and b_in is not None and torch.equal(b_in, b_out)
    if b_in is not None and not subtracts:
        say("b_in is folded into b_enc (b_enc - W_enc b_in), as the format subtracts no such vector")
        moved = W_enc.double() @ b_in.double()  # (F,), of the gate's reading
        b_enc = (b_enc.double() - moved / scale).float()
        if isinstance(gate, Gated):
            gate = replace(gate, b_gate=(_plain(gate.b_gate).double() - moved).float())
    form = FileForm(
        W_enc=W_enc,
        b_enc=b_enc,
        W_dec=W_dec,
        b_out=b_out,
        W_skip=skip,
        gate=gate,
        subtracts=subtracts,
    )
    for key, bias in {"b_enc": b_enc, "b_out": b_out}.items():
        _rounded(bias, torch.float32, f"{where}: {key}")
    if isinstance(gate, JumpReLU):
        _rounded(gate.threshold, torch.float32, f"{where}: threshold")
    return form


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)


def _rounded(tensor: Tensor, kind: torch.dtype, what: str) -> Tensor:
    """The tensor in this type. InputError where a value is not finite, or is not any more."""
    rounded = tensor.to(kind)
    bad = ~rounded.isfinite()
    if not bool(bad.any()):
        return rounded
    at = tuple(int(part) for part in bad.nonzero()[0])
    value = float(tensor[at])
    if not bool(tensor[at].isfinite()):
        raise InputError(f"{what}{list(at)} is {value}; expected finite weights: its training diverged")
    name, most = str(kind).removeprefix("torch."), torch.finfo(kind).max
    raise InputError(
        f"{what}{list(at)} is {value:.6g}, and {name} ends at {most:.6g}; write it as"
        f" {'float32' if name == 'bfloat16' else 'bfloat16 or float32'}"
    )
