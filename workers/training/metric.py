"""What a model's loss feels of an error, as a metric for the error that a dictionary leaves.

To second order an error δ in what a dictionary writes costs ½ δᵀHδ nats; averaged over text and its tokens H
is near the second moment of the loss's gradient (they are equal where the model's probabilities are right):

    g   = ∂(Σ -log p(next token))/∂y            one backward pass, at every place that is written
    G   = E[g gᵀ]                               (d, d), over some tens of thousands of tokens
                                                g no longer than 7 times the median of its batch: a few tokens
                                                on which attention rests would own half of it
    M   = a G d/tr(G) + (1 - a) I               a: the share; tr(M) = d as of the plain error
    L   = E[(y - ŷ) M (y - ŷ)ᵀ]

L is the plain squared error of (y - μ) M^½, so a coder that knows nothing of M is trained on that; decoder,
bias and skip come back by M^-½ (workers.training.trainee). With a < 1 no direction is free of cost, and M^½
has an inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ingest.contexts import Contexts
from ingest.models.capture import Point, loss_gradients
from ingest.models.residual import ResidualModel

__all__ = ["gradient_moments", "root_of", "shortened"]

BATCH_TOKENS = 1024  # the logits of so many are held, with their gradient
EXTREME = 7.0


def gradient_moments(
    model: ResidualModel,
    contexts: Contexts,
    points: Sequence[Point],
    tokens: int,
    autocast: bool = False,
    each: Callable[[int], None] | None = None,
) -> dict[Point, Tensor]:
    """{point: G (d, d) float64} over the first contexts that have so many tokens, or all. Positions that are
    not scored count nowhere. `each` is told of the tokens run."""
    count = min(len(contexts), max(1, -(-tokens // contexts.length)))
    size = max(1, BATCH_TOKENS // contexts.length)
    sums: dict[Point, Tensor] = {}
    rows = 0
    for lo in range(0, count, size):
        ids = contexts.tokens[lo : min(lo + size, count)].astype(np.int64)
        scored = contexts.scored(ids)
        predicted = scored[:, :-1] if contexts.pad is None else scored[:, :-1] & (ids[:, 1:] != contexts.pad)
        found = loss_gradients(
            model, torch.from_numpy(ids), points, torch.from_numpy(predicted), autocast=autocast
        )
        for point, gradient in found.items():
            g = shortened(gradient[torch.from_numpy(scored)])
            moment = (g.T @ g).double()
            sums[point] = sums[point] + moment if point in sums else moment
        rows += int(scored.sum())
        if each:
            each(ids.size)
    return {point: total / max(rows, 1) for point, total in sums.items()}


def shortened(rows: Tensor) -> Tensor:
    """Rows (n, d), those longer than EXTREME times the median length brought to that length."""
    length = rows.norm(dim=-1, keepdim=True)
    bound = EXTREME * length.median()
    return torch.where(length > bound, rows * (bound / length), rows)


def root_of(moment: Tensor, share: float) -> Tensor:
    """M^½ (d, d) float64, symmetric, of G (d, d); the identity where G is 0."""
    d = len(moment)
    trace = float(moment.trace())
    if trace <= 0:
        return torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(moment.double() * (d / trace))
    values = share * values.clamp(min=0.0) + (1 - share)
    return (vectors * values.sqrt()) @ vectors.T
