"""One dictionary while it is trained: its parameters, its loss and the loss's gradient (methods: Training and
evaluating dictionaries).

With x what is read and y what is to be written, each centred and divided by one number,

    p   = x W_encᵀ + b_enc
    a   = gate(p)                     TopK | BatchTopK | JumpReLU | ReLU
    ŷ   = a W_dec + b_dec (+ x W_skip)
    L   = |y - ŷ|² / (n d_out)  +  sparsity

d_j has unit norm: after each step it is scaled back to it, and the gradient along it is left out. Sparsity by
gate: none for TopK and BatchTopK; ReLU λ Σ_j a_j / n (Transcoders; with |d_j| = 1 the weighted and the plain
L1 agree); JumpReLU λ (L0/target - 1)², whose gradient reaches the thresholds θ = exp(log θ) through a
rectangle of width ε, as does the reconstruction's (Rajamanoharan et al., Jumping Ahead, 2024, eq. 11-12):

    ∂a/∂θ = -(θ/ε) [|p - θ| < ε/2],   ∂L0/∂θ = -(1/ε) [|p - θ| < ε/2]

The gradients are written out, so that the sparse code alone is worked through (workers.training.codes);
`dense` computes the same with whole matrices, for a GPU and for the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from workers.training.codes import Code, above, backward, decode, exact_values, through_decoder, top_k

__all__ = ["BatchTopKGate", "Coder", "GateSpec", "JumpReLUGate", "ReLUGate", "StepFigures", "TopKGate"]


@dataclass(frozen=True)
class TopKGate:
    """The k largest of a token, those above 0."""

    k: int


@dataclass(frozen=True)
class BatchTopKGate:
    """The n k largest of n tokens, those above 0. At inference a threshold: what that let through on
    average."""

    k: int


@dataclass(frozen=True)
class JumpReLUGate:
    """p where p > θ, θ learnt so that a token has about l0 latents."""

    l0: float
    weight: float = 1.0  # λ
    bandwidth: float = 0.05  # ε, of p


@dataclass(frozen=True)
class ReLUGate:
    """max(p, 0), held down by λ Σ a."""

    l1: float


GateSpec = TopKGate | BatchTopKGate | JumpReLUGate | ReLUGate


@dataclass(frozen=True)
class StepFigures:
    """What a step saw, before it moved anything."""

    fvu: float  # Σ|y - ŷ|² / Σ|y|² of the batch, y centred
    l0: float
    loss: float


@dataclass(eq=False)
class Coder:
    """Parameters in the scaled spaces. Rows are latents; all float32."""

    gate: GateSpec
    W_enc: Tensor  # (F, d_in)
    b_enc: Tensor  # (F,)
    W_dec: Tensor  # (F, d_out), rows of unit norm
    b_dec: Tensor  # (d_out,)
    W_skip: Tensor | None = None  # (d_in, d_out)
    log_threshold: Tensor | None = None  # (F,)
    bf16: bool = False  # choose latents by bfloat16 pre-activations; their values are float32's all the same
    # BatchTopK: the smallest activation that a batch lets through, averaged over batches.
    batch_threshold: float = 0.0
    quiet: Tensor = field(default_factory=lambda: torch.zeros(0))  # (F,) tokens since a latent last fired

    @classmethod
    def random(
        cls,
        gate: GateSpec,
        size: int,
        x: Tensor,
        y: Tensor,
        skip: bool,
        generator: torch.Generator,
        tied: bool | Tensor,
    ) -> Coder:
        """A start from rows x (n, d_in), y (n, d_out): decoders are outputs of random tokens, mixed with
        noise so that no two are equal, encoders their inputs (`tied`: an autoencoder's, its decoders, or
        those through a matrix (d_out, d_in))."""
        picks = torch.randint(len(y), (size,), generator=generator)
        noise = torch.randn(size, y.shape[1], generator=generator) * y.std()
        W_dec = _unit(y[picks].cpu() + noise)
        if isinstance(tied, Tensor):
            W_enc = W_dec @ tied
        elif tied:
            W_enc = W_dec.clone()
        else:
            W_enc = _unit(x[picks].cpu() + torch.randn(size, x.shape[1], generator=generator) * x.std())
        device = x.device
        coder = cls(
            gate,
            W_enc.to(device),
            torch.zeros(size, device=device),
            W_dec.to(device),
            torch.zeros(y.shape[1], device=device),
            torch.zeros(x.shape[1], y.shape[1], device=device) if skip else None,
            quiet=torch.zeros(size, device=device),
        )
        coder._begin(x[:2048], y[:2048])
        return coder

    def _begin(self, x: Tensor, y: Tensor) -> None:
        """Thresholds that let through about what is wanted of these rows, and the scale of the encoder at
        which the reconstruction is nearest."""
        pre = self.pre_activations(x)
        if isinstance(self.gate, JumpReLUGate | ReLUGate):
            wanted = self.gate.l0 if isinstance(self.gate, JumpReLUGate) else 0.05 * self.size
            level = max(_batch_bound(pre, max(1, round(wanted * len(pre)))), 1e-3)
            if isinstance(self.gate, JumpReLUGate):
                self.log_threshold = torch.full_like(self.b_enc, float(np.log(level)))
            else:
                self.b_enc -= level
                pre = pre - level
        found = self._gated(pre) @ self.W_dec
        scale = float((found * y).sum() / found.pow(2).sum().clamp(min=1e-12))
        scale = min(max(scale, 0.01), 1.0)
        self.W_enc *= scale
        self.b_enc *= scale
        if self.log_threshold is not None:
            self.log_threshold += float(np.log(scale))
        self.batch_threshold = 0.0

    @property
    def size(self) -> int:
        """F."""
        return len(self.b_enc)

    def parameters(self) -> dict[str, Tensor]:
        """What an optimiser moves, by name."""
        named = {"W_enc": self.W_enc, "b_enc": self.b_enc, "W_dec": self.W_dec, "b_dec": self.b_dec}
        if self.W_skip is not None:
            named["W_skip"] = self.W_skip
        if self.log_threshold is not None:
            named["log_threshold"] = self.log_threshold
        return named

    # --- a step ---------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor) -> tuple[StepFigures, dict[str, Tensor], Tensor]:
        """Figures, the gradient of each parameter, and (n,) |y - ŷ|², for x (n, d_in), y (n, d_out)."""
        if x.is_cuda:
            return self.dense(x, y)
        return self.sparse(x, y)

    def pre_activations(self, x: Tensor) -> Tensor:
        """(n, F) float32, through bfloat16 where `bf16` says so."""
        if self.bf16:
            return (x.bfloat16() @ self.W_enc.bfloat16().T).float() + self.b_enc
        return torch.addmm(self.b_enc, x, self.W_enc.T)

    def sparse(self, x: Tensor, y: Tensor) -> tuple[StepFigures, dict[str, Tensor], Tensor]:
        """`step` through the code alone, on the processor."""
        n, inputs, W_dec = len(x), x.numpy(), self.W_dec.numpy()
        candidates = self._candidates(self.pre_activations(x).numpy())
        if self.bf16:
            candidates = exact_values(candidates, inputs, self.W_enc.numpy(), self.b_enc.numpy())
        active = self._active(candidates)  # a: 0 where a candidate only teaches its threshold
        code = candidates._replace(value=active)
        error = y - self.b_dec - torch.from_numpy(decode(code, W_dec))
        if self.W_skip is not None:
            error -= x @ self.W_skip
        squared = error.pow(2).sum(-1)
        g = error * (-2.0 / y.numel())  # ∂L/∂ŷ
        da = through_decoder(code, g.numpy(), W_dec)
        fired = np.bincount(code.latent[active > 0], minlength=self.size)
        l0 = float((active > 0).sum() / n)
        penalty, extra, gradients = self._sparsity(candidates, active, da, l0, n)
        through = np.where(active > 0, da + extra, np.float32(0.0))  # ∂L/∂p
        gradients |= {
            "W_enc": torch.from_numpy(backward(code, through, inputs, self.size)),
            "b_enc": torch.from_numpy(
                np.bincount(code.latent, through, minlength=self.size).astype(np.float32)
            ),
            "W_dec": torch.from_numpy(backward(code, active, g.numpy(), self.size)),
            "b_dec": g.sum(0),
        }
        if self.W_skip is not None:
            gradients["W_skip"] = x.T @ g
        self._settle(gradients, torch.from_numpy(fired), n)
        figures = StepFigures(
            float(squared.sum() / y.pow(2).sum()), l0, float(squared.sum() / y.numel()) + penalty
        )
        return figures, gradients, squared

    def dense(self, x: Tensor, y: Tensor) -> tuple[StepFigures, dict[str, Tensor], Tensor]:
        """`step` with whole matrices (n, F), anywhere."""
        n, pre = len(x), self.pre_activations(x)
        a = self._gated(pre)
        error = y - self.b_dec - a @ self.W_dec
        if self.W_skip is not None:
            error -= x @ self.W_skip
        squared = error.pow(2).sum(-1)
        g = error * (-2.0 / y.numel())
        da = g @ self.W_dec.T
        on = a > 0
        l0 = float(on.sum() / n)
        gradients: dict[str, Tensor] = {}
        penalty, through = 0.0, torch.where(on, da, 0.0)
        match self.gate:
            case ReLUGate(l1=l1):
                penalty = l1 * float(a.sum()) / n
                through = torch.where(on, da + l1 / n, 0.0)
            case JumpReLUGate(l0=target, weight=weight, bandwidth=width):
                assert self.log_threshold is not None
                theta = self.log_threshold.exp()
                near = (pre - theta).abs() < width / 2
                penalty = weight * (l0 / target - 1) ** 2
                slope = 2 * weight * (l0 / target - 1) / (target * n)
                gradients["log_threshold"] = -(near * (da * theta + slope) / width).sum(0) * theta
        gradients |= {
            "W_enc": through.T @ x,
            "b_enc": through.sum(0),
            "W_dec": a.T @ g,
            "b_dec": g.sum(0),
        }
        if self.W_skip is not None:
            gradients["W_skip"] = x.T @ g
        self._settle(gradients, on.sum(0), n)
        figures = StepFigures(
            float(squared.sum() / y.pow(2).sum()), l0, float(squared.sum() / y.numel()) + penalty
        )
        return figures, gradients, squared

    def _candidates(self, pre: np.ndarray) -> Code:
        match self.gate:
            case TopKGate(k=k):
                return top_k(pre, k)
            case BatchTopKGate(k=k):
                return above(pre, np.full(self.size, _batch_bound(pre, k * len(pre)), np.float32))
            case JumpReLUGate(bandwidth=width):
                assert self.log_threshold is not None
                return above(pre, self.log_threshold.exp().numpy() - np.float32(width / 2))
            case ReLUGate():
                return above(pre, np.zeros(self.size, np.float32))

    def _active(self, candidates: Code) -> np.ndarray:
        value = candidates.value
        if isinstance(self.gate, BatchTopKGate) and len(value):
            self._remember(float(value.min()))
        if isinstance(self.gate, JumpReLUGate):
            assert self.log_threshold is not None
            theta = self.log_threshold.exp().numpy()[candidates.latent]
            return np.where(value > theta, value, np.float32(0.0))
        return np.maximum(value, np.float32(0.0))

    def _gated(self, pre: Tensor) -> Tensor:
        match self.gate:
            case TopKGate(k=k):
                # Not topk, whose ties are anyone's: a stable sort takes the smaller latent.
                chosen = pre.sort(dim=-1, descending=True, stable=True).indices[:, :k]
                return torch.zeros_like(pre).scatter(-1, chosen, pre.gather(-1, chosen)).relu()
            case BatchTopKGate(k=k):
                bound = _batch_bound(pre, k * len(pre))
                kept = torch.where(pre > bound, pre, 0.0)
                if bool((kept > 0).any()):
                    self._remember(float(kept[kept > 0].min()))
                return kept
            case JumpReLUGate():
                assert self.log_threshold is not None
                return torch.where(pre > self.log_threshold.exp(), pre, 0.0)
            case ReLUGate():
                return pre.relu()

    def _remember(self, smallest: float) -> None:
        old = self.batch_threshold
        self.batch_threshold = smallest if old == 0.0 else 0.99 * old + 0.01 * smallest

    def _sparsity(
        self, candidates: Code, active: np.ndarray, da: np.ndarray, l0: float, n: int
    ) -> tuple[float, float, dict[str, Tensor]]:
        """(the penalty, what it adds to ∂L/∂a, the thresholds' gradient)."""
        match self.gate:
            case ReLUGate(l1=l1):
                return l1 * float(active.sum(dtype=np.float64)) / n, l1 / n, {}
            case JumpReLUGate(l0=target, weight=weight, bandwidth=width):
                assert self.log_threshold is not None
                theta = self.log_threshold.exp().numpy()
                mine = theta[candidates.latent]
                near = np.abs(candidates.value - mine) < width / 2
                slope = 2 * weight * (l0 / target - 1) / (target * n)
                moved = np.where(near, -(da * mine + slope) / width, 0.0)
                total = np.bincount(candidates.latent, moved, minlength=self.size).astype(np.float32)
                return (
                    weight * (l0 / target - 1) ** 2,
                    0.0,
                    {"log_threshold": torch.from_numpy(total * theta)},
                )
        return 0.0, 0.0, {}

    def _settle(self, gradients: dict[str, Tensor], fired: Tensor, n: int) -> None:
        """The decoders' gradient without its part along them; the count of quiet tokens."""
        g = gradients["W_dec"]
        g -= (g * self.W_dec).sum(-1, keepdim=True) * self.W_dec
        self.quiet += n
        self.quiet[fired > 0] = 0

    # --- between steps --------------------------------------------------------------------------------------

    def rescale(self) -> None:
        """Decoders back to unit norm."""
        self.W_dec /= self.W_dec.norm(dim=-1, keepdim=True).clamp(min=1e-8)

    def revive(self, after: int, x: Tensor, y: Tensor, squared: Tensor, generator: torch.Generator) -> Tensor:
        """Latents that fired on none of the last `after` tokens begin anew, at tokens drawn by how badly they
        are reconstructed. Returns their numbers; an optimiser forgets what it knew of them."""
        dead = (self.quiet >= after).nonzero()[:, 0]
        if not len(dead):
            return dead
        weight = squared.double().cpu()
        picks = torch.multinomial(weight, len(dead), replacement=len(dead) > len(weight), generator=generator)
        picks = picks.to(x.device)
        alive = self.quiet < after
        length = self.W_enc[alive].norm(dim=-1).mean() if bool(alive.any()) else self.W_enc.new_ones(())
        code_free = y[picks] - self.b_dec
        self.W_dec[dead] = _unit(code_free)
        # Loud enough to be among the chosen on its own token, quiet elsewhere.
        self.W_enc[dead] = _unit(x[picks]) * length
        self.b_enc[dead] = 0.0
        if self.log_threshold is not None:
            self.log_threshold[dead] = self.log_threshold[alive].mean() if bool(alive.any()) else 0.0
        self.quiet[dead] = 0
        return dead


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-8)


def _batch_bound(pre: np.ndarray | Tensor, count: int) -> float:
    """The largest number under which all but `count` entries lie, 0 or more: entries above it are chosen. Of
    entries that equal it none is."""
    if isinstance(pre, Tensor):
        flat = pre.flatten()
        return max(float(flat.kthvalue(flat.numel() - count).values), 0.0) if count < flat.numel() else 0.0
    if count >= pre.size:
        return 0.0
    return max(float(np.partition(pre.reshape(-1), pre.size - count - 1)[pre.size - count - 1]), 0.0)
