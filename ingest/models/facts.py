"""What a model is, as far as its residual stream is concerned: independent facts, none of them a class
(methods: A model seen from its residual stream). Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Facts", "Norm"]


@dataclass(frozen=True)
class Norm:
    """How a norm maps the stream x: (x C ⊙ γ)/σ + β, with σ² = mean((x C)²) + eps."""

    centred: bool  # C = I - 11ᵀ/d (LayerNorm) or C = I (RMSNorm)
    gain: str  # γ is the 'weight', '1 + weight', or 'none'
    bias: bool  # whether there is a β
    eps: float


@dataclass(frozen=True)
class Facts:
    """A decoder's facts, from its configuration alone. `open_model` checks each against the tensors."""

    architecture: str  # Hugging Face's class
    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    norm: Norm  # the kind of every norm on or behind the stream
    norm_before: bool  # each branch reads the stream through a norm
    norm_after: bool  # each branch's output passes a norm before it joins the stream
    parallel: bool  # the MLP reads resid_pre, not what attention added
    one_norm: bool  # attention and MLP read through the same norm
    embedding_norm: bool  # token embeddings pass a norm before they are the stream
    positions: str  # 'learned' (rows added to the stream), 'rotary', 'alibi' or 'none'
    position_offset: int  # position p takes the row p + offset
    embedding_factor: float
    branch_multiplier: float  # what a branch returns is multiplied by this before it joins
    logit_multiplier: float
    logit_cap: float | None  # logits are cap · tanh(logit / cap); attribute to the logit before it
    attention_scale: tuple[float, ...]  # per layer: scores are scale · q·k
    attention_cap: float | None
    gated: bool  # act(x W_gate) ⊙ x W_in
    activation: str  # Hugging Face's name
    tied: bool  # by configuration; the loaded tensors decide
    dtype: str  # of the weights on disk
    sinks: bool = False  # attention rows that sum to less than 1; no architecture with sinks is accepted yet
