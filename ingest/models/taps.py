"""Where in a forward pass what dictionaries read and write is to be seen: from sites to modules.

The sites are those of ingest.models.capture; a pass keeps a few tensors by name and layer, and what is asked
for comes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ingest.dictionaries.types import WRITE_SITES, At, Read, Space
from ingest.errors import InputError
from ingest.models.layers import component
from ingest.models.residual import ResidualModel
from ingest.models.rows import Affine

__all__ = ["Found", "Point", "Reads", "Taps", "Value", "point_read"]

Point = tuple[int, str, At]  # layer, one of WRITE_SITES, before or behind what follows a branch
Reads = Mapping[tuple[int, Read], torch.Tensor]
Found = dict[tuple[str, int], torch.Tensor]  # what a pass keeps
Value = Callable[[Found], torch.Tensor]
_RESIDUAL = ("embed", "resid_pre", "resid_mid", "resid_post")


def point_read(layer: int, read: Read, at: At = At.MODULE) -> Point | None:
    """The point whose value a dictionary reads, where that is one that can be written too; None for what
    stands behind a norm, and for a branch's input."""
    site = {"mlp.out": "mlp", "attn.out": "attn", "attn.z": "attn.z"}.get(read.site)
    if site is not None:
        return layer, site, at if site != "attn.z" else At.MODULE
    if read.site in _RESIDUAL and read.space == Space.RAW:
        return layer, read.site, At.MODULE
    return None


class Taps:
    """Which tensors a pass must keep, by name and layer, and how what is asked for comes from them."""

    def __init__(self, model: ResidualModel, shape: tuple[int, int]) -> None:
        self.model, self.shape = model, shape
        self.wanted: set[tuple[str, int]] = set()

    def of_read(self, layer: int, read: Read) -> Value:
        """Raises InputError for a space that the site does not have."""
        facts, site, space = self.model.facts, read.site, read.space
        self._layer(layer, site)
        point = point_read(layer, read)
        if point is not None:
            return self.of_point(point)
        if space in (Space.BRANCH_OUTPUT, Space.Z) or site == "embed":
            raise InputError(f"{site} has no space {str(space)!r}: nothing can be read there")
        if space == Space.NORMALISED_WITH_GAIN and site in ("attn.in", "mlp.in"):
            return self.tap(site, layer)
        stream = self._stream(layer, site)
        if space == Space.RAW:
            return stream
        norm, there = self._norm(layer, site), facts.norm_before
        if site == "resid_post" and layer + 1 == facts.n_layers:
            there = True
        if not there:
            return stream
        gain = space == Space.NORMALISED_WITH_GAIN
        eps = facts.norm.eps
        return lambda found: _normalised(stream(found), norm, eps, gain)

    def of_point(self, point: Point) -> Value:
        layer, site, at = point
        self._layer(layer, site)
        if site not in WRITE_SITES:
            raise InputError(f"{site!r} is nothing that can be written; known: {', '.join(WRITE_SITES)}")
        if site in _RESIDUAL:
            return self._stream(layer, site)
        if site == "attn.z":
            return self.tap("z", layer)
        return self._branch(layer, site, at)

    def _branch(self, layer: int, site: str, at: At) -> Value:
        facts, m = self.model.facts, self.model.facts.branch_multiplier
        if at == At.MODULE:
            return self.tap(f"{site}_module", layer)
        value = self.tap(f"{site}_post" if facts.norm_after else f"{site}_module", layer)
        return value if m == 1.0 else lambda found: value(found) * m

    def _stream(self, layer: int, site: str) -> Value:
        pre = ("attn.in", "resid_pre", "embed") + (("mlp.in",) if self.model.facts.parallel else ())
        if site in pre:
            return self.tap("resid_pre", layer)
        if site == "resid_post":
            return self.tap("resid_post", layer)
        before, added = self.tap("resid_pre", layer), self._branch(layer, "attn", At.STREAM)
        return lambda found: before(found) + added(found)

    def _norm(self, layer: int, site: str) -> Affine:
        layers = self.model.layers
        if site in ("attn.in", "resid_pre"):
            return layers[layer].ln1
        if site in ("mlp.in", "resid_mid"):
            return layers[layer].ln2
        return layers[layer + 1].ln1 if layer + 1 < len(layers) else self.model.ln_final

    def tap(self, name: str, layer: int) -> Value:
        self.wanted.add((name, layer))
        return lambda found: found[name, layer]

    def _layer(self, layer: int, site: str) -> None:
        n = self.model.facts.n_layers
        if not 0 <= layer < n or (site == "embed" and layer != 0):
            raise InputError(
                f"{site} of layer {layer}: {self.model.name} has layers 0 to {n - 1}, and embed is layer 0"
            )

    def place(self, name: str, layer: int) -> tuple[Any, bool, int]:
        """(module, whether its output is meant and not its input, width)."""
        facts, block = self.model.facts, self.model.bridge.blocks[layer]
        d = facts.d_model
        places: dict[str, Callable[[], tuple[Any, bool, int]]] = {
            "resid_pre": lambda: (block, False, d),
            "attn.in": lambda: (block.attn.v, False, d),
            "z": lambda: (block.attn.o, False, facts.n_heads * facts.d_head),
            "attn_module": lambda: (block.attn.o, True, d),
            "attn_post": lambda: (block.ln1_post, True, d),
            "mlp.in": lambda: (component(block.mlp, "in"), False, d),
            "mlp_module": lambda: (component(block.mlp, "out"), True, d),
            "mlp_post": lambda: (block.ln2_post, True, d),
            "resid_post": lambda: (block, True, d),
        }
        return places[name]()


def _normalised(x: torch.Tensor, norm: Affine, eps: float, gain: bool) -> torch.Tensor:
    """(x C)/σ, or ((x C) ⊙ γ)/σ + β, rows (…, d), in x's own type."""
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if gain and norm.gain is not None:
        x = x * norm.gain.to(x)
    return x + norm.bias.to(x) if gain and norm.bias is not None else x
