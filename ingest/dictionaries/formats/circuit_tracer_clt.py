"""circuit-tracer's cross-layer transcoders: `config.yaml`, and `W_enc_{i}.safetensors` and
`W_dec_{i}.safetensors` for every layer i of the model.

    W_enc_i (F, d)  b_enc_i (F)  b_dec_i (d)  [threshold_i (F)]      a_i = act(x_i @ W_enc_i.T + b_enc_i)
    W_dec_i (F, L - i, d), entry j writes to layer i + j             out_m = Σ_{i ≤ m} a_i @ W_dec_i[:, m - i]
                                                                             + b_dec_m

b_dec is the written layer's, added there once: it stands at what a layer writes to itself. Files have no
place for a skip connection. A JumpReLU is x where x > threshold, negative values included where a threshold
is negative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.circuit_tracer_config import Config, read_config
from ingest.dictionaries.found import Found, check_width, layout_of
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout
from ingest.dictionaries.tensor_files import (
    Entry,
    check_keys,
    check_shape,
    read_header,
    read_part,
    read_tensors,
)
from ingest.dictionaries.types import Dictionary, Encoder, Gate, JumpReLU, ReLU, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_FILE = re.compile(r"W_(enc|dec)_(0|[1-9]\d*)\.safetensors")


@dataclass(frozen=True)
class CircuitTracerCrossLayer:
    name: str = "circuit-tracer-clt"
    hub_files: tuple[str, ...] = ("config.yaml", "W_enc_*.safetensors", "W_dec_*.safetensors")

    def recognises(self, where: Path) -> bool:
        """A directory with a file named as one layer's encoder or decoders."""
        return where.is_dir() and any(_FILE.fullmatch(path.name) for path in where.iterdir())

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(
                f"format {self.name!r} needs a path: the directory with config.yaml, W_enc_*.safetensors and"
                " W_dec_*.safetensors"
            )
        config = read_config(where / "config.yaml", facts, cross_layer=True)
        if config.listed is not None:
            raise InputError(
                f"{config.path}: transcoders: a cross-layer transcoder's files go by their names,"
                " W_enc_0.safetensors and W_dec_0.safetensors, …; remove the list"
            )
        files = _files(where)
        if facts is not None and len(files) != facts.n_layers:
            raise InputError(
                f"{where}: has files for {len(files)} layers, the model has {facts.n_layers}"
                f" ({facts.architecture}); expected one for each: a cross-layer transcoder of another model,"
                " or a part of one"
            )
        return layout_of(
            self.name,
            where,
            [_found(where, layer, pair, len(files), facts, config) for layer, pair in files.items()],
            facts,
            layers,
        )


def _files(where: Path) -> dict[int, tuple[Path, Path]]:
    """Layer -> its encoder's and its decoders' file, for layers 0 to the last."""
    found: dict[str, dict[int, Path]] = {"enc": {}, "dec": {}}
    for path in sorted(where.iterdir()):
        if match := _FILE.fullmatch(path.name):
            found[match[1]][int(match[2])] = path
        elif path.suffix in (".safetensors", ".pt", ".npz"):
            raise InputError(
                f"{path}: is left over beside W_enc_*.safetensors and W_dec_*.safetensors; expected one"
                " format in a directory: move it away"
            )
    count = max([*found["enc"], *found["dec"]], default=-1) + 1
    if not count:
        raise InputError(
            f"{where}: has no W_enc_0.safetensors and W_dec_0.safetensors, …; expected both for each layer"
        )
    for layer in range(count):
        for side, files in found.items():
            if layer not in files:
                raise InputError(
                    f"{where}: has no W_{side}_{layer}.safetensors, but files up to layer {count - 1};"
                    " expected W_enc and W_dec for each layer"
                )
    return {layer: (found["enc"][layer], found["dec"][layer]) for layer in range(count)}


