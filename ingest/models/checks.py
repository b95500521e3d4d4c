"""What is checked of a model before anything is computed from it (methods: Checked at load).

Two short forward passes and their algebra: logits equal to Hugging Face's; stream in + attention + MLP =
stream out; each MLP is the described function of what it reads; the algebra's stream, readings and logits
equal the model's; and, with everything frozen and a
large vector written at the embedding, the model moves as the algebra says through every OV circuit, so each
freeze holds and each factor is right.
"""

from __future__ import annotations

import math

import torch

from ingest.errors import InputError
from ingest.models.libraries import library_errors
from ingest.models.linear import Replay, replay
from ingest.models.residual import ResidualModel
from ingest.models.runtime import Trace, Write, run

__all__ = ["check_model", "check_tokens"]

TOLERANCE = 2e-4  # relative to the largest entry of a token's vector; a wrong fact gives 1e-2 and more


def check_tokens(d_vocab: int, length: int = 6) -> torch.Tensor:
    """A few ids spread over the vocabulary, always the same."""
    return torch.tensor([(7 + 7919 * at) % d_vocab for at in range(length)])


def check_model(model: ResidualModel, reference: torch.Tensor) -> None:
    """Raises InputError naming the identity that does not hold, and where.

    reference: (T, d_vocab), Hugging Face's own logits of `check_tokens`, from before the bridge was built.
    """
    with library_errors(f"{model.source}: TransformerBridge cannot run this {model.facts.architecture}"):
        trace = run(model, check_tokens(model.facts.d_vocab, len(reference)))
    _same(model, "logits of TransformerBridge and of Hugging Face", trace.logits, reference)
    streams = torch.cat([trace.resid_pre, trace.resid_post[None]])
    _same(
        model, "stream in + attention + MLP and stream out",
        trace.resid_pre + trace.attn_out + trace.mlp_out, streams[1:],
    )  # fmt: skip
    for layer in range(model.facts.n_layers):
        what = f"MLP outputs of layer {layer} of the model and of its weights ({model.facts.activation})"
        _same(model, what, trace.mlp_module[layer], _mlp(model, layer, trace.mlp_in[layer]))
    _compare(model, "", trace, replay(model, trace))
    generator = torch.Generator().manual_seed(0)
    size = trace.resid_pre[0].abs().max()
    vectors = torch.randn(trace.resid_pre[0].shape, generator=generator) * size
    write = (Write("embed", 0, vectors),)
    _compare(
        model, " after a write at the embedding, all frozen",
        run(model, trace.tokens, frozen=trace, writes=write, live_heads="all"), replay(model, trace, write),
    )  # fmt: skip


def _mlp(model: ResidualModel, layer: int, x: torch.Tensor) -> torch.Tensor:
    """The layer's MLP of rows x (T, d_model), from its weights as `mlp_weights` gives them."""
    from transformers.activations import ACT2FN

    weights = model.mlp_weights(layer)
    if weights.activation not in ACT2FN:
        raise InputError(f"{model.source}: activation {weights.activation!r} is not known to transformers")
    hidden = x @ weights.W_in + (0 if weights.b_in is None else weights.b_in)
    if weights.W_gate is None:
        hidden = ACT2FN[weights.activation](hidden)
    else:
        gate = x @ weights.W_gate + (0 if weights.b_gate is None else weights.b_gate)
        hidden = ACT2FN[weights.activation](gate) * hidden
    return hidden @ weights.W_out + (0 if weights.b_out is None else weights.b_out)


def _compare(model: ResidualModel, when: str, real: Trace, algebra: Replay) -> None:
    for name in ("resid_pre", "attn_in", "mlp_in", "attn_out", "resid_post", "final_in"):
        what = f"{name} of the model and of the algebra{when}"
        _same(model, what, getattr(real, name), getattr(algebra, name))
    logits, cap = algebra.logits(model), model.facts.logit_cap
    if cap:
        logits = cap * torch.tanh(logits / cap)
    _same(model, f"logits of the model and of the algebra{when}", real.logits, logits)


def _same(model: ResidualModel, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares (…, T, n) row by row, relative to the row's largest entry."""
    found, expected = found.double(), expected.double()
    scale = expected.abs().amax(-1).clamp_min(1e-30)
    error = (found - expected).abs().amax(-1) / scale
    worst = float(error.max())
    if math.isnan(worst) or worst > TOLERANCE:
        at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
        where = f"layer {at[0]}, token {at[1]}" if len(at) == 2 else f"token {at[-1]}"
        raise InputError(
            f"{model.source}: {model.facts.architecture} is not what its configuration says: {what} differ "
            f"by {worst:.1e} (relative, {where}; at most {TOLERANCE:.0e} is rounding)"
        )
