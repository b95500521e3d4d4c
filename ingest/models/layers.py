"""The tensors of each layer, taken from a TransformerBridge as views and checked against the facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ingest.errors import InputError
from ingest.models.facts import Facts
from ingest.models.rows import Affine

__all__ = ["Layer", "MLPWeights", "component", "embedding_tables", "norm_of", "read_layer"]


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """One MLP as the module has it: act(x W_in + b_in) W_out + b_out, or gated
    (act(x W_gate + b_gate) ⊙ (x W_in + b_in)) W_out + b_out. float32 views."""

    W_in: torch.Tensor  # (d_model, d_mlp)
    b_in: torch.Tensor | None  # (d_mlp,)
    W_gate: torch.Tensor | None  # (d_model, d_mlp)
    b_gate: torch.Tensor | None
    W_out: torch.Tensor  # (d_mlp, d_model)
    b_out: torch.Tensor | None  # (d_model,)
    activation: str


@dataclass(frozen=True, eq=False)
class Layer:
    """One block. Weights are float32 views, norms float64 vectors."""

    W_Q: torch.Tensor  # (n_heads, d_model, d_head)
    W_K: torch.Tensor  # (n_kv_heads, d_model, d_head)
    W_V: torch.Tensor  # (n_kv_heads, d_model, d_head)
    b_V: torch.Tensor | None  # (n_kv_heads, d_head)
    W_O: torch.Tensor  # (n_heads, d_head, d_model)
    b_O: torch.Tensor | None  # (d_model,)
    mlp: MLPWeights
    ln1: Affine  # what attention reads through
    ln2: Affine  # what the MLP reads through (ln1 again where one norm serves both)
    ln1_post: Affine  # behind attention
    ln2_post: Affine  # behind the MLP


def component(parent: Any, name: str) -> Any:
    """A bridge component by its name ('in' is a Python keyword), or None."""
    return getattr(parent, name, None)


def norm_of(bridge_norm: Any, facts: Facts, where: str) -> Affine:
    """The norm's gain and bias as the facts say they act.

    Raises InputError where the module has not what the facts expect, or another eps.
    """
    if bridge_norm is None:
        raise InputError(f"{facts.architecture}: {where} is missing; the residual view expects a norm there")
    module = bridge_norm.original_component
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", facts.norm.eps))
    if float(eps) != facts.norm.eps:
        raise InputError(
            f"{facts.architecture}: {where} has eps {eps}, the configuration's facts {facts.norm.eps}"
        )
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if (weight is not None) != (facts.norm.gain != "none"):
        raise InputError(f"{facts.architecture}: {where}: gain {facts.norm.gain!r} expected, not found")
    if bias is not None and not facts.norm.bias:
        raise InputError(f"{facts.architecture}: {where} has a bias; the facts know none")
    gain = None if weight is None else weight.detach().double()
    if gain is not None and facts.norm.gain == "1 + weight":
        gain = 1.0 + gain
    return Affine(facts.norm.centred, gain, None if bias is None else bias.detach().double())


def read_layer(block: Any, number: int, facts: Facts) -> Layer:
    """The layer's tensors. Raises InputError where a shape is not what the facts say, naming both."""
    attn, mlp, where = block.attn, block.mlp, f"layer {number}"
    d, h, kv, d_head = facts.d_model, facts.n_heads, facts.n_kv_heads, facts.d_head
    scaling = getattr(attn.original_component, "scaling", None)
    if isinstance(scaling, float) and abs(scaling / facts.attention_scale[number] - 1) > 1e-6:
        raise InputError(
            f"{facts.architecture}: {where}: attention multiplies q·k by {scaling}; expected "
            f"{facts.attention_scale[number]}"
        )
    q, _ = _matrix(attn.q, (d, h * d_head), f"{where}: W_Q")
    k, _ = _matrix(attn.k, (d, kv * d_head), f"{where}: W_K")
    v, b_v = _matrix(attn.v, (d, kv * d_head), f"{where}: W_V")
    o, b_o = _matrix(attn.o, (h * d_head, d), f"{where}: W_O")
    w_in, b_in = _matrix(component(mlp, "in"), (d, facts.d_mlp), f"{where}: W_in")
    w_out, b_out = _matrix(component(mlp, "out"), (facts.d_mlp, d), f"{where}: W_out")
    w_gate, b_gate = (
        _matrix(component(mlp, "gate"), (d, facts.d_mlp), f"{where}: W_gate") if facts.gated else (None, None)
    )
    plain = Affine()
    ln1 = norm_of(component(block, "ln1"), facts, f"{where}: ln1") if facts.norm_before else plain
    ln2 = ln1
    if facts.norm_before and not facts.one_norm:
        ln2 = norm_of(component(block, "ln2"), facts, f"{where}: ln2")
    post1 = post2 = plain
    if facts.norm_after:
        post1 = norm_of(component(block, "ln1_post"), facts, f"{where}: the norm behind attention")
        post2 = norm_of(component(block, "ln2_post"), facts, f"{where}: the norm behind the MLP")
    return Layer(
        W_Q=_per_head(q, h),
        W_K=_per_head(k, kv),
        W_V=_per_head(v, kv),
        b_V=None if b_v is None else b_v.view(kv, d_head),
        W_O=o.reshape(h, d_head, d),
        b_O=b_o,
        mlp=MLPWeights(w_in, b_in, w_gate, b_gate, w_out, b_out, facts.activation),
        ln1=ln1,
        ln2=ln2,
        ln1_post=post1,
        ln2_post=post2,
    )


def embedding_tables(bridge: Any, facts: Facts) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(W_E (d_vocab, d), W_pos (rows, d) or None, W_Uᵀ (d_vocab, d)), as the modules have them."""
    w_e = bridge.embed.weight.detach()
    w_pos = bridge.pos_embed.weight.detach() if facts.positions == "learned" else None
    w_u = bridge.unembed.original_component.weight.detach()
    for name, tensor in (("W_E", w_e), ("W_U", w_u)):
        if tuple(tensor.shape) != (facts.d_vocab, facts.d_model):
            raise InputError(
                f"{facts.architecture}: {name} has shape {tuple(tensor.shape)}; the configuration says "
                f"({facts.d_vocab}, {facts.d_model})"
            )
    return w_e, w_pos, w_u


def _matrix(linear: Any, shape: tuple[int, int], where: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight (d_in, d_out) as a view, bias). GPT-2's Conv1D keeps it so, a Linear transposed."""
    from transformers.pytorch_utils import Conv1D

    if linear is None:
        raise InputError(f"{where} is missing; the residual view expects it")
    module = linear.original_component
    weight = module.weight.detach() if isinstance(module, Conv1D) else module.weight.detach().T
    if tuple(weight.shape) != shape:
        raise InputError(f"{where} has shape {tuple(weight.shape)}; the configuration says {shape}")
    bias = getattr(module, "bias", None)
    return weight, None if bias is None else bias.detach()


def _per_head(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """(d, heads · d_head) -> (heads, d, d_head), a view."""
    return matrix.unflatten(1, (heads, -1)).transpose(0, 1)
