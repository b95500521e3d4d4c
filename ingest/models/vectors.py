"""Reading and writing vectors of a dictionary's latents in the residual basis (methods: A model seen from its
residual stream). float64, elementwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ingest.dictionaries.types import LayerNormInput
from ingest.errors import InputError
from ingest.models.residual import ResidualModel
from ingest.models.rows import Affine, centre

if TYPE_CHECKING:
    from ingest.dictionaries import Dictionary

__all__ = ["encoder_vectors", "reading_vectors", "writing_vectors"]


def reading_vectors(model: ResidualModel, dictionary: Dictionary, reading: str = "in") -> torch.Tensor:
    """ρ (F, d_model): a latent's pre-activation gains x · ρ / σ from a vector x in the stream.

    By what the dictionary reads: normalised with gain `(e ⊙ γ) C`; normalised `e C`; the raw stream e. Where
    the dictionary normalises its input itself, that norm's centring is in, its scale frozen like σ.
    Raises InputError for a dictionary that reads no stream.
    """
    site, space = dictionary.read.site, str(dictionary.read.space)
    if site in ("mlp.out", "attn.out", "attn.z") or space in ("branch output", "z"):
        raise InputError(f"{dictionary.set}: reads {site}, which is no stream: it has no reading vectors")
    e = encoder_vectors(model, dictionary, reading)
    if space == "raw":
        return e
    norm = _norm_read(model, site, dictionary.layer)
    return norm.read_back(e) if space == "normalised with gain" else Affine(norm.centred).read_back(e)


def encoder_vectors(model: ResidualModel, dictionary: Dictionary, reading: str = "in") -> torch.Tensor:
    """e (F, d_in): the same at the site itself, for a dictionary that reads a branch's output or the heads'
    outputs side by side: what its pre-activation gains from a vector there. A norm of the dictionary's own is
    in as above.

    Raises InputError for vectors of another length than the model's at that site.
    """
    encoder = next((one for one in dictionary.encoders if one.reading == reading), None)
    if encoder is None:
        raise InputError(f"{dictionary.set}: has no reading {reading!r}")
    e = encoder.W_enc.double()
    facts, z = model.facts, dictionary.read.site == "attn.z"
    width = facts.n_heads * facts.d_head if z else facts.d_model
    if e.shape[1] != width:
        what = "n_heads · d_head" if z else "d_model"
        raise InputError(
            f"{dictionary.set}: reads vectors of length {e.shape[1]}; {model.name} has {what} {width}"
        )
    return centre(e) if isinstance(dictionary.input_norm, LayerNormInput) else e


def _norm_read(model: ResidualModel, site: str, layer: int) -> Affine:
    norms = model.layers[layer]
    if site in ("attn.in", "resid_pre"):
        return norms.ln1
    if site in ("mlp.in", "resid_mid"):
        return norms.ln2
    if site == "resid_post" and layer + 1 == model.facts.n_layers:
        return model.ln_final
    if site == "resid_post":
        return model.layers[layer + 1].ln1
    raise InputError(f"{site}: no norm reads there; only the raw stream can be read")


def writing_vectors(model: ResidualModel, dictionary: Dictionary, cut: int | None = None) -> torch.Tensor:
    """ω (F, d_model): what a latent of activation 1 adds to the stream, frozen scales left out.

    Of several writes (a cross-layer transcoder) those before `cut` are summed; behind a norm each has its
    own frozen scale and there is no one sum, so that is refused. Raises InputError for a write that joins
    no stream of this model's width.
    """
    total = None
    writes = [one for one in dictionary.writes if cut is None or model.event(one.site, one.layer) < cut]
    if len(writes) > 1 and model.facts.norm_after:
        raise InputError(
            f"{dictionary.set}: writes in {len(writes)} layers, each behind a norm with its own scale: there "
            f"is no input-invariant sum on {model.facts.architecture}"
        )
    for write in writes:
        omega = _joined(model, dictionary, write)
        total = omega if total is None else total + omega
    if total is None:
        return torch.zeros(dictionary.size, model.facts.d_model, dtype=torch.float64)
    return total


def _joined(model: ResidualModel, dictionary: Dictionary, write: object) -> torch.Tensor:
    site, layer, at = write.site, write.layer, str(write.at)  # type: ignore[attr-defined]
    d = write.W_dec.double()  # type: ignore[attr-defined]
    if site == "attn.z":
        return _through_heads(model, layer, d)
    if d.shape[1] != model.facts.d_model:
        raise InputError(
            f"{dictionary.set}: writes vectors of length {d.shape[1]}; {model.name} has d_model "
            f"{model.facts.d_model}"
        )
    branch = {"mlp": "mlp", "attn": "attn"}.get(site)
    return model.joining(layer, branch, d) if branch and at == "module" else d


def _through_heads(model: ResidualModel, layer: int, d: torch.Tensor) -> torch.Tensor:
    """Σ_h d[h] W_O[h] for rows d (F, n_heads · d_head)."""
    w_o = model.W_O(layer).flatten(0, 1)  # (n_heads · d_head, d_model)
    if d.shape[1] != len(w_o):
        raise InputError(f"layer {layer}: writes z of length {d.shape[1]}; the heads have {len(w_o)}")
    total = torch.zeros(len(d), w_o.shape[1], dtype=torch.float64)
    for at in range(len(w_o)):  # one component after the other: the order is fixed, no BLAS
        total += d[:, at, None] * w_o[at]
    return total
