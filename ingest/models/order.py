"""In which order things are written to the residual stream, and what each reader sees (methods: Which pairs
have edges).

Write events in order: the embedding 0, then attn(L) 1 + 2L and mlp(L) 2 + 2L for each layer. A reader sees
every event before its cut: an edge source → target is DIRECT where event(source) < cut(target), and passes a
head of layer L where event(source) < 1 + 2L < cut(target). Needs facts alone, no tensors.
"""

from __future__ import annotations

from ingest.models.facts import Facts

__all__ = ["read_cut", "write_event"]


def write_event(facts: Facts, site: str, layer: int) -> int:
    """When something is written. A residual stream's dictionary re-describes what was written before its
    cut."""
    if site in ("attn", "attn.z", "attn.out"):
        return 1 + 2 * layer
    if site in ("mlp", "mlp.out"):
        return 2 + 2 * layer
    if site == "embed":
        return 0
    if site in ("resid_pre", "resid_mid", "resid_post"):
        return read_cut(facts, site, layer) - 1
    raise ValueError(f"write site {site!r} is not known")


def read_cut(facts: Facts, site: str, layer: int) -> int:
    """A reader sees every event before its cut."""
    if site in ("attn.in", "resid_pre"):
        return 1 + 2 * layer
    if site in ("mlp.in", "resid_mid"):
        return 1 + 2 * layer if facts.parallel and site == "mlp.in" else 2 + 2 * layer
    if site == "resid_post":
        return 3 + 2 * layer
    if site == "embed":
        return 1
    if site == "final":
        return 1 + 2 * facts.n_layers
    if site in ("attn.z", "attn.out"):
        return 1 + 2 * layer  # what the layer's own heads read; no stream is read directly
    if site == "mlp.out":
        return read_cut(facts, "mlp.in", layer)
    raise ValueError(f"read site {site!r} is not known")