def _found(
    where: Path, layer: int, files: tuple[Path, Path], count: int, facts: Facts | None, config: Config
) -> Found:
    """One layer by its headers, all shapes checked."""
    encoder, decoder = (read_header(path) for path in files)
    for path, header in zip(files, (encoder, decoder), strict=True):
        if skip := sorted(key for key in header if key.startswith("W_skip")):
            raise InputError(
                f"{path}: {skip[0]}: a skip connection of a cross-layer transcoder is not supported: its"
                " layout has no place for one, and the library that wrote it reads none; remove it"
            )
    threshold = f"threshold_{layer}"
    check_keys(files[0], encoder, {f"{key}_{layer}" for key in ("W_enc", "b_enc", "b_dec")}, {threshold})
    check_keys(files[1], decoder, {f"W_dec_{layer}"})
    reads, writes = encoder[f"W_enc_{layer}"].shape, decoder[f"W_dec_{layer}"].shape
    targets = count - layer
    if len(reads) != 2 or 0 in reads or writes != (reads[0], targets, reads[1]):
        raise InputError(
            f"{files[1]}: W_dec_{layer} has shape {_text(writes)} and W_enc_{layer} {_text(reads)}; expected"
            f" (F, {targets}, d) and (F, d) with the same F and d: one decoder for each layer from {layer} to"
            f" {count - 1}"
        )
    size, d = reads
    check_width(f"{files[0]}: W_enc_{layer} {_text(reads)}", d, "mlp.in", facts)
    check_shape(
        files[0], f"b_enc_{layer}", encoder[f"b_enc_{layer}"], (size,), f"W_enc_{layer} is {_text(reads)}"
    )
    check_shape(
        files[0], f"b_dec_{layer}", encoder[f"b_dec_{layer}"], (d,), f"W_enc_{layer} is {_text(reads)}"
    )
    jump = threshold in encoder
    if jump:
        check_shape(files[0], threshold, encoder[threshold], (size,), f"W_enc_{layer} is {_text(reads)}")
    if config.activation is not None and jump != (config.activation == "jumprelu"):
        raise InputError(
            f"{files[0]}: has {'a' if jump else 'no'} {threshold}, config.yaml says activation:"
            f" {config.activation}; a threshold belongs to jumprelu and to nothing else"
        )
    entries = (*encoder.values(), *decoder.values())
    return Found(
        where=where,
        kind="cross-layer transcoder",
        layer=layer,
        size=size,
        read=config.read,
        writes=tuple((target, "mlp", config.at) for target in range(layer, count)),
        activation="JumpReLU" if jump else "ReLU",
        bytes=4 * sum(entry.count for entry in entries),
        dtypes=frozenset(entry.dtype for entry in entries),
        widths=(d, d),
        load=partial(_load, layer, files, encoder, decoder, config),
        provenance=config.provenance,
        notes=config.notes,
    )


def _load(
    layer: int,
    files: tuple[Path, Path],
    encoder: Mapping[str, Entry],
    decoder: Mapping[str, Entry],
    config: Config,
) -> Dictionary:
    """One layer; its decoders one after the other, so that no copy of all of them is made."""
    tensors = read_tensors(files[0], encoder)
    key = f"W_dec_{layer}"
    gate: Gate = ReLU()
    if f"threshold_{layer}" in tensors:
        gate = JumpReLU(tensors[f"threshold_{layer}"], relu_too=False)
    return Dictionary(
        set="",
        kind="cross-layer transcoder",
        layer=layer,
        read=config.read,
        encoders=(Encoder("in", tensors[f"W_enc_{layer}"], tensors[f"b_enc_{layer}"]),),
        writes=tuple(
            Write(
                layer + further,
                "mlp",
                config.at,
                read_part(files[1], decoder, key, further),
                tensors[f"b_dec_{layer}"] if further == 0 else None,
            )
            for further in range(decoder[key].shape[1])
        ),
        gate=gate,
    )


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


FORMAT = CircuitTracerCrossLayer()
