"""Deterministic float64 arithmetic on rows of vectors: elementwise steps only, so that no result depends on
threads, tiles or the BLAS in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Affine", "centre", "row_sums"]


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis (…, d) -> (…, 1) by halving: each step adds two halves elementwise.

    The order of additions is fixed and the error grows with log2(d).
    """
    while (d := x.shape[-1]) > 1:
        half = d // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        if rest.shape[-1]:
            x = torch.cat([x[..., :1] + rest, x[..., 1:]], dim=-1)
    return x


def centre(x: torch.Tensor) -> torch.Tensor:
    """x C with C = I - 11ᵀ/d, rows (…, d)."""
    return x - row_sums(x) / x.shape[-1]


@dataclass(frozen=True, eq=False)
class Affine:
    """The linear part of a norm, x -> x C ⊙ γ, and its bias β. Without a norm: the identity, β = 0."""

    centred: bool = False
    gain: torch.Tensor | None = None  # (d,) float64
    bias: torch.Tensor | None = None  # (d,) float64

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """(x C) ⊙ γ for rows (…, d): what passes a norm, its scale left out."""
        x = centre(x) if self.centred else x
        return x if self.gain is None else x * self.gain

    def read_back(self, e: torch.Tensor) -> torch.Tensor:
        """(e ⊙ γ) C: the direction before the norm that a direction e behind it reads (the transpose)."""
        e = e if self.gain is None else e * self.gain
        return centre(e) if self.centred else e
