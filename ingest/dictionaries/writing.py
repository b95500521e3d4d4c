"""Dictionaries written in two public layouts, so that other tools and our own readers can open them.

circuit-tracer's, of MLP transcoders: config.yaml and layer_{i}.safetensors (formats/circuit_tracer.py).
SAELens 6's, of SAEs and transcoders: a folder with cfg.json and sae_weights.safetensors for each
(formats/saelens.py). What a layout cannot say is converted where the result computes the same, and told in
`Written.notes`, or refused. A folder is there whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from ingest.dictionaries.file_form import (
    FileForm,
    FileGate,
    Say,
    file_form,
    single_write,
    thresholded,
    with_thresholds,
)
from ingest.dictionaries.hook_names import Hook, read_name, write_name
from ingest.dictionaries.types import (
    At,
    Dictionary,
    Gated,
    JumpReLU,
    LayerNormInput,
    Read,
    RescaledInput,
    Space,
    TopK,
)
from ingest.dictionaries.written_folder import Notes, Written, check_arguments, save, whole_folder
from ingest.errors import InputError, near

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.models import Facts

__all__ = ["Written", "write_circuit_tracer", "write_saelens"]


# --- circuit-tracer -----------------------------------------------------------------------------------------

_EXTRA = ("model_name", "model_hash", "scan")  # of config.yaml; model_hash is ours


def write_circuit_tracer(
    folder: Path,
    dictionaries: Sequence[Dictionary],
    *,
    dtype: str = "float32",
    extra: Mapping[str, str] | None = None,
    topk: Literal["keep", "jumprelu"] = "keep",
    thresholds: Mapping[int, Tensor] | None = None,
    facts: Facts | None = None,
) -> Written:
    """Transcoders of MLPs, one for each layer, as config.yaml and layer_{i}.safetensors.

    `dtype`, of float32, float16 and bfloat16, is the weights'; biases and thresholds stay float32. `extra`
    goes to config.yaml: model_name, model_hash, scan. TopK, which the layout itself has not, is kept in keys
    of our own, or becomes JumpReLU with `thresholds[layer]` (F,) or a single number. `facts` of the model
    settle what a hook's name means there. Raises InputError, before anything is written, for what the layout
    cannot hold and for a value that `dtype` cannot.
    """
    folder, notes = Path(folder), Notes()
    check_arguments(folder, dictionaries, dtype)
    for key in extra or {}:
        if key not in _EXTRA:
            raise InputError(f"extra: {key}: unknown key{near(key, _EXTRA)}")
    if topk not in ("keep", "jumprelu"):
        raise InputError(f"topk: expected keep or jumprelu, found {topk!r}")
    first = dictionaries[0]
    files: dict[str, dict[str, Tensor]] = {}
    ks = set()
    for one in dictionaries:
        where, say = f"{folder}: layer {one.layer}", partial(notes.add, one.layer)
        _check_mlp(one, first, where)
        gate = _circuit_tracer_gate(one, topk, thresholds, where, say)
        form = file_form(one, gate, dtype, where, say, may_subtract=False)
        ks.add(form.gate.k if isinstance(form.gate, TopK) else None)
        values = {"W_enc": form.W_enc, "b_enc": form.b_enc, "W_dec": form.W_dec, "b_dec": form.b_out}
        if isinstance(form.gate, JumpReLU):
            values["activation_function.threshold"] = form.gate.threshold
        if form.W_skip is not None:
            values["W_skip"] = form.W_skip.T
        files[f"layer_{one.layer}.safetensors"] = values
    if len(ks) > 1:
        told = ", ".join("no TopK" if k is None else f"TopK {k}" for k in sorted(ks, key=lambda k: k or 0))
        raise InputError(f"{folder}: layers have {told}; config.yaml has one activation: write them apart")
    if len(dictionaries) != 1 + max(one.layer for one in dictionaries):
        notes.add(None, "layers are missing: circuit-tracer's own loader wants every one from layer 0 on")
    config = _config(first, ks.pop(), facts, folder, partial(notes.add, None)) | dict(extra or {})
    with whole_folder(folder) as place:
        (place / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        for name, values in files.items():
            save(place / name, values)
    return Written(folder, notes.told([one.layer for one in dictionaries]))


def _check_mlp(one: Dictionary, first: Dictionary, where: str) -> None:
    """InputError for anything but a transcoder of its own layer's MLP, alike in place with the first."""
    single_write(one, where)
    write = one.writes[0]
    instead = "; write it with write_saelens, whose layout holds it"
    reads = one.read.site == "mlp.in" or one.read == Read("resid_mid", Space.RAW)
    if not reads or write.site != "mlp" or write.layer != one.layer:
        raise InputError(
            f"{where}: reads {one.read.site} and writes {write.site} of layer {write.layer}, and"
            f" circuit-tracer's layout holds transcoders of MLPs alone{instead}"
        )
    if (one.read, write.at) != (first.read, first.writes[0].at):
        raise InputError(
            f"{where}: reads {one.read.site} ({one.read.space}) and writes the {write.at}, where layer"
            f" {first.layer} reads {first.read.site} ({first.read.space}) and writes the"
            f" {first.writes[0].at}; config.yaml has one hook for all: write them apart"
        )
    if one.input_norm is not None:
        raise InputError(f"{where}: normalises its input, which circuit-tracer's layout has not{instead}")
    if isinstance(one.gate, Gated):
        raise InputError(f"{where}: is gated; expected ReLU, JumpReLU, a threshold or TopK")
    if (d_in := one.encoders[0].W_enc.shape[1]) != (d_out := write.W_dec.shape[1]):
        raise InputError(f"{where}: reads {d_in} and writes {d_out} numbers; expected as many{instead}")


