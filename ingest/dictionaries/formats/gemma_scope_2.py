"""Gemma Scope 2: `params.safetensors` and `config.json` for each dictionary, or one
`params_layer_{i}.safetensors` for each layer of a cross-layer transcoder.

    resid_post/layer_12_width_16k_l0_medium/{config.json, params.safetensors}
    clt/width_262k_l0_medium/params_layer_0.safetensors, …

The tensors are in ingest/dictionaries/gemma_scope_tensors.py, here under `w_enc`, `w_dec` and
`affine_skip_connection` (x @ it, not transposed). config.json names Hugging Face's modules:
`pre_feedforward_layernorm.output` is what the MLP reads, gain in; `post_feedforward_layernorm.output` is what
joins the stream.

Cross-layer: `w_dec (F, n_layers, d)` has a place for every layer written, zero before its own; `b_dec` and
the skip of a file are its own layer's, added there once, whichever layers write to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.dictionaries.configs import Fields, read_json
from ingest.dictionaries.found import Found, check_declared, folders_of, layout_of
from ingest.dictionaries.gemma_scope_tensors import Names, check_tensors, dictionary_of, memory_of
from ingest.dictionaries.hooks import ReadHook, WriteHook, read_hook, write_hook
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout
from ingest.dictionaries.tensor_files import Entry, read_header, read_part, read_tensors
from ingest.dictionaries.types import At, Dictionary, Read, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_FILE, _CONFIG = "params.safetensors", "config.json"
_LAYER_FILE = re.compile(r"params_layer_(0|[1-9]\d*)\.safetensors")
_NAMES = Names("w_enc", "w_dec", "affine_skip_connection")
_CROSS = ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output")
_SAME = {"mlp.out": "mlp", "attn.out": "attn"}  # where an SAE of it writes


@dataclass(frozen=True)
class GemmaScope2:
    name: str = "gemma-scope-2"
    hub_files: tuple[str, ...] = (_FILE, _CONFIG, "params_layer_*.safetensors")

    def recognises(self, where: Path) -> bool:
        """A params.safetensors, or params_layer_*.safetensors, in the folder or below it."""
        return bool(_folders(where))

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(f"format {self.name!r} needs a path: a folder that holds {_FILE}, or one above")
        folders = _folders(where)
        if not folders:
            raise InputError(
                f"{where}: no folder here holds {_FILE} or params_layer_0.safetensors, …; expected one"
            )
        cross = [folder for folder in folders if _layer_files(folder)]
        if not cross:
            found = [_single(folder, facts, declared, alone=len(folders) == 1) for folder in folders]
        elif len(folders) > 1:
            listed = ", ".join(str(folder.relative_to(where)) for folder in folders[:4])
            raise InputError(
                f"{where}: holds several dictionaries, a cross-layer transcoder among them ({listed}"
                f"{', …' if len(folders) > 4 else ''}); give the deeper path of one"
            )
        else:
            found = _cross_layer(cross[0], facts, declared)
        return layout_of(self.name, where, found, facts, layers)


def _folders(where: Path) -> list[Path]:
    if where.is_file() and _LAYER_FILE.fullmatch(where.name):
        return [where.parent]
    return folders_of(
        where, lambda folder: (folder / _FILE).is_file() or bool(_layer_files(folder)), (_FILE, _CONFIG)
    )


def _layer_files(folder: Path) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in sorted(folder.iterdir())
        if (match := _LAYER_FILE.fullmatch(path.name))
    }


# --- one dictionary to a folder -----------------------------------------------------------------------------


def _single(folder: Path, facts: Facts | None, declared: Declared, alone: bool) -> Found:
    path = folder / _FILE
    header = read_header(path)
    config = _config(folder)
    read, write, notes = _hooks(folder, config, facts, declared, alone)
    layer = _layer(folder, read.layer, declared)
    size = check_tensors(path, header, _NAMES, (read.read.site, write.site), facts)
    _check_config(config, path, size, header)
    kind = "sae" if _SAME.get(read.read.site, read.read.site) == write.site else "transcoder"
    return Found(
        where=folder,
        kind=kind,
        layer=layer,
        size=size,
        read=read.read,
        writes=((layer, write.site, write.at),),
        activation=f"JumpReLU{' with skip' if _NAMES.skip in header else ''}",
        bytes=memory_of(header),
        dtypes=frozenset(entry.dtype for entry in header.values()),
        widths=(header["w_enc"].shape[0], header["w_dec"].shape[-1]),
        load=partial(_load_single, path, header, kind, layer, read.read, (write.site, write.at)),
        l0=config.l0,
        provenance=config.provenance,
        notes=notes,
    )


def _load_single(
    path: Path, header: Mapping[str, Entry], kind: str, layer: int, read: Read, write: tuple[str, At]
) -> Dictionary:
    tensors = read_tensors(path, header)
    writes = (Write(layer, *write, tensors["w_dec"], tensors["b_dec"]),)
    return dictionary_of(tensors, _NAMES, kind, layer, read, writes)


# --- a cross-layer transcoder -------------------------------------------------------------------------------


def _cross_layer(folder: Path, facts: Facts | None, declared: Declared) -> list[Found]:
    files = _layer_files(folder)
    count = len(files)
    if sorted(files) != list(range(count)):
        lacking = next(layer for layer in range(count) if layer not in files)
        raise InputError(
            f"{folder}: has no params_layer_{lacking}.safetensors, but that of layer {max(files)}; expected"
            " one for each layer"
        )
    if facts is not None and count != facts.n_layers:
        raise InputError(
            f"{folder}: has files for {count} layers, the model has {facts.n_layers} ({facts.architecture});"
            " expected one for each: a cross-layer transcoder of another model, or a part of one"
        )
    config = _config(folder)
    read, write, notes = _cross_hooks(folder, config, facts, declared)
    found = []
    for layer, path in sorted(files.items()):
        header = read_header(path)
        size = check_tensors(path, header, _NAMES, (read.site, write[0]), facts, targets=count)
        _check_config(config, path, size, header)
        targets = range(layer, count)
        decoder = header["w_dec"]
        others = memory_of(header) - 4 * decoder.count
        found.append(
            Found(
                where=folder,
                kind="cross-layer transcoder",
                layer=layer,
                size=size,
                read=read,
                writes=tuple((target, *write) for target in targets),
                activation=f"JumpReLU{' with skip' if _NAMES.skip in header else ''}",
                bytes=others + 4 * decoder.count * len(targets) // count,
                dtypes=frozenset(entry.dtype for entry in header.values()),
                widths=(header["w_enc"].shape[0], header["w_dec"].shape[-1]),
                load=partial(_load_cross, path, header, layer, read, write),
                l0=config.l0,
                provenance=config.provenance,
                notes=notes,
            )
        )
    return found


def _load_cross(
    path: Path, header: Mapping[str, Entry], layer: int, read: Read, write: tuple[str, At]
) -> Dictionary:
    tensors = read_tensors(path, header, leave_out={"w_dec"})
    count = header["w_dec"].shape[1]
    for target in range(layer):
        if read_part(path, header, "w_dec", target).any():
            raise InputError(
                f"{path}: w_dec writes to layer {target}, below layer {layer} that it reads; expected zeros"
                " there: another layout, or the file of another layer"
            )
    writes = tuple(
        Write(
            target,
            *write,
            read_part(path, header, "w_dec", target),
            tensors["b_dec"] if target == layer else None,
        )
        for target in range(layer, count)
    )
    return dictionary_of(tensors, _NAMES, "cross-layer transcoder", layer, read, writes)


def _cross_hooks(
    folder: Path, config: _Config, facts: Facts | None, declared: Declared
) -> tuple[Read, tuple[str, At], tuple[str, ...]]:
    """What every layer reads and writes, by the file, the user or the folder's name, in that order."""
    reads, writes = config.reads or declared.reads, config.writes or declared.writes
    notes: tuple[str, ...] = ()
    if reads is None or writes is None:
        if "clt" not in folder.absolute().parts:
            raise InputError(
                f"{folder}: nothing says what this reads and writes: no {_CONFIG}, and no folder clt above;"
                f" say it with reads ({_CROSS[0]}) and writes ({_CROSS[1]})"
            )
        reads, writes = reads or _CROSS[0], writes or _CROSS[1]
        notes = (f"the folder's name clt is all that says what is read ({reads}) and written ({writes})",)
    place = f"{folder / _CONFIG}: hf_hook_point_in" if config.reads else "reads"
    read, write = read_hook(reads, facts, place), write_hook(writes, facts, place)
    if read.read.site != "mlp.in" or write.site != "mlp":
        raise InputError(
            f"{folder}: reads {read.read.site} and writes {write.site}; expected a cross-layer transcoder of"
            " the MLPs"
        )
    return read.read, (write.site, write.at), notes


