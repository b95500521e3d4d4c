"""dictionary_learning: a folder with `ae.pt`, a state dict, and `config.json`. The keys say of which class.

    encoder.weight (F, d)  encoder.bias (F)  decoder.weight (d, F)
      bias (d)                AutoEncoder       ReLU((x - bias) W + b)
      decoder.bias (d)        AutoEncoderNew    ReLU(x W + b): the bias is the output's alone
      b_dec (d)  k            TopK              ReLU((x - b_dec) W + b), the k largest of a token
      b_dec (d)  k threshold  BatchTopK         the same where it is over one threshold; k is not used
    encoder.weight  decoder.weight  decoder_bias (d)  gate_bias  mag_bias  r_mag (F)
                              gated             (x - decoder_bias) W: + gate_bias > 0 opens, exp(r_mag) and
                                                mag_bias measure
    W_enc (d, F)  b_enc (F)  W_dec (F, d)  b_dec (d)
      threshold (F)           JumpReLU          ReLU(x W + b) where x W + b > threshold
      k  threshold  group_sizes                 Matryoshka: as BatchTopK

TopK and BatchTopK hold the same keys (TopK's threshold is of another way to use it): there the trainer's name
in config.json decides. `dict_class` is not to be trusted otherwise, the trainers write it whatever the class.
Activations are the file's own: the library's loader rescales an AutoEncoder's to decoder rows of length one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.dictionary_learning_config import Config, hook_name, read_config
from ingest.dictionaries.found import FolderFormat, Found, check_declared, check_width
from ingest.dictionaries.hooks import ReadHook, WriteHook, read_hook, write_hook
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.pickled_tensors import (
    PickledFile,
    PickledTensor,
    read_numbers,
    read_pickled,
    read_pickled_tensors,
    state_dict,
)
from ingest.dictionaries.tensor_files import check_finite, check_keys, check_shape
from ingest.dictionaries.types import (
    At,
    Dictionary,
    Encoder,
    Gate,
    Gated,
    JumpReLU,
    Read,
    ReLU,
    ScalarThreshold,
    TopK,
    Write,
)
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_CONFIG, _WEIGHTS = "config.json", "ae.pt"
_LINEAR = ("encoder.weight", "encoder.bias", "decoder.weight")
_PLAIN = ("W_enc", "b_enc", "W_dec", "b_dec")


@dataclass(frozen=True)
class _Class:
    """One of the library's classes: its keys beside those of its weights, and what they mean."""

    name: str
    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()
    centres: str | None = None  # the bias subtracted from the input
    out: str = "b_dec"  # the bias of the output

    @property
    def encoder(self) -> str:
        return "W_enc" if "W_enc" in self.keys else "encoder.weight"

    @property
    def decoder(self) -> str:
        return "W_dec" if "W_dec" in self.keys else "decoder.weight"

    @property
    def b_enc(self) -> str:
        return next(key for key in ("b_enc", "encoder.bias", "mag_bias") if key in self.keys)


_CLASSES = {
    one.name: one
    for one in (
        _Class("AutoEncoder", (*_LINEAR, "bias"), (), "bias", "bias"),
        _Class("AutoEncoderNew", (*_LINEAR, "decoder.bias"), (), None, "decoder.bias"),
        _Class(
            "GatedAutoEncoder",
            ("encoder.weight", "decoder.weight", "decoder_bias", "gate_bias", "mag_bias", "r_mag"),
            (),
            "decoder_bias",
            "decoder_bias",
        ),
        _Class("AutoEncoderTopK", (*_LINEAR, "b_dec"), ("k", "threshold"), "b_dec"),
        _Class("BatchTopKSAE", (*_LINEAR, "b_dec", "threshold"), ("k",), "b_dec"),
        _Class("JumpReluAutoEncoder", (*_PLAIN, "threshold")),
        _Class("MatryoshkaBatchTopKSAE", (*_PLAIN, "threshold", "k"), ("group_sizes",), "b_dec"),
    )
}


# --- of which class -----------------------------------------------------------------------------------------


def _class_of(path: Path, header: Mapping[str, PickledTensor], config: Config) -> tuple[_Class, list[str]]:
    """By the keys; and what should be told. Raises InputError for keys missing, left over or of no class."""
    notes = []
    if "W_enc" in header or "W_dec" in header:
        name = "MatryoshkaBatchTopKSAE" if "k" in header else "JumpReluAutoEncoder"
    elif "gate_bias" in header or "r_mag" in header:
        name = "GatedAutoEncoder"
    elif "bias" in header:
        name = "AutoEncoder"
    elif "decoder.bias" in header:
        name = "AutoEncoderNew"
    elif "b_dec" in header or "k" in header:
        name, note = _by_trainer(path, config, "threshold" in header)
        notes += [note] if note else []
    else:
        name = "AutoEncoder"
    found = _CLASSES[name]
    check_keys(path, header, set(found.keys), set(found.optional))
    if config.dict_class not in (None, name):
        notes.append(f"{_CONFIG} says {config.dict_class}, the keys are those of {name}: they decide")
    return found, notes


