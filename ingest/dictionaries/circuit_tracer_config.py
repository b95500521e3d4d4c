"""circuit-tracer's config.yaml, beside its per-layer and its cross-layer transcoders alike.

It names the hooks read and written, within a block. `activation: topk` with `k` is ours: the format itself
knows ReLU and JumpReLU. `model_hash`, also ours, binds a set to one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.dictionaries.hooks import mlp_input, read_hook, write_hook
from ingest.dictionaries.types import At, Read
from ingest.errors import InputError, near
from ingest.spec_text import SpecError, parse_text

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["Config", "read_config"]

_INPUTS = ("mlp.hook_in", "hook_resid_mid", "hook_mlp_in", "ln2.hook_normalized")
_OUTPUTS = ("mlp.hook_out", "hook_mlp_out")
_KEYS = {
    "model_kind", "model_name", "model_hash", "scan", "feature_input_hook", "feature_output_hook",
    "activation", "k", "transcoders",
}  # fmt: skip
_PER_LAYER, _CROSS_LAYER = "transcoder_set", "cross_layer_transcoder"
_MEANT = {_PER_LAYER: "this reader is for per-layer sets", _CROSS_LAYER: "these are cross-layer files"}


@dataclass(frozen=True)
class Config:
    """What config.yaml says, checked."""

    path: Path
    read: Read
    at: At
    activation: str | None
    k: int | None  # of our TopK, None where the tensors decide (ReLU or JumpReLU)
    listed: tuple[str, ...] | None  # files for layer 0, 1, …, where they are listed
    provenance: Mapping[str, str]
    notes: tuple[str, ...]


def read_config(path: Path, facts: Facts | None, *, cross_layer: bool = False) -> Config:
    """The configuration of a set. Raises InputError for a file that is missing or no YAML, for what is not
    understood, and for a hook that the model has not."""
    config = _mapping(path)
    unknown = sorted(str(key) for key in config if key not in _KEYS)
    if unknown:
        told = "; ".join(f"{key}: unknown key{near(key, sorted(_KEYS))}" for key in unknown)
        raise InputError(f"{path}: {told}")
    expected = _CROSS_LAYER if cross_layer else _PER_LAYER
    kind = config.get("model_kind", expected)
    if kind != expected:
        raise InputError(f"{path}: model_kind: expected {expected}, found {kind!r}; {_MEANT[expected]}")
    hook = _hook(path, config, "feature_input_hook", _INPUTS)
    read = read_hook(hook, facts, f"{path}: feature_input_hook")
    out = _hook(path, config, "feature_output_hook", _OUTPUTS)
    write = write_hook(out, facts, f"{path}: feature_output_hook")
    return Config(
        path=path,
        read=mlp_input(read.read),
        at=write.at,
        activation=config.get("activation"),
        k=_k(path, config, cross_layer),
        listed=_listed(path, config),
        provenance={key: str(config[key]) for key in ("model_name", "scan", "model_hash") if config.get(key)},
        notes=(read.note,) if read.note else (),
    )


def _mapping(path: Path) -> dict[str, Any]:
    try:
        parsed = parse_text(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file; it must name feature_input_hook and feature_output_hook"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not YAML: {error}") from error
    if parsed.twice:  # YAML would take the last one
        raise SpecError(str(path), parsed.twice)
    config = parsed.data
    if not isinstance(config, dict):
        raise InputError(
            f"{path}: expected keys and values, found {'nothing' if config is None else repr(config)}"
        )
    return config


def _listed(path: Path, config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The files that `transcoders` lists, which lie beside or below config.yaml."""
    listed = config.get("transcoders")
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
        raise InputError(
            f"{path}: transcoders: expected a list of files, one for each layer, found {listed!r}"
        )
    for one in listed:
        if "://" in one:
            raise InputError(
                f"{path}: transcoders: lists files kept elsewhere ({one}), which is not supported; put them"
                " beside config.yaml as layer_0.safetensors, layer_1.safetensors, … and remove the list"
            )
        if Path(one).is_absolute() or ".." in Path(one).parts:
            raise InputError(f"{path}: transcoders: {one} leads out of the folder; expected a file below it")
        if not one.endswith(".safetensors"):
            raise InputError(
                f"{path}: transcoders: {one} is no safetensors file; files of another format are read by its"
                " own reader: give their path"
            )
    return tuple(listed)


def _k(path: Path, config: Mapping[str, Any], cross_layer: bool) -> int | None:
    activation, k = config.get("activation"), config.get("k")
    known = ("relu", "jumprelu") if cross_layer else ("relu", "jumprelu", "topk")
    if activation is not None and activation not in known:
        choices = f"{', '.join(known[:-1])} or {known[-1]}"
        raise InputError(f"{path}: activation: expected {choices}, found {activation!r}")
    if activation != "topk":
        if k is not None:
            hint = "remove k" if cross_layer else "add that, or remove k"
            raise InputError(f"{path}: k: {k!r} stands without `activation: topk`; {hint}")
        return None
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(
            f"{path}: k: expected a whole number of 1 or more beside activation: topk, found {k!r}"
        )
    return k


def _hook(path: Path, config: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    hook = config.get(key)
    if not isinstance(hook, str) or hook not in known:
        found = "nothing" if hook is None else repr(hook)
        raise InputError(f"{path}: {key}: expected one of {', '.join(known)}, found {found}")
    return hook
