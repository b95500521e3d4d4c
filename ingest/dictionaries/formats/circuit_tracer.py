"""circuit-tracer's per-layer transcoders: `config.yaml` and one `layer_{i}.safetensors` for each layer.

    W_enc (F, d)  b_enc (F)  W_dec (F, d)  b_dec (d)            a = act(x @ W_enc.T + b_enc)
    activation_function.threshold (F)  -> JumpReLU               out = a @ W_dec + b_dec (+ x @ W_skip.T)
    W_skip (d, d)

config.yaml (ingest/dictionaries/circuit_tracer_config.py) names the hooks read and written, and may list the
files of layer 0, 1, … instead of leaving it to their names. JumpReLU is x where x > threshold, negative
values included where a threshold is negative. b_dec is never subtracted from the input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.circuit_tracer_config import Config, read_config
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout, choose_layers
from ingest.dictionaries.tensor_files import Entry, check_keys, check_shape, read_header, read_tensors
from ingest.dictionaries.types import (
    Dictionary,
    Encoder,
    Gate,
    JumpReLU,
    ReLU,
    TopK,
    Write,
)
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_LAYER = re.compile(r"layer_(0|[1-9]\d*)\.safetensors")
_THRESHOLD = "activation_function.threshold"
_REQUIRED = {"W_enc", "b_enc", "W_dec", "b_dec"}


@dataclass(frozen=True)
class CircuitTracer:
    name: str = "circuit-tracer"
    hub_files: tuple[str, ...] = ("config.yaml", "layer_*.safetensors")

    def recognises(self, where: Path) -> bool:
        """A directory with a file named as one layer's, or a config.yaml that lists them."""
        if not where.is_dir():
            return False
        return any(_LAYER.fullmatch(path.name) for path in where.iterdir()) or _lists(where / "config.yaml")

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(
                f"format {self.name!r} needs a path: the directory with config.yaml and layer_*.safetensors"
            )
        config = read_config(where / "config.yaml", facts)
        files = _layer_files(where) if config.listed is None else _listed_files(where, config)
        chosen, notes = choose_layers(sorted(files), layers, facts, str(where))
        headers = {layer: read_header(files[layer]) for layer in chosen}
        for layer, header in headers.items():
            _check_layer(files[layer], header, facts, config)
        jump = {_THRESHOLD in header for header in headers.values()}
        skip = {"W_skip" in header for header in headers.values()}
        activation = (
            f"TopK {config.k}" if config.k else " or ".join("JumpReLU" if j else "ReLU" for j in sorted(jump))
        )
        return Layout(
            format=self.name,
            kind="transcoder",
            source=where,
            sizes={layer: headers[layer]["W_enc"].shape[0] for layer in chosen},
            read=config.read,
            writes={layer: ((layer, "mlp", config.at),) for layer in chosen},
            readings=("in",),
            activation=activation + (" with skip" if True in skip else ""),
            load=partial(_load, files, headers, config),
            bytes={layer: 4 * sum(entry.count for entry in headers[layer].values()) for layer in chosen},
            dtypes=tuple(sorted({entry.dtype for header in headers.values() for entry in header.values()})),
            widths={
                layer: (header["W_enc"].shape[1], header["W_dec"].shape[1])
                for layer, header in headers.items()
            },
            provenance=config.provenance,
            notes=(*notes, *config.notes),
            l0=dict.fromkeys(chosen, float(config.k)) if config.k else {},
        )


# --- layer files --------------------------------------------------------------------------------------------