def _by_trainer(path: Path, config: Config, threshold: bool) -> tuple[str, str | None]:
    """TopK or BatchTopK, whose keys are the same, and the note of it. Early TopKs have no threshold."""
    said = {
        key: "BatchTopKSAE" if "batchtopk" in name.lower() else "AutoEncoderTopK"
        for key, name in (("trainer_class", config.trainer), ("dict_class", config.dict_class))
        if name and "topk" in name.lower()
    }
    if not said and not threshold:
        return "AutoEncoderTopK", None
    if len(set(said.values())) != 1:
        what = "says both" if said else "does not say which" if config.found else "no such file"
        raise InputError(
            f"{config.path}: {'trainer.trainer_class: ' if config.found else ''}{what}; the tensors of"
            f" {path.name} are those of TopK and of BatchTopK alike: say"
            ' {"trainer": {"trainer_class": "TopKTrainer"}} there, or "BatchTopKTrainer"'
        )
    key, name = next(iter(said.items()))
    return name, f"TopK and BatchTopK have the same tensors: {_CONFIG} says {name} (trainer.{key})"


def _gate(
    file: PickledFile, found: _Class, header: Mapping[str, PickledTensor], config: Config, size: int
) -> tuple[Gate, float | None, list[str]]:
    """The gate, where numbers decide it (ReLU else), L0 as declared, and what should be told."""
    path = file.path
    notes: list[str] = []
    if found.name == "JumpReluAutoEncoder":
        return ReLU(), None, notes  # until its thresholds are read
    few = {key: header[key] for key in ("k", "threshold", "group_sizes") if key in header}
    read = read_numbers(file, few)
    if sum(read.pop("group_sizes", [size])) != size:
        raise InputError(f"{path}: group_sizes add up to other than the {size} latents of {found.encoder}")
    numbers = {key: value[0] for key, value in read.items()}
    k, threshold = numbers.get("k", config.k), numbers.get("threshold")
    if not math.isfinite(threshold or 0):
        raise InputError(f"{path}: threshold is {threshold}, expected a finite number; the file is damaged")
    if k is not None and config.k not in (None, k):
        notes.append(f"{_CONFIG} says k {config.k}, {_WEIGHTS} has {k}: the tensor decides")
    if found.name == "AutoEncoderTopK":
        if type(k) is not int or not 1 <= k <= size:
            raise InputError(
                f"{path}: k is {'in neither it nor ' + _CONFIG if k is None else k}; expected a whole number"
                f" of 1 to the {size} latents"
            )
        if "threshold" in numbers:
            notes.append("the threshold in the file is TopK's for another use and not applied")
        return TopK(k), float(k), notes
    if threshold is None:
        return ReLU(), None, notes
    if threshold < 0:
        notes.append(f"its threshold, {threshold:g}, was never set: every positive activation is kept")
        return ReLU(), None, notes
    if k is not None:
        notes.append(f"k ({k}) was for training: the threshold alone decides, so L0 varies")
    return ScalarThreshold(threshold), None if k is None else float(k), notes


# --- where it stands ----------------------------------------------------------------------------------------


def _hooks(config: Config, facts: Facts | None, declared: Declared) -> tuple[ReadHook, WriteHook, int]:
    """What is read and written, and of which layer."""
    name, where = hook_name(config), f"{config.path}: trainer.submodule_name"
    if declared.reads is not None and not _known(name, facts):
        name, where = declared.reads, "reads"
    if name is None:
        raise InputError(
            f"{config.path}: {_unsaid(config)}; say what it reads with reads, such as"
            " blocks.5.hook_resid_post"
        )
    read = read_hook(name, facts, where)
    if where == "reads" and declared.writes is not None:
        write = write_hook(declared.writes, facts, "writes")
    else:
        write = write_hook(name, facts, where)
    layers = {"trainer.layer": config.layer, where: read.layer, "layer": declared.layer}
    said = {key: layer for key, layer in layers.items() if layer is not None}
    if len(set(said.values())) != 1:
        listed = ", ".join(f"{key} says {layer}" for key, layer in said.items())
        raise InputError(f"{config.path}: of which layer? {listed or 'it says none; say it with layer'}")
    layer = next(iter(said.values()))
    read = replace(read, layer=layer)
    write = replace(write, layer=layer if write.layer is None else write.layer)
    if where != "reads":
        check_declared(declared, read, write, facts, where)
    return read, write, layer


def _known(name: str | None, facts: Facts | None) -> bool:
    try:
        return name is not None and read_hook(name, facts, "") is not None
    except InputError:
        return False


