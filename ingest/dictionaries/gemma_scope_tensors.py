"""What the dictionaries of Gemma Scope have in common, old and new: their tensors and what they compute.

W_enc (d_in, F)  b_enc (F)  W_dec (F, d_out)  b_dec (d_out)  threshold (F)  [skip (d_in, d_out)]

pre = x @ W_enc + b_enc      a = pre where pre > threshold, and never negative
out = a @ W_dec + b_dec (+ x @ skip)                    b_dec is never subtracted from the input
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.found import check_width
from ingest.dictionaries.tensor_files import Entry, check_keys, check_shape
from ingest.dictionaries.types import Dictionary, Encoder, JumpReLU, Read, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.models import Facts

__all__ = ["Names", "check_tensors", "dictionary_of", "memory_of"]


@dataclass(frozen=True)
class Names:
    """The keys under which a file has them."""

    W_enc: str = "W_enc"
    W_dec: str = "W_dec"
    skip: str | None = None

    @property
    def required(self) -> set[str]:
        """Those without which a file is none."""
        return {self.W_enc, self.W_dec, "b_enc", "b_dec", "threshold"}


def check_tensors(
    path: Path,
    header: Mapping[str, Entry],
    names: Names,
    sites: tuple[str, str],
    facts: Facts | None,
    targets: int | None = None,
) -> int:
    """F of a file whose header was read; `sites` it reads and writes. With `targets` W_dec is (F, targets,
    d_out).

    Raises InputError for what is missing, left over or of another shape than the others and the model ask.
    """
    check_keys(path, header, names.required, {names.skip} if names.skip else frozenset())
    encoder, decoder = header[names.W_enc].shape, header[names.W_dec].shape
    middle = () if targets is None else (targets,)
    if len(encoder) != 2 or 0 in encoder or decoder[:-1] != (encoder[1], *middle):
        turned = "; one of them looks transposed" if len(encoder) == 2 and encoder[0] in decoder[:1] else ""
        shape = ", ".join(("F", *map(str, middle), "d_out"))
        raise InputError(
            f"{path}: {names.W_enc} has shape {_text(encoder)} and {names.W_dec} {_text(decoder)}; expected"
            f" (d_in, F) and ({shape}) with the same F{turned}"
        )
    d_in, size, d_out = encoder[0], encoder[1], decoder[-1]
    for key, width, site in ((names.W_enc, d_in, sites[0]), (names.W_dec, d_out, sites[1])):
        check_width(f"{path}: {key} {_text(header[key].shape)}", width, site, facts)
    if "attn.z" not in sites and d_in != d_out:
        raise InputError(
            f"{path}: {names.W_enc} reads vectors of length {d_in}, {names.W_dec} writes {d_out}; expected"
            " one length, the model's d_model"
        )
    for key in ("b_enc", "threshold"):
        check_shape(path, key, header[key], (size,), f"one for each of the {size} columns of {names.W_enc}")
    check_shape(path, "b_dec", header["b_dec"], (d_out,), f"{names.W_dec} is {_text(decoder)}")
    if names.skip and names.skip in header:
        check_shape(path, names.skip, header[names.skip], (d_in, d_out), "what is read to what is written")
    return size


def memory_of(header: Mapping[str, Entry]) -> int:
    """Bytes of all its tensors as float32."""
    return 4 * sum(entry.count for entry in header.values())


def dictionary_of(
    tensors: Mapping[str, Tensor],
    names: Names,
    kind: str,
    layer: int,
    read: Read,
    writes: tuple[Write, ...],
) -> Dictionary:
    """The dictionary of a file's tensors; `writes` as its reader has laid them out."""
    return Dictionary(
        set="",
        kind=kind,
        layer=layer,
        read=read,
        encoders=(Encoder("in", tensors[names.W_enc].T.contiguous(), tensors["b_enc"]),),
        writes=writes,
        gate=JumpReLU(tensors["threshold"], relu_too=True),
        W_skip=tensors.get(names.skip) if names.skip else None,
    )


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