def _lists(path: Path) -> bool:
    """Whether a config.yaml lists the files; what it says is checked when it is read."""
    try:
        return bool(re.search(r"^transcoders\s*:", path.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return False


def _listed_files(where: Path, config: Config) -> dict[int, Path]:
    files = dict(enumerate(where / name for name in config.listed or ()))
    for layer, path in files.items():
        if (match := _LAYER.fullmatch(path.name)) and int(match[1]) != layer:
            raise InputError(
                f"{config.path}: transcoders: {path.name} stands in the place of layer {layer}; expected the"
                " files of layer 0, 1, … in their order"
            )
    return files


def _layer_files(where: Path) -> dict[int, Path]:
    files: dict[int, Path] = {}
    for path in sorted(where.iterdir()):
        if match := _LAYER.fullmatch(path.name):
            files[int(match[1])] = path
        elif path.suffix in (".safetensors", ".pt", ".npz"):
            raise InputError(
                f"{path}: is left over beside layer_*.safetensors; expected one format in a directory: move"
                " it away"
            )
    if not files:
        raise InputError(
            f"{where}: has no layer_0.safetensors, layer_1.safetensors, …; expected one for each layer"
        )
    return files


def _check_layer(path: Path, header: Mapping[str, Entry], facts: Facts | None, config: Config) -> None:
    check_keys(path, header, _REQUIRED, {_THRESHOLD, "W_skip"})
    encoder, decoder = header["W_enc"].shape, header["W_dec"].shape
    if len(encoder) != 2 or len(decoder) != 2 or encoder[0] != decoder[0] or 0 in encoder:
        turned = "; one of them looks transposed" if sorted(encoder) == sorted(decoder) else ""
        raise InputError(
            f"{path}: W_enc has shape {_text(encoder)} and W_dec {_text(decoder)}; expected (F, d) and (F,"
            f" d) with the same F{turned}"
        )
    size, d = encoder[0], encoder[1] if facts is None else facts.d_model
    for key, width in (("W_enc", encoder[1]), ("W_dec", decoder[1])):
        if width != d:
            raise InputError(
                f"{path}: {key} has shape {_text(header[key].shape)}, so width {width}, the model's d_model"
                f" is {d} ({facts.architecture if facts else path.name}); it is for another model"
            )
    check_shape(path, "b_enc", header["b_enc"], (size,), f"one for each of the {size} rows of W_enc")
    check_shape(path, "b_dec", header["b_dec"], (d,), f"W_dec is ({size}, {d})")
    if "W_skip" in header:
        check_shape(path, "W_skip", header["W_skip"], (d, d), f"the model's d_model is {d}")
    k, activation = config.k, config.activation
    if _THRESHOLD in header:
        check_shape(
            path, _THRESHOLD, header[_THRESHOLD], (size,), f"one for each of the {size} rows of W_enc"
        )
        if activation not in (None, "jumprelu"):
            raise InputError(
                f"{path}: {_THRESHOLD} belongs to JumpReLU, but config.yaml says activation: {activation};"
                " remove one"
            )
    elif activation == "jumprelu":
        raise InputError(f"{path}: tensor missing: {_THRESHOLD}, as config.yaml says activation: jumprelu")
    if k is not None and k > size:
        raise InputError(
            f"{path}: W_enc has {size} latents, config.yaml says k: {k}; expected k of at most {size}"
        )


def _load(
    files: Mapping[int, Path],
    headers: Mapping[int, Mapping[str, Entry]],
    config: Config,
    layer: int,
    model: object,
) -> Dictionary:
    tensors = read_tensors(files[layer], headers[layer])
    gate: Gate = ReLU()
    if config.k is not None:
        gate = TopK(config.k)
    elif _THRESHOLD in tensors:
        gate = JumpReLU(tensors[_THRESHOLD], relu_too=False)
    skip = tensors.get("W_skip")
    return Dictionary(
        set="",
        kind="transcoder",
        layer=layer,
        read=config.read,
        encoders=(Encoder("in", tensors["W_enc"], tensors["b_enc"]),),
        writes=(Write(layer, "mlp", config.at, tensors["W_dec"], tensors["b_dec"]),),
        gate=gate,
        W_skip=None if skip is None else skip.T.contiguous(),
    )


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


FORMAT = CircuitTracer()
