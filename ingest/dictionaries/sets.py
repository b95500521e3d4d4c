"""Sets of dictionaries: found and checked by their headers at once, read one layer at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.formats import formats
from ingest.dictionaries.hashing import dictionary_hash, set_hash
from ingest.dictionaries.hooks import mlp_input, read_hook, write_hook
from ingest.dictionaries.hub import fetch
from ingest.dictionaries.layout import NOTHING, Declared, Format, Layers, Layout
from ingest.dictionaries.types import Dictionary, Space
from ingest.errors import InputError
from ingest.places import hub_place

if TYPE_CHECKING:
    from ingest.models import Facts, ResidualModel

_FOLDED = (
    "made for the folded model (gains folded into weights, branch outputs centred): what it writes may differ"
    " from this model's by the mean over components, which every norm that centres takes out"
)

__all__ = ["DictionarySet", "describe_set", "dictionary_key", "open_set"]


def dictionary_key(model: str, name: str, layer: int, site: str) -> str:
    """The readable key of one dictionary: `model/set/L08.mlp`."""
    return f"{model}/{name}/L{layer:02d}.{site}"


@dataclass(frozen=True, eq=False)
class DictionarySet:
    """The dictionaries of one set on one model. Nothing is kept: `load` reads a layer anew each time."""

    name: str
    model: str  # the model's name
    layout: Layout
    residual_model: ResidualModel = field(repr=False)
    alias: str | None = None
    declared: Declared = NOTHING
    _hashes: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def kind(self) -> str:
        """transcoder, cross-layer transcoder, sae, snmf or neurons."""
        return self.layout.kind

    @property
    def format(self) -> str:
        """The reader's name."""
        return self.layout.format

    @property
    def source(self) -> Path | None:
        """The files; None for neurons."""
        return self.layout.source

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers read, ascending."""
        return self.layout.layers

    @property
    def sizes(self) -> Mapping[int, int]:
        """Layer to number of latents."""
        return self.layout.sizes

    @property
    def notes(self) -> tuple[str, ...]:
        """What was defaulted or is unusual, to be shown to the user."""
        return self.layout.notes

    @property
    def site(self) -> str:
        """The site in the key: `mlp` for what reads an MLP's input, else the site's own name."""
        return self.layout.read.site.removesuffix(".in")

    def key(self, layer: int) -> str:
        """`model/set/L08.mlp`."""
        self._check(layer)
        return dictionary_key(self.model, self.name, layer, self.site)

    def load(self, layer: int) -> Dictionary:
        """The dictionary of one layer: float32 on the CPU, checked finite. Raises InputError."""
        self._check(layer)
        loaded = self.layout.load(layer, self.residual_model)
        if layer not in self._hashes:
            self._hashes[layer] = (
                self.layout.hash_of(layer, self.residual_model.hash)
                if self.layout.hash_of
                else dictionary_hash(loaded, self.residual_model.hash)
            )
        return dataclasses.replace(loaded, set=self.name, hash=self._hashes[layer])

    def hash_of(self, layer: int) -> str:
        """sha256 of the dictionary on this model; reads the layer the first time, unless the format knows
        it."""
        self._check(layer)
        if layer not in self._hashes:
            if self.layout.hash_of:
                self._hashes[layer] = self.layout.hash_of(layer, self.residual_model.hash)
            else:
                self.load(layer)
        return self._hashes[layer]

    @property
    def hash(self) -> str:
        """sha256 of the set: of its dictionaries by layer, whatever its name."""
        return set_hash({layer: self.hash_of(layer) for layer in self.layers})

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads every layer once, before anything is computed: every weight finite, every hash known
        afterwards.

        `progress(done, total)` counts layers. Raises InputError at the first layer that does not hold.
        """
        for done, layer in enumerate(self.layers, start=1):
            self.load(layer)
            if progress:
                progress(done, len(self.layers))

    def _check(self, layer: int) -> None:
        if layer not in self.sizes:
            have = ", ".join(map(str, self.layers))
            raise InputError(
                f"dictionary set {self.name}: no dictionary for layer {layer}; it has layers {have}"
            )


