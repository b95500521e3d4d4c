"""What a format's reader finds in a place before any weight is read, and what a reader must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ingest.dictionaries.types import At, Dictionary, Read
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["NOTHING", "Declared", "Format", "Layers", "Layout", "choose_layers"]

Layers = Literal["all"] | Sequence[int]


@dataclass(frozen=True)
class Declared:
    """What the user says of files that do not say it themselves. Where a file does, and differs, that is an
    error; where a folder's name does, the user's word wins.

    `reads` and `writes` are hook names (`blocks.5.hook_mlp_out`), names within a block (`hook_mlp_out`) or
    our sites (`mlp.in`, `resid_post`); ingest.dictionaries.hooks reads them. `layer` is the one layer of a
    folder that holds a single dictionary.
    """

    reads: str | None = None
    writes: str | None = None
    layer: int | None = None


@dataclass(frozen=True, eq=False)
class Layout:
    """A set of dictionaries by its headers: all shapes checked against each other and the model, no weight
    read.

    `load(layer, model)` reads one layer: a Dictionary without set name and hash. `hash_of(layer, model
    hash)`, where given, knows the hash without reading.
    """

    format: str
    kind: str
    source: Path | None
    sizes: Mapping[int, int]  # layer -> F, ascending
    read: Read
    writes: Mapping[int, tuple[tuple[int, str, At], ...]]  # layer -> (layer, site, at) of each write
    readings: tuple[str, ...]
    activation: str  # for people: "ReLU", "TopK 32", ...
    load: Callable[[int, Any], Dictionary]
    hash_of: Callable[[int, str], str] | None = None
    bytes: Mapping[int, int] = field(default_factory=dict)  # layer -> bytes in memory once loaded, float32
    dtypes: tuple[str, ...] = ()  # the types on disk
    widths: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # layer -> (d_in, d_out)
    provenance: Mapping[str, str] = field(default_factory=dict)  # what the file says of itself
    notes: tuple[str, ...] = ()  # what was defaulted or is unusual: to be shown
    l0: Mapping[int, float] = field(default_factory=dict)  # layer -> L0 the files declare (a k, an average)
    folded: bool = False  # made for TransformerLens' folded model, whose branch outputs are centred

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers read, ascending."""
        return tuple(self.sizes)


NOTHING = Declared()


class Format(Protocol):
    """A reader of one format. A module of `ingest/dictionaries/formats` holds one as `FORMAT`; that
    registers it.

    The module must not import torch at its top: headers are read without it.
    """

    name: str
    hub_files: tuple[str, ...]  # patterns of the files to fetch from a hub; empty where there is no file

    def recognises(self, where: Path) -> bool:
        """Whether the files there are this format's, by their names and keys, never by the folder's name."""

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        """Headers read and everything checked that can be; raises InputError. Without `facts` nothing is
        checked against a model, and what depends on one is defaulted and noted."""


def choose_layers(
    found: Sequence[int], wanted: Layers, facts: Facts | None, source: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The layers to read of those found, and a note where layers of the model have no dictionary.

    Raises InputError for a layer that the model lacks or that was asked for and is not there.
    """
    n_layers = max(found, default=-1) + 1 if facts is None else facts.n_layers
    first = min(found, default=0) if facts is None else 0  # one layer alone is no set with gaps
    lacking = [layer for layer in found if layer >= n_layers]
    if lacking and facts is not None:
        raise InputError(
            f"{source}: has a dictionary for layer {lacking[0]}, the model has layers 0 to"
            f" {n_layers - 1} ({facts.architecture}); it is for another model"
        )
    if wanted == "all":
        gap = [layer for layer in range(first, n_layers) if layer not in found]
        notes = (f"no dictionary for layer {_ranges(gap)} of {first} to {n_layers - 1}",) if gap else ()
        return tuple(sorted(found)), notes
    absent = [layer for layer in wanted if layer not in found]
    if absent:
        where = "the model has" if facts and not 0 <= absent[0] < n_layers else "it has"
        have = range(n_layers) if where == "the model has" else sorted(found)
        raise InputError(f"{source}: layer {absent[0]} was asked for, {where} layers {_ranges(list(have))}")
    return tuple(sorted(set(wanted))), ()


def _ranges(layers: list[int]) -> str:
    """`0 to 3, 7` for [0, 1, 2, 3, 7]."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