# --- config.json --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Config:
    """What config.json says; nothing where there is none."""

    path: Path
    reads: str | None = None
    writes: str | None = None
    width: int | None = None
    l0: float | None = None
    skip: bool | None = None
    provenance: Mapping[str, str] | None = None


def _config(folder: Path) -> _Config:
    path = folder / _CONFIG
    if not path.exists():
        return _Config(path)
    fields = Fields(path, read_json(path))
    fields.one_of("architecture", ("jump_relu", "jumprelu"), "jump_relu")
    reads = fields.take("hf_hook_point_in", str)
    said: dict[str, Any] = {
        "model_name": fields.take("model_name", str, None),
        "type": fields.take("type", str, None),
    }
    config = _Config(
        path,
        reads,
        fields.take("hf_hook_point_out", str, None),
        fields.take("width", int, None),
        fields.take("l0", float, None),
        fields.take("affine_connection", bool, None),
        {key: value for key, value in said.items() if value is not None},
    )
    fields.done()
    return config


def _check_config(config: _Config, path: Path, size: int, header: Mapping[str, Entry]) -> None:
    if config.width not in (None, size):
        raise InputError(
            f"{path}: w_enc has {size} latents, {config.path.name} says width {config.width}; one of the two"
            " is of another dictionary"
        )
    has = _NAMES.skip in header
    if config.skip is not None and config.skip != has:
        raise InputError(
            f"{path}: has {'an' if has else 'no'} affine_skip_connection, {config.path.name} says"
            f" affine_connection: {str(config.skip).lower()}; one of the two is of another dictionary"
        )