def _circuit_tracer_gate(
    one: Dictionary, topk: str, thresholds: Mapping[int, Tensor] | None, where: str, say: Say
) -> FileGate:
    gate = one.gate
    if isinstance(gate, TopK):
        if topk == "jumprelu":
            gate = with_thresholds(one, gate, thresholds, where, say)
        elif gate.by_magnitude or not gate.relu_too:
            raise InputError(
                f"{where}: its TopK keeps negative values; expected the largest, those above 0; write it with"
                " write_saelens where it goes by magnitude"
            )
        else:
            say(
                f"TopK is written as `activation: topk` and `k: {gate.k}` in config.yaml, which are ours:"
                " circuit-tracer's own loader passes over them and would apply ReLU alone"
            )
    return thresholded(gate, one.size, relu=False, where=where, say=say)


def _config(first: Dictionary, k: int | None, facts: Facts | None, folder: Path, say: Say) -> dict[str, Any]:
    read = read_name(first, facts, str(folder))
    if read.inner == "ln2.hook_normalized":
        if facts is not None and facts.norm.centred:
            raise InputError(
                f"{folder}: reads the MLP's input before the norm's gain, and ln2.hook_normalized is behind"
                f" it in {facts.architecture}; write it with write_saelens, whose cfg.json can say it"
            )
        if facts is None:
            say(
                "ln2.hook_normalized stands before the gain where the norm is an RMSNorm, and behind it"
                " where it is a LayerNorm: right for the first alone"
            )
    if first.read.site == "resid_mid":
        say("hook_resid_mid is read back as the MLP's input before its norm, the same vectors")
    if read.note:
        say(read.note)
    config: dict[str, Any] = {
        "model_kind": "transcoder_set",
        "feature_input_hook": read.inner,
        "feature_output_hook": "mlp.hook_out" if first.writes[0].at is At.MODULE else "hook_mlp_out",
        "scan": folder.absolute().name,
    }
    return config if k is None else config | {"activation": "topk", "k": k}


# --- SAELens ------------------------------------------------------------------------------------------------

_VERSION = "6.0.0"  # of the layout: without one the library takes it for an older one, and loses the metadata
_BY_US = (
    "hook_name",
    "hook_name_out",
    "model_class_name",
    "model_from_pretrained_kwargs",
    "sae_lens_version",
)


def write_saelens(
    folder: Path,
    dictionaries: Sequence[Dictionary],
    *,
    dtype: str = "float32",
    extra: Mapping[str, str] | None = None,
    thresholds: Mapping[int, Tensor] | None = None,
    facts: Facts | None = None,
) -> Written:
    """SAEs and transcoders in SAELens 6's layout: `folder` itself for one, `folder`/layer_{i} for several.

    `dtype`, of float32, float16 and bfloat16, is the weights'; biases and thresholds stay float32, and so
    does the type that cfg.json says to compute in. `extra` goes to cfg.json's metadata: model_name,
    model_hash. What reads and writes one place is an SAE, all else a transcoder; the layout has TopK for SAEs
    only, a transcoder's becomes JumpReLU with `thresholds[layer]` (F,) or a single number. `facts` of the
    model settle what a hook's name means there. Raises InputError, before anything is written, for what the
    layout cannot hold and for a value that `dtype` cannot.
    """
    folder, notes = Path(folder), Notes()
    check_arguments(folder, dictionaries, dtype)
    for key in extra or {}:
        if key in _BY_US:
            raise InputError(f"extra: {key}: is written from the dictionary itself; leave it out")
    ready: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
    for one in dictionaries:
        inner = f"layer_{one.layer}" if len(dictionaries) > 1 else "."
        say = partial(notes.add, one.layer)
        ready[inner] = _saelens(
            one, dtype, extra or {}, thresholds, facts, f"{folder}: layer {one.layer}", say
        )
    with whole_folder(folder) as place:
        for inner, (config, values) in ready.items():
            (place / inner).mkdir(exist_ok=True)
            text = json.dumps(config, indent=2, ensure_ascii=False)
            (place / inner / "cfg.json").write_text(text + "\n", encoding="utf-8")
            save(place / inner / "sae_weights.safetensors", values)
    return Written(folder, notes.told([one.layer for one in dictionaries]))


