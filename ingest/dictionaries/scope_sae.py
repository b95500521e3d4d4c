"""One SAE or transcoder of OpenMOSS' library, of whichever layout: its files, its shapes, its Dictionary.

What the layouts do differently is which keys they use, which way their matrices lie and how their scales are
folded (ingest.dictionaries.scope has the formulas).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.configs import Fields, read_json
from ingest.dictionaries.found import Found, check_width
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.scope import (
    NORM_KEY,
    Config,
    Scale,
    Site,
    gate_of,
    language_model,
    norms_of,
    site_of,
)
from ingest.dictionaries.tensor_files import (
    Entry,
    check_finite,
    check_keys,
    check_shape,
    read_header,
    read_metadata,
    read_part,
)
from ingest.dictionaries.types import Dictionary, Encoder, Gate, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.models import Facts

__all__ = [
    "CONFIG",
    "FILES",
    "Folded",
    "Keys",
    "Weights",
    "configured",
    "fold",
    "found_sae",
    "holds",
    "keys_in",
    "other_container",
    "weights_of",
]

CONFIG = "config.json"
FILES = (CONFIG, "sae_weights.safetensors")
# In the library's own order.
_WEIGHTS = ("sae_weights.safetensors", "checkpoints/pruned.safetensors", "checkpoints/final.safetensors")
_OTHERS = ("sae_weights.pt", "sae_weights.dcp", "checkpoints/final.pt", "checkpoints/final.dcp")


@dataclass(frozen=True)
class Keys:
    """The names of a layout's tensors. `turned`: (d, F) and not (F, d)."""

    encoder: str
    encoder_bias: str
    decoder: str
    decoder_bias: str
    threshold: str | None
    encoder_turned: bool
    decoder_turned: bool


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of one dictionary as the file has them, but float32 and (F, d); free to be changed."""

    W_enc: Tensor  # (F, d)
    b_enc: Tensor  # (F,)
    W_dec: Tensor  # (F, d)
    b_dec: Tensor | None  # (d,)
    log_threshold: Tensor | None  # (F,)


@dataclass(frozen=True, eq=False)
class Folded:
    """The same on raw activations."""

    weights: Weights
    gate: Gate
    decoder_norm_in_gate: Tensor | None
    b_in: Tensor | None


Fold = Callable[[Weights, Config, Scale], Folded]


def weights_of(folder: Path) -> Path | None:
    """The weights in a folder that the library would take; None where none are safetensors."""
    return next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)


def other_container(folder: Path) -> Path | None:
    """The weights in a folder as PyTorch's own containers, which are not read."""
    return next((folder / name for name in _OTHERS if (folder / name).exists()), None)


def keys_in(folder: Path) -> frozenset[str]:
    """The names of a folder's tensors; none where its file cannot be read, which `scan` reports."""
    path = weights_of(folder)
    try:
        return frozenset(read_header(path)) if path else frozenset()
    except InputError:
        return frozenset()


def holds(folder: Path) -> bool:
    """config.json beside weights, in whatever container."""
    return (folder / CONFIG).is_file() and bool(weights_of(folder) or other_container(folder))


def fold(weights: Weights, config: Config, scale: Scale) -> Folded:
    """The scales and the gate's decoder norm, folded exactly: the layouts of 2025 and later."""
    from torch.linalg import vector_norm

    gate, by_norm = gate_of(config, scale.into, vector_norm(weights.W_dec, dim=1), weights.log_threshold)
    b_in = weights.b_dec / scale.into if config.centred and weights.b_dec is not None else None
    weights.b_enc.div_(scale.into)
    weights.W_dec.mul_(scale.into / scale.out)
    if weights.b_dec is not None:
        weights.b_dec.div_(scale.out)
    return Folded(weights, gate, by_norm, b_in)


