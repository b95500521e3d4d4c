"""Dictionaries found one by one under a path, each in files of its own, and the set that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.dictionaries.folders import dictionary_folders, one_per_layer
from ingest.dictionaries.hooks import ReadHook, WriteHook, mlp_input, read_hook, write_hook
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout, choose_layers
from ingest.dictionaries.types import At, Dictionary, Read
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FolderFormat", "Found", "check_declared", "check_width", "folders_of", "layout_of", "site_width"]


@dataclass(frozen=True, eq=False)
class Found:
    """One dictionary by its headers and its configuration, all shapes checked."""

    where: Path  # named in errors: the folder or file that a user would give to mean this one
    kind: str
    layer: int
    size: int
    read: Read
    writes: tuple[tuple[int, str, At], ...]
    activation: str  # for people
    bytes: int  # in memory once loaded
    dtypes: frozenset[str]
    widths: tuple[int, int]  # (d_in, d_out)
    load: Callable[[], Dictionary]  # without set name and hash
    l0: float | None = None
    provenance: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()
    folded: bool = False  # Layout's


def folders_of(where: Path, holds: Callable[[Path], bool], files: Sequence[str]) -> list[Path]:
    """The folders at or below a path that hold a dictionary; a path of one of its files means its folder.

    `files` are named from that folder: `checkpoints/final.safetensors` means the folder above checkpoints.
    """
    if not where.is_file():
        return dictionary_folders(where, holds)
    for parts in (Path(file).parts for file in files):
        if where.parts[-len(parts) :] == parts and holds(where.parents[len(parts) - 1]):
            return [where.parents[len(parts) - 1]]
    return []


@dataclass(frozen=True)
class FolderFormat:
    """A format whose dictionaries each fill a folder: the path is that folder, or one above several.

    `files`: what a folder holds, for errors; the path of one of them means its folder too. `found` reads the
    headers of one folder. `claims` says of the first of several whether its keys are this format's.
    """

    name: str
    hub_files: tuple[str, ...]
    files: tuple[str, ...]
    holds: Callable[[Path], bool]
    found: Callable[[Path, Facts | None, Declared], Found]
    claims: Callable[[Path], bool] = Path.is_dir

    def recognises(self, where: Path) -> bool:
        """Folders with these files, in the folder or below it, and by their keys this format's."""
        folders = folders_of(where, self.holds, self.files)
        return bool(folders) and self.claims(folders[0])

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        """Every folder's headers, checked. Raises InputError."""
        files = " and ".join(self.files)
        if where is None:
            raise InputError(f"format {self.name!r} needs a path: the folder with {files}")
        folders = folders_of(where, self.holds, self.files)
        if not folders:
            raise InputError(f"{where}: no folder here holds {files}; expected both")
        if declared.layer is not None and len(folders) > 1:
            raise InputError(
                f"{where}: holds {len(folders)} dictionaries, layer says {declared.layer} of one; give the"
                " deeper path of that one"
            )
        found = [self.found(folder, facts, declared) for folder in folders]
        return layout_of(self.name, where, found, facts, layers)


def layout_of(
    name: str, where: Path, found: Sequence[Found], facts: Facts | None, layers: Layers, **also: Any
) -> Layout:
    """The set of them, one for each layer; `also` goes to Layout as it is.

    What several say alike is said once. Raises InputError where they read several sites, two of them one
    layer, or where they are of several kinds.
    """
    one_per_layer([(one.where, one.layer, one.read) for one in found])
    by_layer = {one.layer: one for one in sorted(found, key=lambda one: one.layer)}
    kinds = {one.kind: one.where for one in by_layer.values()}
    if len(kinds) > 1:
        listed = "; ".join(f"{path} is a {kind}" for kind, path in kinds.items())
        raise InputError(f"{where}: holds dictionaries of several kinds: {listed}; give the path of one kind")
    chosen, notes = choose_layers(list(by_layer), layers, facts, str(where))
    taken = [by_layer[layer] for layer in chosen]
    return Layout(
        format=name,
        kind=taken[0].kind if taken else next(iter(kinds)),
        source=where,
        sizes={one.layer: one.size for one in taken},
        read=found[0].read,
        writes={one.layer: one.writes for one in taken},
        readings=("in",),
        activation=" or ".join(dict.fromkeys(one.activation for one in taken)),
        load=partial(_load, {one.layer: one for one in taken}),
        bytes={one.layer: one.bytes for one in taken},
        widths={one.layer: one.widths for one in taken},
        dtypes=tuple(sorted(frozenset().union(*(one.dtypes for one in taken)))),
        provenance=_shared(taken),
        notes=(*notes, *dict.fromkeys(note for one in taken for note in one.notes)),
        l0={one.layer: one.l0 for one in taken if one.l0 is not None},
        **{"folded": any(one.folded for one in taken), **also},
    )


def check_declared(
    declared: Declared,
    read: ReadHook,
    write: WriteHook,
    facts: Facts | None,
    where: str,
    *,
    folded: bool = False,
) -> None:
    """InputError where the user says otherwise than the file does. `where`: "file: key" of what it says;
    `folded` as for `read_hook`."""
    if declared.reads is not None:
        said = read_hook(declared.reads, facts, "reads", folded=folded)
        if read.read not in (said.read, mlp_input(said.read)) or said.layer not in (None, read.layer):
            raise InputError(
                f"{where}: reads {read.read.site} ({read.read.space}) of layer {read.layer}, but reads says"
                f" {declared.reads}; leave reads out, the file says it itself"
            )
    if declared.writes is not None:
        told = write_hook(declared.writes, facts, "writes")
        if (told.site, told.at) != (write.site, write.at) or told.layer not in (None, write.layer):
            raise InputError(
                f"{where}: writes {write.site} ({write.at}) of layer {write.layer}, but writes says"
                f" {declared.writes}; leave writes out, the file says it itself"
            )
    if declared.layer is not None and declared.layer != read.layer:
        raise InputError(
            f"{where}: is of layer {read.layer}, but layer says {declared.layer}; leave layer out, the file"
            " says it itself"
        )


def site_width(site: str, facts: Facts) -> int:
    """The length of the vectors at a site of ours (types.READ_SITES, WRITE_SITES)."""
    return facts.n_heads * facts.d_head if site == "attn.z" else facts.d_model


def check_width(place: str, width: int, site: str, facts: Facts | None) -> None:
    """InputError where vectors of this length do not stand at the model's site. `place`: "file: W_enc"."""
    if facts is not None and width != (expected := site_width(site, facts)):
        what = "n_heads times d_head" if site == "attn.z" else "d_model"
        raise InputError(
            f"{place} has width {width}, the model's {what} is {expected} ({facts.architecture}); it is for"
            " another model"
        )


def _load(by_layer: Mapping[int, Found], layer: int, model: object) -> Dictionary:
    return by_layer[layer].load()


def _shared(found: Sequence[Found]) -> dict[str, str]:
    """The entries of provenance that all have alike."""
    each = [one.provenance or {} for one in found]
    return {
        key: value
        for key, value in (each[0] if each else {}).items()
        if all(e.get(key) == value for e in each)
    }