def _saelens(
    one: Dictionary,
    dtype: str,
    extra: Mapping[str, str],
    thresholds: Mapping[int, Tensor] | None,
    facts: Facts | None,
    where: str,
    say: Say,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(cfg.json, tensors) of one dictionary."""
    single_write(one, where)
    read, write = read_name(one, facts, where), write_name(one.writes[0], facts)
    sae = read.full == write.full and one.W_skip is None
    _say_places(one, read, write, sae, say)
    gate = one.gate
    if isinstance(gate, TopK) and not sae:
        gate = with_thresholds(one, gate, thresholds, where, say)
    elif isinstance(gate, TopK) and gate.relu_too is gate.by_magnitude:
        raise InputError(
            f"{where}: its TopK is neither of the largest above 0 nor of the largest by magnitude, signs"
            " kept; not supported"
        )
    if isinstance(gate, Gated) and not sae:
        raise InputError(f"{where}: is gated and no SAE; SAELens has no gated transcoders")
    kept = thresholded(gate, one.size, relu=True, where=where, say=say)
    norm = _input_norm(one, sae, where)
    form = file_form(one, kept, dtype, where, say, may_subtract=sae)
    (size, d_in), d_out = form.W_enc.shape, form.W_dec.shape[1]
    metadata: dict[str, Any] = {"sae_lens_version": _VERSION, **extra, "hook_name": read.full}
    if not sae:
        metadata["hook_name_out"] = write.full
    if read.bridge or write.bridge:
        metadata["model_class_name"] = "TransformerBridge"
    config: dict[str, Any] = {
        "architecture": _architecture(form, sae),
        "d_in": d_in,
        "d_sae": size,
        **({} if sae else {"d_out": d_out}),
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": form.subtracts,
        "normalize_activations": norm,
        "reshape_activations": "hook_z" if sae and read.inner.endswith("_z") else "none",
        "metadata": metadata | {"model_from_pretrained_kwargs": {}},
    }
    if isinstance(form.gate, TopK):
        config["k"] = form.gate.k
        if not form.gate.by_magnitude:
            config["rescale_acts_by_decoder_norm"] = False
    return config, _saelens_tensors(form)


def _say_places(one: Dictionary, read: Hook, write: Hook, sae: bool, say: Say) -> None:
    for note in {read.note, write.note} - {None}:
        say(str(note))
    if sae:
        return
    if read.full == write.full:
        say(f"reads and writes {read.full} with a skip connection: written as a transcoder, not as an SAE")
    if one.read.site == "resid_mid":
        say("hook_resid_mid is read back as the MLP's input before its norm, the same vectors")


def _input_norm(one: Dictionary, sae: bool, where: str) -> str:
    """SAELens' name of it. Raises InputError for one that is not its own."""
    norm = one.input_norm
    if norm is None:
        return "none"
    width = one.encoders[0].W_enc.shape[1]
    if norm.restores is not sae:
        undone = "undone" if sae else "not undone"
        raise InputError(
            f"{where}: SAELens expects the norm of the input {undone} on the output; not supported"
        )
    if isinstance(norm, LayerNormInput) and norm.eps == 1e-5:
        return "layer_norm"
    if isinstance(norm, RescaledInput) and math.isclose(norm.norm, width**0.5, rel_tol=1e-7):
        return "constant_norm_rescale"
    raise InputError(
        f"{where}: normalises its input by {norm}; SAELens has an eps of 1e-5, or a norm of sqrt({width})"
    )


def _architecture(form: FileForm, sae: bool) -> str:
    if sae:
        if isinstance(form.gate, TopK):
            return "abstopk" if form.gate.by_magnitude else "topk"
        plain = "gated" if isinstance(form.gate, Gated) else "standard"
        return "jumprelu" if isinstance(form.gate, JumpReLU) else plain
    parts = ("jumprelu", isinstance(form.gate, JumpReLU)), ("skip", form.W_skip is not None)
    return "_".join([name for name, there in parts if there] + ["transcoder"])


def _saelens_tensors(form: FileForm) -> dict[str, Tensor]:
    values = {"W_enc": form.W_enc.T, "W_dec": form.W_dec, "b_dec": form.b_out}
    if isinstance(form.gate, Gated):
        r_mag = -form.gate.scale.detach().double().log().float()
        return values | {"b_gate": form.gate.b_gate, "r_mag": r_mag, "b_mag": form.b_enc}
    values["b_enc"] = form.b_enc
    if isinstance(form.gate, JumpReLU):
        values["threshold"] = form.gate.threshold
    if form.W_skip is not None:
        values["W_skip"] = form.W_skip.T
    return values
