"""circuit-tracer's per-layer transcoders: `config.yaml` and one `layer_{i}.safetensors` for each layer.

    W_enc (F, d)  b_enc (F)  W_dec (F, d)  b_dec (d)            a = act(x @ W_enc.T + b_enc)
    activation_function.threshold (F)  -> JumpReLU               out = a @ W_dec + b_dec (+ x @ W_skip.T)
    W_skip (d, d)

config.yaml names the hooks read and written, within a block. `activation: topk` with `k` is ours: the format
itself knows ReLU and JumpReLU. Its JumpReLU is x where x > threshold, negative values included where a
threshold is negative. b_dec is never subtracted from the input. `model_hash`, also ours, binds a set to one
model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout, choose_layers
from ingest.dictionaries.tensor_files import Entry, check_keys, check_shape, read_header, read_tensors
from ingest.dictionaries.types import (
    At,
    Dictionary,
    Encoder,
    Gate,
    JumpReLU,
    Read,
    ReLU,
    Space,
    TopK,
    Write,
)
from ingest.errors import InputError, near

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_LAYER = re.compile(r"layer_(0|[1-9]\d*)\.safetensors")
_THRESHOLD = "activation_function.threshold"
_REQUIRED = {"W_enc", "b_enc", "W_dec", "b_dec"}
_INPUTS = {
    "mlp.hook_in": Read("mlp.in", Space.NORMALISED_WITH_GAIN),
    "hook_resid_mid": Read("mlp.in", Space.RAW),
    "hook_mlp_in": Read("mlp.in", Space.RAW),
}
_OUTPUTS = {"mlp.hook_out": At.MODULE, "hook_mlp_out": At.STREAM}
_KEYS = {
    "model_kind", "model_name", "model_hash", "scan", "feature_input_hook", "feature_output_hook",
    "activation", "k",
}  # fmt: skip


@dataclass(frozen=True)
class CircuitTracer:
    name: str = "circuit-tracer"
    hub_files: tuple[str, ...] = ("config.yaml", "layer_*.safetensors")

    def recognises(self, where: Path) -> bool:
        """A directory with a file named as one layer's."""
        return where.is_dir() and any(_LAYER.fullmatch(path.name) for path in where.iterdir())

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(
                f"format {self.name!r} needs a path: the directory with config.yaml and layer_*.safetensors"
            )
        config = _read_config(where / "config.yaml")
        read = _input(where / "config.yaml", config, facts)
        at = _output(where / "config.yaml", config)
        files = _layer_files(where)
        chosen, notes = choose_layers(sorted(files), layers, facts, str(where))
        headers = {layer: read_header(files[layer]) for layer in chosen}
        for layer, header in headers.items():
            _check_layer(files[layer], header, facts, config)
        jump = {_THRESHOLD in header for header in headers.values()}
        skip = {"W_skip" in header for header in headers.values()}
        activation = (
            f"TopK {config['k']}"
            if config.get("k")
            else " or ".join("JumpReLU" if j else "ReLU" for j in sorted(jump))
        )
        return Layout(
            format=self.name,
            kind="transcoder",
            source=where,
            sizes={layer: headers[layer]["W_enc"].shape[0] for layer in chosen},
            read=read,
            writes={layer: ((layer, "mlp", at),) for layer in chosen},
            readings=("in",),
            activation=activation + (" with skip" if True in skip else ""),
            load=partial(_load, files, headers, read, at, config.get("k")),
            bytes={layer: 4 * sum(_count(entry) for entry in headers[layer].values()) for layer in chosen},
            dtypes=tuple(sorted({entry.dtype for header in headers.values() for entry in header.values()})),
            provenance={
                key: str(config[key]) for key in ("model_name", "scan", "model_hash") if config.get(key)
            },
            notes=notes,
        )


# --- config.yaml --------------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file; it must name feature_input_hook and feature_output_hook"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(config, dict):
        raise InputError(
            f"{path}: expected keys and values, found {'nothing' if config is None else repr(config)}"
        )
    if "transcoders" in config:
        raise InputError(
            f"{path}: transcoders: lists files kept elsewhere, which is not supported; put them beside"
            " config.yaml as layer_0.safetensors, layer_1.safetensors, … and remove the list"
        )
    unknown = sorted(str(key) for key in config if key not in _KEYS)
    if unknown:
        told = "; ".join(f"{key}: unknown key{near(key, sorted(_KEYS))}" for key in unknown)
        raise InputError(f"{path}: {told}")
    kind = config.get("model_kind", "transcoder_set")
    if kind != "transcoder_set":
        raise InputError(
            f"{path}: model_kind: expected transcoder_set, found {kind!r}; this reader is for per-layer sets"
        )
    return {**config, "k": _k(path, config)}


def _k(path: Path, config: Mapping[str, Any]) -> int | None:
    """k of our TopK, None where the tensors decide (ReLU or JumpReLU)."""
    activation, k = config.get("activation"), config.get("k")
    if activation not in (None, "relu", "jumprelu", "topk"):
        raise InputError(f"{path}: activation: expected relu, jumprelu or topk, found {activation!r}")
    if activation != "topk":
        if k is not None:
            raise InputError(f"{path}: k: {k!r} stands without `activation: topk`; add that, or remove k")
        return None
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(
            f"{path}: k: expected a whole number of 1 or more beside activation: topk, found {k!r}"
        )
    return k


def _input(path: Path, config: Mapping[str, Any], facts: Facts | None) -> Read:
    hook = _hook(path, config, "feature_input_hook", _INPUTS)
    if hook == "hook_resid_mid" and facts and facts.parallel:
        raise InputError(
            f"{path}: feature_input_hook: hook_resid_mid does not exist in the parallel blocks of"
            f" {facts.architecture}; expected mlp.hook_in or hook_mlp_in: it is for another model"
        )
    return _INPUTS[hook]


def _output(path: Path, config: Mapping[str, Any]) -> At:
    return _OUTPUTS[_hook(path, config, "feature_output_hook", _OUTPUTS)]


def _hook(path: Path, config: Mapping[str, Any], key: str, known: Mapping[str, object]) -> str:
    hook = config.get(key)
    if not isinstance(hook, str) or hook not in known:
        found = "nothing" if hook is None else repr(hook)
        raise InputError(f"{path}: {key}: expected one of {', '.join(known)}, found {found}")
    return hook


# --- layer files --------------------------------------------------------------------------------------------


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


def _check_layer(
    path: Path, header: Mapping[str, Entry], facts: Facts | None, config: Mapping[str, Any]
) -> None:
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
    k, activation = config["k"], config.get("activation")
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
    read: Read,
    at: At,
    k: int | None,
    layer: int,
    model: object,
) -> Dictionary:
    tensors = read_tensors(files[layer], headers[layer])
    gate: Gate = ReLU()
    if k is not None:
        gate = TopK(k)
    elif _THRESHOLD in tensors:
        gate = JumpReLU(tensors[_THRESHOLD], relu_too=False)
    skip = tensors.get("W_skip")
    return Dictionary(
        set="",
        kind="transcoder",
        layer=layer,
        read=read,
        encoders=(Encoder("in", tensors["W_enc"], tensors["b_enc"]),),
        writes=(Write(layer, "mlp", at, tensors["W_dec"], tensors["b_dec"]),),
        gate=gate,
        W_skip=None if skip is None else skip.T.contiguous(),
    )


def _count(entry: Entry) -> int:
    return entry.shape[0] * (entry.shape[1] if len(entry.shape) > 1 else 1)


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


FORMAT = CircuitTracer()
