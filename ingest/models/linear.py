"""The frozen model as algebra: the same sums as the real forward pass, from the weights alone, float64.

With patterns and scales of a trace held and its MLP outputs as given terms, the stream is linear in what is
written to it. The load check compares this with the real model; so every fact enters (factor, gains,
multipliers, biases, grouped heads), and a wrong one does not stay hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ingest.models.residual import ResidualModel
from ingest.models.rows import Affine
from ingest.models.runtime import Trace, Write

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, eq=False)
class Replay:
    """What the algebra says each reader sees; float64, shapes as in Trace."""

    resid_pre: torch.Tensor  # (n_layers, T, d_model)
    resid_post: torch.Tensor  # (T, d_model)
    attn_in: torch.Tensor  # (n_layers, T, d_model)
    mlp_in: torch.Tensor  # (n_layers, T, d_model)
    attn_out: torch.Tensor  # (n_layers, T, d_model)
    final_in: torch.Tensor  # (T, d_model)

    def logits(self, model: ResidualModel) -> torch.Tensor:
        """(T, d_vocab) float64, before the cap."""
        blocks = [
            self.final_in @ model.unembedding(lo, lo + 8192).T for lo in range(0, model.facts.d_vocab, 8192)
        ]
        logits = torch.cat(blocks, dim=-1)
        bias = model._b_U
        return logits if bias is None else logits + bias.detach().double() * model.facts.logit_multiplier


def replay(model: ResidualModel, trace: Trace, writes: Iterable[Write] = ()) -> Replay:
    """embedding + positions + Σ heads + Σ biases + the trace's MLP outputs (+ writes), layer by layer.

    Every head is live: its pattern is the trace's, its values come from the stream computed here.
    """
    facts, writes = model.facts, tuple(writes)
    kv = [model.kv(head) for head in range(facts.n_heads)]
    stream = torch.cat([model.token_vectors(token, token + 1) for token in trace.tokens.tolist()])
    stream = stream + model.position_vectors(len(trace.tokens))  # (T, d)
    stream = stream + _written(model, writes, "embed", 0)
    pre, attn_in, mlp_in, attn_out = [], [], [], []
    for number, layer in enumerate(model.layers):
        pre.append(stream)
        x = _read(layer.ln1, stream, trace.sigma1[number])
        v = torch.einsum("td,kde->tke", x, layer.W_V.double())  # (T, n_kv_heads, d_head)
        if layer.b_V is not None:
            v = v + layer.b_V.double()
        z = torch.einsum("hts,she->the", trace.pattern[number].double(), v[:, kv])  # (T, n_heads, d_head)
        joined = torch.einsum("the,hed->td", z, model.W_O(number)) + model.output_bias(number)
        out = joined / trace.sigma_post1[number][:, None] + model.post_bias(number, "attn")
        out = out + _written(model, writes, "attn", number, trace.sigma_post1[number])
        middle = stream + out
        y = _read(layer.ln2, stream if facts.parallel else middle, trace.sigma2[number])
        mlp = trace.mlp_out[number].double()
        mlp = mlp + _written(model, writes, "mlp", number, trace.sigma_post2[number])
        stream = middle + mlp
        attn_in.append(x)
        mlp_in.append(y)
        attn_out.append(out)
    return Replay(
        resid_pre=torch.stack(pre),
        resid_post=stream,
        attn_in=torch.stack(attn_in),
        mlp_in=torch.stack(mlp_in),
        attn_out=torch.stack(attn_out),
        final_in=_read(model.ln_final, stream, trace.sigma_final),
    )


def _read(norm: Affine, stream: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    x = norm.through(stream) / sigma[:, None]
    return x if norm.bias is None else x + norm.bias


def _written(
    model: ResidualModel, writes: tuple[Write, ...], site: str, layer: int, sigma: torch.Tensor | None = None
) -> torch.Tensor:
    total = torch.zeros(1, model.facts.d_model, dtype=torch.float64)
    for write in writes:
        if write.site != site or (site != "embed" and write.layer != layer):
            continue
        vectors = write.vectors.double()
        if write.at == "module" and sigma is not None:
            vectors = model.joining(layer, site, vectors) / sigma[:, None]
        total = total + vectors
    return total
