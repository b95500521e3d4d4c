"""Gemma Scope: one `params.npz` for each dictionary, in folders that say its layer, width and average L0.

    layer_5/width_16k/average_l0_71/params.npz       embedding/width_4k/average_l0_6/params.npz

The tensors are in ingest/dictionaries/gemma_scope_tensors.py. An SAE and a transcoder have the same keys, and
nothing in the file names a site: the published repositories do (`gemma-scope-2b-pt-res`, `-mlp`, `-att`,
`-transcoders`), so the name of a folder above is taken for it, which is said, and `reads` overrules it.

SAEs of the embedding were made for embeddings before the model's factor; our site is the stream, so they are
folded: W_enc / factor, W_dec · factor, b_dec · factor, thresholds as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ingest.dictionaries.found import Found, folders_of, layout_of
from ingest.dictionaries.gemma_scope_tensors import Names, check_tensors, dictionary_of, memory_of
from ingest.dictionaries.hooks import read_hook, write_hook
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout, choose_layers
from ingest.dictionaries.npz_files import NpzEntry, read_npz, read_npz_header
from ingest.dictionaries.types import At, Dictionary, Read, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_FILE = "params.npz"
_LAYER = re.compile(r"layer_(0|[1-9]\d*)")
_L0 = re.compile(r"average_l0_(\d+(?:\.\d+)?)")
_REPOSITORY = re.compile(r"(?:.*--)?(gemma-scope-.*-(res|mlp|att|transcoders)(?:-canonical)?)")
# What the published repositories hold: (read, written).
_HELD = {
    "res": ("hook_resid_post", "hook_resid_post"),
    "mlp": ("hook_mlp_out", "hook_mlp_out"),
    "att": ("attn.hook_z", "attn.hook_z"),
    "transcoders": ("ln2.hook_normalized", "hook_mlp_out"),
}
_SAME = {"mlp.out": "mlp", "attn.out": "attn"}  # where an SAE of it writes


@dataclass(frozen=True)
class GemmaScope:
    name: str = "gemma-scope"
    hub_files: tuple[str, ...] = (_FILE,)

    def recognises(self, where: Path) -> bool:
        """A params.npz in the folder or below it."""
        return bool(_folders(where))

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(f"format {self.name!r} needs a path: a folder that holds {_FILE}, or one above")
        folders = _folders(where)
        if not folders:
            raise InputError(f"{where}: no folder here holds {_FILE}; expected one for each dictionary")
        places = [_placed(folder, facts, declared, alone=len(folders) == 1) for folder in folders]
        chosen, _ = choose_layers(sorted({place.layer for place in places}), layers, facts, str(where))
        wanted = [place for place in places if place.layer in chosen]
        _check_one_per_layer(where, wanted)
        return layout_of(self.name, where, [_found(place, facts) for place in wanted], facts, layers)


def _folders(where: Path) -> list[Path]:
    return folders_of(where, lambda folder: (folder / _FILE).is_file(), (_FILE,))


# --- what is read -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Placed:
    """A folder with a dictionary, and what is known of it without its tensors."""

    folder: Path
    layer: int
    read: Read
    write: tuple[str, At]
    l0: float | None
    notes: tuple[str, ...]

    @property
    def kind(self) -> str:
        same = _SAME.get(self.read.site, self.read.site) == self.write[0]
        return "sae" if same else "transcoder"


def _placed(folder: Path, facts: Facts | None, declared: Declared, alone: bool) -> _Placed:
    parts = folder.absolute().parts
    embedding = "embedding" in parts
    named = [int(match[1]) for part in parts if (match := _LAYER.fullmatch(part))]
    l0 = [float(match[1]) for part in parts if (match := _L0.fullmatch(part))]
    reads, writes, notes = _hooks(folder, embedding, declared)
    read, write = read_hook(reads, facts, "reads"), write_hook(writes, facts, "writes")
    if read.note and declared.reads:
        notes = (*notes, read.note)
    said = declared.layer if declared.layer is not None else read.layer
    if said is not None and not alone and read.read.site != "embed":
        raise InputError(
            f"{folder}: is one of several dictionaries under the path, and layer {said} was said of one; give"
            " the deeper path of that one"
        )
    layers = [said] if said is not None else named[-1:]
    if not layers:
        raise InputError(
            f"{folder}: nothing says its layer; expected a folder such as layer_5 in its path, or layer"
        )
    return _Placed(folder, layers[0], read.read, (write.site, write.at), l0[-1] if l0 else None, notes)


def _hooks(folder: Path, embedding: bool, declared: Declared) -> tuple[str, str, tuple[str, ...]]:
    """Names of what is read and written, and what was taken from a folder's name."""
    if declared.reads is not None:
        # An SAE writes what it reads; only an MLP's transcoder can be told by its input alone.
        transcodes = declared.reads.endswith(("mlp.in", "mlp.hook_in", "hook_mlp_in", "ln2.hook_normalized"))
        return declared.reads, declared.writes or ("hook_mlp_out" if transcodes else declared.reads), ()
    repositories = [match for part in folder.absolute().parts if (match := _REPOSITORY.fullmatch(part))]
    if embedding:
        name, (reads, writes) = "embedding", ("hook_embed", "hook_embed")
    elif repositories:
        name, (reads, writes) = repositories[-1][1], _HELD[repositories[-1][2]]
    else:
        raise InputError(
            f"{folder}: nothing says what this dictionary reads, and an SAE's file is like a transcoder's;"
            " say it with reads (and writes), such as reads: hook_resid_post, or keep it under a folder with"
            " its repository's name (gemma-scope-2b-pt-res)"
        )
    note = f"the folder's name {name} is all that says what is read: {reads}"
    return reads, declared.writes or writes, (note,)


