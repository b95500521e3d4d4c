"""What a dictionary computes: activations of the vectors it reads, and what they write. Pure functions.

The formulas stand in ingest/dictionaries/types.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ingest.dictionaries.types import (
    Dictionary,
    Gated,
    GatedMLP,
    GroupMax,
    InputNorm,
    JumpReLU,
    LayerNormInput,
    Pointwise,
    ReLU,
    RescaledInput,
    ScalarThreshold,
    TopK,
)
from ingest.errors import InputError

__all__ = ["activation_function", "decode", "encode", "pre_activations"]

# By Hugging Face's names. gelu_new and its kin are one formula: 0.5 u (1 + tanh(sqrt(2/pi) (u + 0.044715
# u^3))).
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda u: F.relu(u) ** 2,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": lambda u: F.gelu(u, approximate="tanh"),
    "gelu_fast": lambda u: F.gelu(u, approximate="tanh"),
    "gelu_pytorch_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "quick_gelu": lambda u: u * torch.sigmoid(1.702 * u),
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The elementwise function that Hugging Face calls so. Raises InputError for one not known here."""
    if name not in _ACTIVATIONS:
        raise InputError(f"activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def encode(dictionary: Dictionary, x: Tensor) -> Tensor:
    """Activations (n, F) of the vectors x (n, d_in), in the space that the dictionary reads; x's own type."""
    pre = pre_activations(dictionary, x)
    first = pre[dictionary.readings[0]]
    match dictionary.gate:
        case ReLU():
            return first.relu()
        case JumpReLU(threshold=threshold, relu_too=relu_too):
            kept = torch.where(first > threshold.to(first), first, 0.0)
            return kept.relu() if relu_too else kept
        case ScalarThreshold(threshold=scalar, relu_too=relu_too):
            # As a float32, as JumpReLU's are, so that one number and F equal ones give the same.
            kept = torch.where(first > torch.tensor(scalar, dtype=torch.float32).to(first), first, 0.0)
            return kept.relu() if relu_too else kept
        case TopK() as top:
            return _top_k(top, first, _weighed(dictionary, first))
        case GroupMax(groups=groups):
            return _group_max(groups, first.relu(), _weighed(dictionary, first.relu()))
        case Gated(scale=scale, b_gate=b_gate):
            magnitude_bias = dictionary.encoders[0].b_enc.to(first)
            open_ = (first - magnitude_bias) * scale.to(first) + b_gate.to(first) > 0
            return torch.where(open_, first.relu(), 0.0)
        case Pointwise(activation=name):
            return activation_function(name)(first)
        case GatedMLP(activation=name):
            return activation_function(name)(first) * pre["up"]


def pre_activations(dictionary: Dictionary, x: Tensor) -> dict[str, Tensor]:
    """For each reading (x' - b_in) @ W_enc.T + b_enc, (n, F)."""
    normal, _ = _normalise(dictionary.input_norm, x)
    if dictionary.b_in is not None:
        normal = normal - dictionary.b_in.to(x)
    return {
        encoder.reading: normal @ encoder.W_enc.to(x).T + encoder.b_enc.to(x)  # (n, F)
        for encoder in dictionary.encoders
    }


def decode(dictionary: Dictionary, activations: Tensor, x: Tensor | None = None) -> list[Tensor]:
    """For each write activations @ W_dec + b_out, (n, d_out), in the raw space of what is written.

    `x` (n, d_in) is what was read: needed by a skip connection and by a norm that is undone.
    """
    outputs = []
    for index, write in enumerate(dictionary.writes):
        out = activations @ write.W_dec.to(activations)
        if write.b_out is not None:
            out = out + write.b_out.to(activations)
        if dictionary.input_norm is not None and dictionary.input_norm.restores:
            _, restore = _normalise(dictionary.input_norm, _needed(x))
            out = restore(out)
        if dictionary.W_skip is not None and index == 0:
            out = out + _needed(x) @ dictionary.W_skip.to(activations)
        outputs.append(out)
    return outputs


def _weighed(dictionary: Dictionary, value: Tensor) -> Tensor:
    norm = dictionary.decoder_norm_in_gate
    return value if norm is None else value * norm.to(value)


def _top_k(top: TopK, value: Tensor, weighed: Tensor) -> Tensor:
    score = weighed.abs() if top.by_magnitude else weighed
    count = min(top.k, score.shape[-1])
    kept = score >= score.topk(count, dim=-1).values[..., -1:]
    tied = kept.sum(-1) != count
    if tied.any():
        # By a stable sort, not topk: ties go to the smaller latent on every device.
        chosen = score[tied].sort(dim=-1, descending=True, stable=True).indices[..., :count]
        kept[tied] = torch.zeros_like(kept[tied]).scatter(-1, chosen, True)
    kept_values = torch.where(kept, value, 0.0)
    return kept_values.relu() if top.relu_too else kept_values


def _group_max(groups: int, value: Tensor, weighed: Tensor) -> Tensor:
    by_group = weighed.unflatten(-1, (groups, -1))  # (n, groups, F / groups)
    winner = by_group.sort(dim=-1, descending=True, stable=True).indices[..., :1]
    grouped = value.unflatten(-1, (groups, -1))
    return torch.zeros_like(grouped).scatter(-1, winner, grouped.gather(-1, winner)).flatten(-2)


def _normalise(norm: InputNorm | None, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The normalised input, and what undoes it on an output."""
    match norm:
        case LayerNormInput(eps=eps):
            mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)  # n - 1
            return (x - mean) / (std + eps), lambda out: out * std + mean
        case RescaledInput(norm=target):
            factor = target / x.norm(dim=-1, keepdim=True)
            return x * factor, lambda out: out / factor
    return x, lambda out: out


def _needed(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError("decode needs x: the dictionary has a skip connection or a norm to undo")
    return x
