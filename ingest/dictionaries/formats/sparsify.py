"""EleutherAI's sparsify: a folder named after the module, with `cfg.json` and `sae.safetensors`.

    encoder.weight (F, d)  encoder.bias (F)  W_dec (F, d)  b_dec (d)  [W_skip (d, d)]

    SAE         a = act((x - b_dec) @ encoder.weight.T + encoder.bias)      x: the module's output
    transcoder  a = act(x @ encoder.weight.T + encoder.bias)                x: the module's input
    out = a @ W_dec + b_dec (+ x @ W_skip.T)                                both write the module's output

`topk` keeps the k largest and `groupmax` the largest of each of k consecutive groups, after a ReLU. `signed`,
of early versions, keeps the k largest by magnitude with their signs. cfg.json names no hook: the folder does
(`layers.2.mlp`, `h.3`), and a folder `seed1` is a run of the module its parent names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.configs import Fields, read_json
from ingest.dictionaries.found import FolderFormat, Found, check_width
from ingest.dictionaries.hooks import ReadHook, WriteHook, read_hook, write_hook
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.tensor_files import Entry, check_keys, check_shape, read_header, read_tensors
from ingest.dictionaries.types import At, Dictionary, Encoder, Gate, GroupMax, Read, TopK, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_CONFIG, _WEIGHTS = "cfg.json", "sae.safetensors"
_REQUIRED = {"encoder.weight", "encoder.bias", "W_dec", "b_dec"}
_SEED = re.compile(r"seed\d+")
# Of training: `normalize_decoder` holds during it, what is saved is what is used.
_TRAINING = ("normalize_decoder", "lookup_max_order", "gram_table_hash")


def _holds(folder: Path) -> bool:
    return (folder / _CONFIG).is_file() and (folder / _WEIGHTS).is_file()


@dataclass(frozen=True)
class _Config:
    d_in: int
    latents: int
    gate: Gate
    transcode: bool
    skip: bool
    notes: tuple[str, ...]


def _config(path: Path) -> _Config:
    fields = Fields(path, read_json(path))
    d_in = _positive(fields, "d_in", fields.take("d_in", int))
    # Absent from early files: the library's own defaults, which it did not have then.
    factor = fields.take("expansion_factor", int | float, 32)
    latents = fields.take("num_latents", int, 0) or int(d_in * factor)
    k = _positive(
        fields, "k", fields.take("k", int, 32, note="k is not in cfg.json: the library's default, 32")
    )
    activation = fields.one_of("activation", ("topk", "groupmax"), "topk")
    signed = fields.take("signed", bool, False)
    if fields.take("multi_topk", bool, False):
        fields.notes.append(f"multi_topk is a loss in training: {k} latents are kept, not {4 * k}")
    for key, reads in (
        ("embed_skip", "the embeddings too"),
        ("gram_lookup", "a table of n-gram means that is not in these files"),
    ):
        if fields.take(key, bool, False):
            raise InputError(
                f"{fields.place(key)}: a dictionary that reads {reads} is not supported; expected false"
            )
    config = _Config(
        d_in=d_in,
        latents=_positive(fields, "num_latents", latents),
        gate=_gate(fields, activation, k, signed, latents),
        transcode=fields.take("transcode", bool, False),
        skip=fields.take("skip_connection", bool, False),
        notes=tuple(fields.notes),
    )
    fields.ignore(*_TRAINING)
    fields.done()
    return config


def _gate(fields: Fields, activation: str, k: int, signed: bool, latents: int) -> Gate:
    if k > latents:
        raise InputError(f"{fields.place('k')}: expected at most the {latents} latents, found {k}")
    if activation == "topk":
        return TopK(k, by_magnitude=signed, relu_too=not signed)
    if signed:
        raise InputError(f"{fields.place('signed')}: belongs to topk; activation says groupmax")
    if latents % k:
        raise InputError(
            f"{fields.place('k')}: groupmax cuts {latents} latents into k equal groups; expected a divisor,"
            f" found {k}"
        )
    return GroupMax(k)


def _positive(fields: Fields, key: str, value: int) -> int:
    if value < 1:
        raise InputError(f"{fields.place(key)}: expected 1 or more, found {value}")
    return value


# --- where it stands ----------------------------------------------------------------------------------------


def _hooks(
    folder: Path, transcode: bool, facts: Facts | None, declared: Declared
) -> tuple[ReadHook, WriteHook]:
    """What is read and written: by the user's word, else by the folder's name."""
    module = _module(folder)
    # An SAE is written where it is read, unless told otherwise.
    written_alike = None if transcode else declared.reads
    try:
        return (
            read_hook(declared.reads or f"{module}.{'input' if transcode else 'output'}", facts, "reads"),
            write_hook(declared.writes or written_alike or f"{module}.output", facts, "writes"),
        )
    except InputError as error:
        if declared.reads and (declared.writes or written_alike):
            raise
        raise InputError(
            f"{folder}: the folder's name should be a module of the model, such as layers.2.mlp; rename it,"
            f" or say reads and writes ({error})"
        ) from None


def _module(folder: Path) -> str:
    named = folder.resolve()
    return named.parent.name if _SEED.fullmatch(named.name) else named.name


def _layer(folder: Path, read: ReadHook, write: WriteHook, declared: Declared) -> tuple[int, int]:
    """(layer read, layer written)."""
    if declared.layer is not None and declared.reads and read.layer not in (None, declared.layer):
        raise InputError(
            f"reads: {declared.reads} is of layer {read.layer}, but layer says {declared.layer}; leave one"
            " out"
        )
    named = re.search(r"(?:^|\.)(0|[1-9]\d*)(?:\.|$)", _module(folder))
    choices = (declared.layer, read.layer, write.layer, int(named[1]) if named else None)
    layer = next((one for one in choices if one is not None), None)
    if layer is None:
        raise InputError(
            f"{folder}: neither the folder's name nor reads says the layer; say it with layer, or name the"
            " folder as the library does (layers.2.mlp)"
        )
    own_word = declared.writes is not None or declared.layer is None
    written = write.layer if own_word and write.layer is not None else layer
    if written < layer:
        raise InputError(f"{folder}: reads layer {layer} and writes layer {written}; expected none before it")
    return layer, written


# --- the weights --------------------------------------------------------------------------------------------


def _found(folder: Path, facts: Facts | None, declared: Declared) -> Found:
    path = folder / _WEIGHTS
    config = _config(folder / _CONFIG)
    read, write = _hooks(folder, config.transcode, facts, declared)
    layer, written = _layer(folder, read, write, declared)
    header = read_header(path)
    _check(path, header, config)
    check_width(f"{path}: encoder.weight", config.d_in, read.read.site, facts)
    check_width(f"{path}: W_dec", config.d_in, write.site, facts)
    gate = config.gate
    k = gate.k if isinstance(gate, TopK) else gate.groups if isinstance(gate, GroupMax) else 0
    named = f"GroupMax {k}" if isinstance(gate, GroupMax) else f"TopK {k}"
    writes = (written, write.site, write.at)
    return Found(
        where=folder,
        kind="transcoder" if config.transcode else "sae",
        layer=layer,
        size=config.latents,
        read=read.read,
        writes=(writes,),
        activation=named
        + (" by magnitude" if gate == TopK(k, True, False) else "")
        + (" with skip" if config.skip else ""),
        bytes=4 * sum(entry.count for entry in header.values()),
        dtypes=frozenset(entry.dtype for entry in header.values()),
        widths=(config.d_in, config.d_in),
        load=partial(_load, path, header, config, layer, read.read, writes),
        l0=float(k),
        notes=(*config.notes, *(note for note in (read.note, write.note) if note)),
    )


def _check(path: Path, header: Mapping[str, Entry], config: _Config) -> None:
    check_keys(path, header, _REQUIRED | ({"W_skip"} if config.skip else set()))
    d, size = config.d_in, config.latents
    told = f"{_CONFIG} says {size} latents of d_in {d}"
    for key in ("encoder.weight", "W_dec"):
        check_shape(path, key, header[key], (size, d), told)
    check_shape(path, "encoder.bias", header["encoder.bias"], (size,), told)
    check_shape(path, "b_dec", header["b_dec"], (d,), told)
    if config.skip:
        check_shape(path, "W_skip", header["W_skip"], (d, d), told)


def _load(
    path: Path,
    header: Mapping[str, Entry],
    config: _Config,
    layer: int,
    read: Read,
    writes: tuple[int, str, At],
) -> Dictionary:
    tensors = read_tensors(path, header)
    written, site, at = writes
    return Dictionary(
        set="",
        kind="transcoder" if config.transcode else "sae",
        layer=layer,
        read=read,
        encoders=(Encoder("in", tensors["encoder.weight"], tensors["encoder.bias"]),),
        writes=(Write(written, site, at, tensors["W_dec"], tensors["b_dec"]),),
        gate=config.gate,
        b_in=None if config.transcode else tensors["b_dec"],
        W_skip=tensors["W_skip"].T.contiguous() if config.skip else None,
    )


FORMAT = FolderFormat(
    name="sparsify",
    hub_files=("*cfg.json", "*sae.safetensors"),
    files=(_CONFIG, _WEIGHTS),
    holds=_holds,
    found=_found,
)