def _hooks(
    folder: Path, config: _Config, facts: Facts | None, declared: Declared, alone: bool
) -> tuple[ReadHook, WriteHook, tuple[str, ...]]:
    if config.reads is None:
        reads, place = declared.reads, "reads"
        if reads is None:
            raise InputError(
                f"{folder}: has no {_CONFIG}, which names what is read and written; put it beside {_FILE}, or"
                " say it with reads and writes"
            )
        writes = declared.writes or reads
    else:
        reads, writes = config.reads, config.writes or config.reads
        place = f"{config.path}: hf_hook_point_in"
    read, write = read_hook(reads, facts, place), write_hook(writes, facts, place)
    if config.reads is not None:
        check_declared(declared, read, write, facts, place)
    notes = tuple(note for note in (read.note, write.note) if note)
    if (declared.layer is not None or (config.reads is None and read.layer is not None)) and not alone:
        raise InputError(
            f"{folder}: is one of several dictionaries under the path, and the layer was said of one; give"
            " the deeper path of that one"
        )
    return read, write, notes


def _layer(folder: Path, read: int | None, declared: Declared) -> int:
    layer = declared.layer if read is None else read
    if layer is None:
        raise InputError(f"{folder}: nothing says its layer: the hook names none; say it with layer")
    return layer


FORMAT = GemmaScope2()