def _unsaid(config: Config) -> str:
    if not config.found:
        return "no such file"
    if config.submodule:
        return f"trainer.submodule_name: {config.submodule} is of an output, but buffer.io says in"
    return "trainer.submodule_name: is missing"


# --- the weights --------------------------------------------------------------------------------------------


def _found(folder: Path, facts: Facts | None, declared: Declared) -> Found:
    path, config = folder / _WEIGHTS, read_config(folder / _CONFIG)
    file = read_pickled(path)
    header = state_dict(path, file.value)
    kind, notes = _class_of(path, header, config)
    d, size = _check(path, kind, header, config)
    read, write, layer = _hooks(config, facts, declared)
    for key, site in (("the encoder", read.read.site), ("the decoder", write.site)):
        check_width(f"{path}: {key}", d, site, facts)
    gate, l0, told = _gate(file, kind, header, config, size)
    writes = (layer if write.layer is None else write.layer, write.site, write.at)
    return Found(
        where=folder,
        kind="sae",
        layer=layer,
        size=size,
        read=read.read,
        writes=(writes,),
        activation=_activation(kind, gate),
        bytes=4 * sum(entry.count for entry in header.values()),
        dtypes=frozenset(entry.dtype for key, entry in header.items() if entry.shape),
        widths=(d, d),
        load=partial(_load, file, kind, header, gate, layer, read.read, writes),
        l0=l0,
        provenance={"model_name": config.model} if config.model else None,
        notes=tuple(note for note in (*config.notes, *notes, *told, read.note, write.note) if note),
    )


def _check(path: Path, kind: _Class, header: Mapping[str, PickledTensor], config: Config) -> tuple[int, int]:
    """(d, F). Raises InputError for shapes that do not fit each other or config.json."""
    shape = header[kind.encoder].shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{path}: {kind.encoder} has shape {shape}, expected two sizes")
    d, size = shape if kind.encoder == "W_enc" else shape[::-1]
    told = f"{kind.encoder} is {shape}"
    check_shape(path, kind.decoder, header[kind.decoder], shape[::-1], told)
    scalars = {"k", "threshold"} if kind.name != "JumpReluAutoEncoder" else set()
    for key in set(kind.keys) - {kind.encoder, kind.decoder} - scalars:
        check_shape(path, key, header[key], (d if key in (kind.centres, kind.out) else size,), told)
    for key in scalars & set(header):
        check_shape(path, key, header[key], (), "it is one number for all latents")
    for field, said, has in (("activation_dim", config.d, d), ("dict_size", config.size, size)):
        if said not in (None, has):
            raise InputError(
                f"{path}: {told}, but {_CONFIG} says {field} {said}; they are of two dictionaries"
            )
    return d, size


def _load(
    file: PickledFile,
    kind: _Class,
    header: Mapping[str, PickledTensor],
    gate: Gate,
    layer: int,
    read: Read,
    writes: tuple[int, str, At],
) -> Dictionary:
    tensors = read_pickled_tensors(file, header)
    W_enc, W_dec = tensors[kind.encoder], tensors[kind.decoder]
    if kind.encoder == "W_enc":
        W_enc = W_enc.T  # (F, d)
    else:
        W_dec = W_dec.T  # (F, d)
    if kind.name == "GatedAutoEncoder":
        scale = tensors["r_mag"].exp()
        gate, W_enc = Gated(1 / scale, tensors["gate_bias"]), W_enc * scale[:, None]
        for of, value in (("encoder.weight times exp(r_mag)", W_enc), ("exp(-r_mag)", gate.scale)):
            check_finite(file.path, of, value, "F32")
    elif kind.name == "JumpReluAutoEncoder":
        gate = JumpReLU(tensors["threshold"], relu_too=True)
    written, site, at = writes
    return Dictionary(
        set="",
        kind="sae",
        layer=layer,
        read=read,
        encoders=(Encoder("in", W_enc.contiguous(), tensors[kind.b_enc]),),
        writes=(Write(written, site, at, W_dec.contiguous(), tensors[kind.out]),),
        gate=gate,
        b_in=tensors[kind.centres] if kind.centres else None,
    )


def _activation(kind: _Class, gate: Gate) -> str:
    match gate:
        case TopK(k=k):
            return f"TopK {k}"
        case ScalarThreshold(threshold=threshold):
            return f"ReLU over {threshold:g}"
    return {"GatedAutoEncoder": "gated ReLU", "JumpReluAutoEncoder": "JumpReLU"}.get(kind.name, "ReLU")


FORMAT = FolderFormat(
    name="dictionary_learning",
    hub_files=("ae.pt", "config.json"),
    files=(_WEIGHTS,),
    holds=lambda folder: (folder / _WEIGHTS).is_file(),
    found=_found,
)