def _check_one_per_layer(where: Path, places: Sequence[_Placed]) -> None:
    by_layer: dict[tuple[int, Read], list[Path]] = {}
    for place in places:
        by_layer.setdefault((place.layer, place.read), []).append(place.folder)
    for (layer, _), folders in sorted(by_layer.items(), key=lambda item: item[0][0]):
        if len(folders) > 1:
            listed = ", ".join(str(folder.relative_to(where)) for folder in folders)
            raise InputError(
                f"{where}: holds {len(folders)} dictionaries for layer {layer}: {listed}; expected one for"
                " each layer: give the deeper path of one"
            )


# --- the file -----------------------------------------------------------------------------------------------


def _found(place: _Placed, facts: Facts | None) -> Found:
    path = place.folder / _FILE
    header = read_npz_header(path)
    names = Names("w_enc", "w_dec") if "w_enc" in header else Names()
    size = check_tensors(path, header, names, (place.read.site, place.write[0]), facts)
    factor = _embedding_factor(header[names.W_enc].shape[0], facts) if place.read.site == "embed" else 1.0
    notes = place.notes
    if factor != 1.0:
        notes = (*notes, f"made for embeddings before the model's factor {factor:g}; folded for the stream")
    elif place.read.site == "embed" and facts is not None:
        notes = (*notes, f"{facts.architecture} has no embedding factor: nothing was folded")
    return Found(
        where=place.folder,
        kind=place.kind,
        layer=place.layer,
        size=size,
        read=place.read,
        writes=((place.layer, *place.write),),
        activation="JumpReLU",
        bytes=memory_of(header),
        dtypes=frozenset(entry.dtype for entry in header.values()),
        widths=(header[names.W_enc].shape[0], header[names.W_dec].shape[-1]),
        load=partial(_load, place, header, names, factor),
        l0=place.l0,
        notes=notes,
    )


def _embedding_factor(d_model: int, facts: Facts | None) -> float:
    """What embeddings are multiplied by where they join the stream: √d on Gemma, float32 as it is there."""
    return float(np.float32(math.sqrt(d_model) if facts is None else facts.embedding_factor))


def _load(place: _Placed, header: dict[str, NpzEntry], names: Names, factor: float) -> Dictionary:
    tensors = read_npz(place.folder / _FILE, header)
    if factor != 1.0:
        for key, by in ((names.W_enc, 1 / factor), (names.W_dec, factor), ("b_dec", factor)):
            tensors[key] = (tensors[key].double() * by).float()
    write = Write(place.layer, *place.write, tensors[names.W_dec], tensors["b_dec"])
    return dictionary_of(tensors, names, place.kind, place.layer, place.read, (write,))


FORMAT = GemmaScope()
