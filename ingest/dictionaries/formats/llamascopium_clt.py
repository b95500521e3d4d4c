"""Llamascopium's cross-layer transcoders: `config.json` and one `sae_weights.safetensors` for all layers.

    W_E (L, d, F)  b_E (L, F)          one encoder for each layer read, hook_points_in
    W_D.j (j + 1, F, d)  b_D.j (d)     grouped by the layer written, hook_points_out: from layers 0 to j
    activation_function.log_jumprelu_threshold (L, F)
    dataset_average_activation_norm.HOOK ()

    out_j = sum over i <= j of a_i @ W_D.j[i], plus b_D.j once

(circuit-tracer groups by the layer read.) The gate's decoder norm is that of all of a latent's targets
together, in the file's own units: the targets' scales differ. Of one layer only what it needs is read. The
bias of a layer written goes with that layer's own latents. ingest.dictionaries.scope has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.configs import Fields
from ingest.dictionaries.found import Found, check_width, folders_of, layout_of
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout
from ingest.dictionaries.scope import (
    NORM_KEY,
    Config,
    Scale,
    Site,
    config_of,
    gate_of,
    language_model,
    norms_of,
    site_of,
)
from ingest.dictionaries.scope_sae import FILES, configured, holds, keys_in, weights_of
from ingest.dictionaries.tensor_files import (
    Entry,
    check_finite,
    check_keys,
    check_shape,
    read_header,
    read_metadata,
    read_part,
)
from ingest.dictionaries.types import Dictionary, Encoder, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_THRESHOLD = "activation_function.log_jumprelu_threshold"


@dataclass(frozen=True)
class LlamascopiumCLT:
    name: str = "llamascopium-clt"
    hub_files: tuple[str, ...] = ("*config.json", "*sae_weights.safetensors")

    def recognises(self, where: Path) -> bool:
        """config.json beside weights with W_E and W_D.0."""
        folders = folders_of(where, holds, FILES)
        return bool(folders) and {"W_E", "W_D.0"} <= keys_in(folders[0])

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(f"format {self.name!r} needs a path: the folder with {' and '.join(FILES)}")
        folders = folders_of(where, holds, FILES)
        if len(folders) != 1:
            listed = ", ".join(map(str, folders[:4])) or "none"
            raise InputError(
                f"{where}: expected one folder with {' and '.join(FILES)}, found {listed}; give the path of"
                " one"
            )
        if declared.layer is not None:
            raise InputError(f"{where}: holds all layers in one file; leave layer out")
        found = _found(folders[0], facts, declared)
        return layout_of(self.name, where, found, facts, layers)


@dataclass(frozen=True, eq=False)
class _Stack:
    """All layers by their headers."""

    path: Path
    header: Mapping[str, Entry]
    config: Config
    sites: tuple[Site, ...]
    scales: tuple[Scale, ...]

    @property
    def depth(self) -> int:
        return len(self.sites)

    def bytes(self, source: int) -> int:
        """Of the latents that read the layer of this number, once loaded."""
        size, d = self.config.latents, self.config.d_model
        by_latent = self.config.activation == "jumprelu" or (
            self.config.activation == "topk" and self.config.decoder_norm
        )
        return 4 * (size * d * (1 + self.depth - source) + size * (1 + by_latent) + d)


def _found(folder: Path, facts: Facts | None, declared: Declared) -> list[Found]:
    fields = configured(folder, ("clt",))
    config = config_of(fields)
    hooks = _hooks(fields)
    fields.ignore("jump_relu_threshold")
    fields.done()
    if config.centred:
        raise InputError(
            f"{fields.place('apply_decoder_bias_to_pre_encoder')}: a cross-layer transcoder has a decoder"
            " bias for each layer written and none for its input; expected false"
        )
    sites = tuple(
        site_of(*pair, (fields.place("hook_points_in"), fields.place("hook_points_out")), facts, declared)
        for pair in hooks
    )
    for before, after in pairwise(sites):
        if not (before.layer < after.layer and before.write[0] < after.write[0]):
            raise InputError(
                f"{fields.place('hook_points_in')}: expected layers in order, each once, found {before.layer}"
                f" and then {after.layer}, written at {before.write[0]} and {after.write[0]}"
            )
    path = weights_of(folder)
    if path is None:
        raise InputError(f"{folder}: only safetensors are read; expected sae_weights.safetensors")
    header = read_header(path)
    _check(path, header, config, len(hooks))
    for site in sites:
        check_width(f"{path}: W_E", config.d_model, site.read.site, facts)
        check_width(f"{path}: W_D", config.d_model, site.write[1], facts)
    scales = tuple(norms_of(path, header, pair, config)[0] for pair in hooks)
    stack = _Stack(path, header, config, sites, scales)
    version = read_metadata(path).get("version")
    return [
        Found(
            where=folder,
            kind="cross-layer transcoder",
            layer=site.layer,
            size=config.latents,
            read=site.read,
            writes=tuple(later.write for later in sites[source:]),
            activation=config.named,
            bytes=stack.bytes(source),
            dtypes=frozenset(e.dtype for key, e in header.items() if not key.startswith(NORM_KEY)),
            widths=(config.d_model, config.d_model),
            load=partial(_load, stack, source),
            l0=float(config.k) if config.activation == "topk" else None,
            provenance={
                **({"library_version": version} if version else {}),
                **language_model(folder),
                "norm_activation": config.norm,
            },
            notes=(*fields.notes, *site.notes),
        )
        for source, site in enumerate(sites)
    ]


def _hooks(fields: Fields) -> list[tuple[str, str]]:
    read, written = (fields.take(f"hook_points_{side}", list) for side in ("in", "out"))
    if not read or len(read) != len(written):
        raise InputError(
            f"{fields.place('hook_points_in')}: expected as many hooks as hook_points_out, at least one,"
            f" found {len(read)} and {len(written)}"
        )
    return list(zip(read, written, strict=True))


def _check(path: Path, header: Mapping[str, Entry], config: Config, depth: int) -> None:
    per_layer = {f"{key}.{layer}" for key in ("W_D", "b_D") for layer in range(depth)}
    required = {"W_E", "b_E", *per_layer} | ({_THRESHOLD} if config.activation == "jumprelu" else set())
    check_keys(path, header, required, {key for key in header if key.startswith(NORM_KEY)})
    size, d = config.latents, config.d_model
    told = f"the configuration says {depth} layers of {size} latents, d_model {d}"
    check_shape(path, "W_E", header["W_E"], (depth, d, size), told)
    check_shape(path, "b_E", header["b_E"], (depth, size), told)
    for layer in range(depth):
        key = f"W_D.{layer}"
        by_target = f"{told}; grouped by the layer written, from 0 to {layer}"
        check_shape(path, key, header[key], (layer + 1, size, d), by_target)
        check_shape(path, f"b_D.{layer}", header[f"b_D.{layer}"], (d,), told)
    if _THRESHOLD in required:
        check_shape(path, _THRESHOLD, header[_THRESHOLD], (depth, size), told)


def _load(stack: _Stack, source: int) -> Dictionary:
    import torch

    config, into = stack.config, stack.scales[source].into
    part = partial(read_part, stack.path, stack.header)
    squares = torch.zeros(config.latents, dtype=torch.float64)
    writes = []
    for target in range(source, stack.depth):
        W_dec = part(f"W_D.{target}", source, 0)  # (F, d)
        squares += torch.linalg.vector_norm(W_dec, dim=1).double() ** 2
        W_dec.mul_(into / stack.scales[target].out)
        check_finite(stack.path, f"W_D.{target}[{source}] with its norms folded in", W_dec, "F32")
        bias = part(f"b_D.{target}").div_(stack.scales[target].out) if target == source else None
        layer, site, at = stack.sites[target].write
        writes.append(Write(layer, site, at, W_dec, bias))
    threshold = part(_THRESHOLD, source, 0) if config.activation == "jumprelu" else None
    gate, by_norm = gate_of(config, into, squares.sqrt().float(), threshold)
    return Dictionary(
        set="",
        kind="cross-layer transcoder",
        layer=stack.sites[source].layer,
        read=stack.sites[source].read,
        encoders=(Encoder("in", part("W_E", source, 0).T.contiguous(), part("b_E", source, 0).div_(into)),),
        writes=tuple(writes),
        gate=gate,
        decoder_norm_in_gate=by_norm,
    )


FORMAT = LlamascopiumCLT()