def open_set(
    where: str | Path | None,
    *,
    name: str,
    model: ResidualModel,
    format: str | None = None,
    layers: Layers = "all",
    alias: str | None = None,
    declared: Declared = NOTHING,
) -> DictionarySet:
    """Dictionaries for a model: from a path, a hub name, or (None, format "neurons") the model itself.

    A path is the folder or file of one dictionary, or a folder above several, one for each layer; a hub name
    is `owner/name` or a folder of it, `owner/name/sub/folder`. All headers and shapes of all layers are
    checked here, against the model too; weights are read by `load`, and all of them once by `verify`. Raises
    InputError.
    """
    layout = describe_set(where, model.facts, format=format, layers=layers, declared=declared)
    recorded = layout.provenance.get("model_hash")
    if recorded and recorded != model.hash:
        raise InputError(
            f"{layout.source}: model_hash: made for the model {recorded[:12]}…, found {model.hash[:12]}…"
            f" ({model.source}); give it the model it was trained on"
        )
    return DictionarySet(name, model.name, layout, model, alias, declared)


def describe_set(
    where: str | Path | None,
    facts: Facts | None,
    *,
    format: str | None = None,
    layers: Layers = "all",
    declared: Declared = NOTHING,
) -> Layout:
    """The same from headers alone: layers, sizes, bytes, what is read and written. No weight is read, no
    torch imported. Without `facts` nothing is checked against a model. Raises InputError."""
    if format is not None and format not in formats():
        raise InputError(f"unknown dictionary format {format!r}; known: {', '.join(formats())}")
    if where is None:
        if format is None:
            raise InputError("a dictionary set needs a path, or format: neurons for the model's own")
        return formats()[format].scan(None, facts, layers, declared)
    path = _locate(where, formats()[format].hub_files if format else ())
    reader = formats()[format] if format else _recognise(path)
    layout = reader.scan(path, facts, layers, declared)
    _check_declared(layout, facts, declared)
    # Folding takes no mean out of a model whose norms take none out.
    centred = layout.folded and (facts is None or facts.norm.centred)
    return dataclasses.replace(layout, notes=(*layout.notes, _FOLDED)) if centred else layout


def _recognise(path: Path) -> Format:
    found = [reader for reader in formats().values() if reader.recognises(path)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(reader.name for reader in found)
        raise InputError(
            f"{path}: holds files of several formats ({names}); say which with format, or give the deeper"
            " path"
        )
    inside = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else [path.name]
    shown = ", ".join(inside[:6]) + (", …" if len(inside) > 6 else "") if inside else "nothing"
    raise InputError(f"{path}: no known dictionary format ({', '.join(formats())}); found {shown}")


def _locate(where: str | Path, patterns: tuple[str, ...]) -> Path:
    path = Path(where)
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    else:
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise InputError(f"{path}: cannot be read (permission denied)")
        return path
    if not hub_place(str(where)):
        raise InputError(f"{path}: no such file or directory; expected a directory with dictionaries")
    return fetch(
        str(where),
        patterns or tuple(pattern for reader in formats().values() for pattern in reader.hub_files),
    )


def _check_declared(layout: Layout, facts: Facts | None, declared: Declared) -> None:
    """What was declared is what was found, whatever the reader did with it. Raises InputError."""
    if declared.layer is not None and layout.layers != (declared.layer,):
        have = ", ".join(map(str, layout.layers))
        raise InputError(
            f"{layout.source}: layer {declared.layer} was declared, the files are of layer {have}"
        )
    if declared.reads is not None:
        read = mlp_input(read_hook(declared.reads, facts, "reads").read)
        found = mlp_input(layout.read)
        # On which side of a gain depends on the model, and on its folding, which the reader knows.
        if read.site != found.site or (read.space is Space.RAW) != (found.space is Space.RAW):
            raise InputError(
                f"{layout.source}: reads: {declared.reads} was declared, the files say {found.site}"
                f" ({found.space})"
            )
    if declared.writes is not None:
        site = write_hook(declared.writes, facts, "writes").site
        written = {one for writes in layout.writes.values() for _, one, _ in writes}
        if written != {site}:
            raise InputError(
                f"{layout.source}: writes: {declared.writes} was declared, the files say {', '.join(written)}"
            )
