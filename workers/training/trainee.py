"""One dictionary of a training run: where it stands, its scales, its optimiser; and what it becomes.

A coder works on x' = (x - μ_x)/s_x and y' = (y - μ_y)/s_y, with one mean vector and one number each, taken
from the first tokens harvested. Both are folded into the finished dictionary exactly, up to float32:

    W_enc = s_y e/s_x,   b_enc = s_y (b - e·μ_x/s_x),   θ = s_y θ',   W_dec = d,   b_out = s_y b_dec + μ_y

(and with a skip W' : W_skip = s_y W'/s_x, b_out less μ_x W_skip). Decoders keep unit norm, so an activation
is the length of what it writes, in the units of the output.

Where the error is measured by a metric M (workers.training.metric), y' = (y - μ_y) M^½/s_y, and what is
written comes back:

    W_dec = d M^-½,   b_out = s_y b_dec M^-½ + μ_y,   W_skip = s_y W' M^-½/s_x

Encoder, gate and activations are as they were trained: decoders then have unit norm in the metric, not in
the output's units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ingest.dictionaries import Dictionary, Encoder, JumpReLU, Read, ReLU, ScalarThreshold, TopK, Write
from ingest.dictionaries.types import At, Gate
from ingest.models.capture import Point
from workers.training.coder import BatchTopKGate, Coder, GateSpec, JumpReLUGate, StepFigures, TopKGate
from workers.training.stream import Source, sources_of

__all__ = ["Job", "Trainee"]


@dataclass(frozen=True)
class Job:
    """One dictionary to be trained."""

    set: str
    layer: int
    read: Read
    write: tuple[str, At] | None  # site and side; None: an autoencoder of what is read
    latents: int
    gate: GateSpec
    skip: bool = False
    rate: float = 1e-3
    optimiser: str = "adam"  # or muon
    seed: int = 0
    revive_after: int | None = None  # rows without firing; None: the plan's
    gradients: float = 0.0  # share of the loss's gradients in the error's metric, below 1
    start: str | None = None  # hash of the dictionary that it goes on from

    @property
    def name(self) -> str:
        """`set/L05`."""
        return f"{self.set}/L{self.layer:02d}"

    @property
    def sources(self) -> tuple[Source, Source]:
        """What is read and what is to be given back."""
        return sources_of(self.layer, self.read, self.write)

    @property
    def point(self) -> Point:
        """Where it writes."""
        return (self.layer, *(self.write or _written(self.read)))


class Trainee:
    """A job at work."""

    def __init__(
        self,
        job: Job,
        x: Tensor,
        y: Tensor,
        device: str = "cpu",
        bf16: bool = False,
        root: Tensor | None = None,
    ) -> None:
        """x (n, d_in), y (n, d_out): the first rows, from which scales and starting points come. root: M^½
        (d_out, d_out) float64."""
        self.job = job
        generator = torch.Generator().manual_seed(job.seed)
        self.mean_x, self.scale_x = _scales(x)
        self.mean_y, self.scale_y = _scales(y)
        self.root = root
        if root is not None:
            self.scale_y = float(((y.double() - self.mean_y) @ root).pow(2).mean().sqrt()) or 1.0
        some = torch.randperm(len(x), generator=generator)[:16384]
        to = torch.device(device)
        tied: bool | Tensor = job.write is None
        if tied and root is not None:  # e·x' = d·y'
            tied = (root * (self.scale_x / self.scale_y)).float()
        self.coder = Coder.random(
            job.gate,
            job.latents,
            ((x[some] - self.mean_x) / self.scale_x).to(to),
            self._given(y[some]).to(to),
            job.skip,
            generator,
            tied=tied,
        )
        self.coder.bf16 = bf16
        self.fvu, self.l0, self.steps, self.revived = 1.0, 0.0, 0, 0
        self._make_optimisers()

    def _given(self, y: Tensor) -> Tensor:
        """y' of rows (n, d_out)."""
        if self.root is None:
            return (y - self.mean_y) / self.scale_y
        return (y - self.mean_y) @ (self.root / self.scale_y).float()

    def _make_optimisers(self) -> None:
        parameters = self.coder.parameters()
        rows = ["W_enc", "W_dec", "W_skip"] if self.job.optimiser == "muon" else []
        matrices = {name: p for name, p in parameters.items() if name in rows}
        others = {name: p for name, p in parameters.items() if name not in rows}
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(list(others.values()), lr=self.job.rate, betas=(0.9, 0.999), fused=True)
        ]
        if matrices:
            muon = torch.optim.Muon(
                list(matrices.values()), lr=self.job.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
            self.optimisers.append(muon)

    def step(self, x: Tensor, y: Tensor, factor: float, revive_after: int | None) -> StepFigures:
        """One step on raw rows x (n, d_in), y (n, d_out), the rate times `factor`. Latents quiet for
        `revive_after` tokens begin anew."""
        to = self.coder.W_enc.device
        x = ((x - self.mean_x) / self.scale_x).to(to)
        y = self._given(y).to(to)
        figures, gradients, squared = self.coder.step(x, y)
        for name, parameter in self.coder.parameters().items():
            parameter.grad = gradients[name]
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.job.rate * factor
            optimiser.step()
        self.coder.rescale()
        if revive_after is not None:
            dead = self.coder.revive(revive_after, x, y, squared, self._generator())
            self._forget(dead)
            self.revived += len(dead)
        self.steps += 1
        self.fvu = figures.fvu if self.steps == 1 else 0.95 * self.fvu + 0.05 * figures.fvu
        self.l0 = figures.l0 if self.steps == 1 else 0.95 * self.l0 + 0.05 * figures.l0
        return figures

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed((self.job.seed << 32) + self.steps)

    def _forget(self, dead: Tensor) -> None:
        """What the optimisers remember of these latents' rows."""
        if not len(dead):
            return
        for name, parameter in self.coder.parameters().items():
            if name in ("W_skip", "b_dec"):
                continue
            for optimiser in self.optimisers:
                for value in optimiser.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        value[dead] = 0.0

    def dead(self, after: int) -> int:
        """Latents quiet for the last `after` tokens."""
        return int((self.coder.quiet >= after).sum())

    # --- where it begins, what it becomes -------------------------------------------------------------------

    def go_on_from(self, dictionary: Dictionary) -> None:
        """Begins at a finished dictionary instead, in these scaled spaces. Decoders get unit norm there and
        encoders the norm they had, which leaves what a latent writes as it was; a TopK chooses by it."""
        coder, (encoder,), (written,) = self.coder, dictionary.encoders, dictionary.writes
        W_enc, W_dec = encoder.W_enc.double(), written.W_dec.double()
        b_enc = encoder.b_enc.double() + W_enc @ self.mean_x.double()
        b_out = torch.zeros_like(self.mean_y) if written.b_out is None else written.b_out
        b_dec = b_out.double() - self.mean_y.double()
        skip = None if dictionary.W_skip is None else dictionary.W_skip.double()
        if skip is not None:
            b_dec = b_dec + self.mean_x.double() @ skip
        if self.root is not None:
            W_dec, b_dec, skip = (
                W_dec @ self.root,
                b_dec @ self.root,
                None if skip is None else skip @ self.root,
            )
        norm = W_dec.norm(dim=-1).clamp(min=1e-8)
        found = {
            "W_enc": W_enc * (norm * self.scale_x / self.scale_y)[:, None],
            "b_enc": b_enc * norm / self.scale_y,
            "W_dec": W_dec / norm[:, None],
            "b_dec": b_dec / self.scale_y,
        }
        if coder.W_skip is not None:
            assert skip is not None
            found["W_skip"] = skip * (self.scale_x / self.scale_y)
        if coder.log_threshold is not None:
            assert isinstance(dictionary.gate, JumpReLU)
            found["log_threshold"] = (dictionary.gate.threshold.double() * norm / self.scale_y).log()
        with torch.no_grad():
            for name, parameter in coder.parameters().items():
                parameter.copy_(found[name])

    def dictionary(self) -> Dictionary:
        """The dictionary in the raw spaces: float32, on the processor."""
        job, coder = self.job, self.coder
        ratio = self.scale_y / self.scale_x
        W_enc, W_dec = coder.W_enc.cpu().double() * ratio, coder.W_dec.cpu().double()
        b_enc = coder.b_enc.cpu().double() * self.scale_y - W_enc @ self.mean_x.double()
        b_out = coder.b_dec.cpu().double() * self.scale_y
        skip = None if coder.W_skip is None else coder.W_skip.cpu().double() * ratio
        if self.root is not None:
            back = torch.linalg.inv(self.root)
            W_dec, b_out, skip = W_dec @ back, b_out @ back, None if skip is None else skip @ back
        b_out = b_out + self.mean_y.double()
        if skip is not None:
            b_out = b_out - self.mean_x.double() @ skip
        site, at = job.write or _written(job.read)
        return Dictionary(
            set=job.set,
            kind="sae" if job.write is None else "transcoder",
            layer=job.layer,
            read=job.read,
            encoders=(Encoder("in", W_enc.float().contiguous(), b_enc.float()),),
            writes=(Write(job.layer, site, at, W_dec.float().contiguous(), b_out.float()),),
            gate=self._gate(),
            W_skip=None if skip is None else skip.float().contiguous(),
        )

    def _gate(self) -> Gate:
        match self.job.gate:
            case TopKGate(k=k):
                return TopK(k)
            case BatchTopKGate():
                return ScalarThreshold(float(self.coder.batch_threshold * self.scale_y))
            case JumpReLUGate():
                assert self.coder.log_threshold is not None
                return JumpReLU(self.coder.log_threshold.exp().cpu() * self.scale_y, relu_too=True)
        return ReLU()

    # --- kept between runs ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: tensors and numbers."""
        coder = self.coder
        return {
            "parameters": {name: p.detach().clone() for name, p in coder.parameters().items()},
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "quiet": coder.quiet,
            "batch_threshold": coder.batch_threshold,
            "scales": [self.mean_x, self.scale_x, self.mean_y, self.scale_y],
            "root": self.root,
            "figures": [self.fvu, self.l0, self.steps, self.revived],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        with torch.no_grad():
            for name, parameter in self.coder.parameters().items():
                parameter.copy_(state["parameters"][name])
            self.coder.quiet.copy_(state["quiet"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.coder.batch_threshold = state["batch_threshold"]
        self.mean_x, self.scale_x, self.mean_y, self.scale_y = state["scales"]
        self.root = state["root"]
        self.fvu, self.l0, self.steps, self.revived = state["figures"]


def _scales(rows: Tensor) -> tuple[Tensor, float]:
    """The mean row, and the root mean square of what is left over all components."""
    mean = rows.double().mean(0)
    scale = float((rows.double() - mean).pow(2).mean().sqrt())
    return mean.float(), scale or 1.0


def _written(read: Read) -> tuple[str, At]:
    """Where an autoencoder's output goes: back to what it reads."""
    if read.site in ("mlp.out", "attn.out"):
        return read.site.removesuffix(".out"), At.MODULE
    return read.site, At.MODULE if read.site == "attn.z" else At.STREAM