def found_sae(
    folder: Path,
    keys: Keys,
    config: Config,
    fields: Fields,
    facts: Facts | None,
    declared: Declared,
    *,
    folding: Fold = fold,
    activation: str = "",
    norms: Fields | None = None,
) -> Found:
    """The dictionary in a folder, all of its headers checked. `fields` are understood but for the hooks.

    Raises InputError.
    """
    path = weights_of(folder)
    if path is None:
        raise InputError(
            f"{other_container(folder)}: only safetensors are read; expected sae_weights.safetensors: load it"
            " with the library, on one device, and save it with save_pretrained"
        )
    hook_in = fields.take("hook_point_in", str)
    hook_out = fields.take("hook_point_out", str, hook_in, note="hook_point_out is not said: what is read")
    fields.done()
    places = (fields.place("hook_point_in"), fields.place("hook_point_out"))
    site = site_of(hook_in, hook_out, places, facts, declared)
    header = read_header(path)
    threshold = keys.threshold if config.activation == "jumprelu" else None
    _check(path, header, keys, threshold, config)
    check_width(f"{path}: {keys.encoder}", config.d_model, site.read.site, facts)
    check_width(f"{path}: {keys.decoder}", config.d_model, site.write[1], facts)
    scale, told = norms_of(path, header, (hook_in, hook_out), config, norms)
    kind = "sae" if hook_in == hook_out else "transcoder"
    own = {key: entry for key, entry in header.items() if not key.startswith(NORM_KEY)}
    chosen_by_norm = config.activation == "topk" and config.decoder_norm and folding is fold
    beside = config.latents * chosen_by_norm + config.d_model * (config.centred and config.bias)
    version = read_metadata(path).get("version")
    return Found(
        where=folder,
        kind=kind,
        layer=site.layer,
        size=config.latents,
        read=site.read,
        writes=(site.write,),
        activation=activation or config.named,
        bytes=4 * (sum(entry.count for entry in own.values()) + beside),
        dtypes=frozenset(entry.dtype for entry in own.values()),
        widths=(config.d_model, config.d_model),
        load=partial(_load, path, header, keys, threshold, config, scale, site, kind, folding),
        l0=float(config.k) if config.activation == "topk" else None,
        provenance={
            **({"library_version": version} if version else {}),
            **language_model(folder),
            "norm_activation": fields.values["norm_activation"],
            **told,
        },
        notes=(*fields.notes, *site.notes),
    )


def _check(
    path: Path, header: Mapping[str, Entry], keys: Keys, threshold: str | None, config: Config
) -> None:
    required = {keys.encoder, keys.encoder_bias, keys.decoder}
    required |= {keys.decoder_bias} if config.bias else set()
    required |= {threshold} if threshold else set()
    check_keys(path, header, required, {key for key in header if key.startswith(NORM_KEY)})
    size, d = config.latents, config.d_model
    told = f"the configuration says {size} latents of d_model {d}"
    check_shape(
        path, keys.encoder, header[keys.encoder], (d, size) if keys.encoder_turned else (size, d), told
    )
    check_shape(
        path, keys.decoder, header[keys.decoder], (d, size) if keys.decoder_turned else (size, d), told
    )
    for key, length in ((keys.encoder_bias, size), (threshold, size), (keys.decoder_bias, d)):
        if key is not None and key in header:
            check_shape(path, key, header[key], (length,), told)


def _load(
    path: Path,
    header: Mapping[str, Entry],
    keys: Keys,
    threshold: str | None,
    config: Config,
    scale: Scale,
    site: Site,
    kind: str,
    folding: Fold,
) -> Dictionary:
    # One tensor after the other: a norm that does not apply may be anything, NaN too.
    part = partial(read_part, path, header)

    def matrix(key: str, turned: bool) -> Tensor:
        return part(key).T.contiguous() if turned else part(key)

    folded = folding(
        Weights(
            matrix(keys.encoder, keys.encoder_turned),
            part(keys.encoder_bias),
            matrix(keys.decoder, keys.decoder_turned),
            part(keys.decoder_bias) if config.bias else None,
            part(threshold) if threshold else None,
        ),
        config,
        scale,
    )
    weights, (written, where, at) = folded.weights, site.write
    for what, tensor in (
        ("encoder", weights.W_enc),
        ("encoder's bias", weights.b_enc),
        ("decoder", weights.W_dec),
        ("decoder's bias", weights.b_dec),
    ):
        if tensor is not None:
            check_finite(path, f"the {what} with its norms folded in", tensor, "F32")
    return Dictionary(
        set="",
        kind=kind,
        layer=site.layer,
        read=site.read,
        encoders=(Encoder("in", weights.W_enc, weights.b_enc),),
        writes=(Write(written, where, at, weights.W_dec, weights.b_dec),),
        gate=folded.gate,
        b_in=folded.b_in,
        input_norm=config.input_norm,
        decoder_norm_in_gate=folded.decoder_norm_in_gate,
    )


def configured(folder: Path, types: tuple[str, ...] = ("sae",)) -> Fields:
    """config.json of a folder; its sae_type is one of `types`. Raises InputError, for a kind that is none of
    ours by its name."""
    fields = Fields(folder / CONFIG, read_json(folder / CONFIG))
    kind = fields.take("sae_type", str, "sae")
    refused = {
        "lorsa": "replaces an attention layer: it reads all tokens before its own",
        "molt": "is a mixture of linear transforms: it has no decoder row for each latent",
        "crosscoder": "reads several layers at once",
        "mixcoder": "reads several modalities at once",
    }
    if kind in refused:
        raise InputError(
            f"{fields.place('sae_type')}: {kind} {refused[kind]}, which is not supported; expected sae or clt"
        )
    if kind not in types:
        raise InputError(f"{fields.place('sae_type')}: expected {' or '.join(types)}, found {kind!r}")
    return fields
