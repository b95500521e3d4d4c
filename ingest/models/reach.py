"""Which dictionaries have edges into which, by where they write and read (methods: Which pairs have edges).

    DIRECT      the source is written before the target reads the stream
    VIA_HEAD    through a head of layer L that reads after the source is written, and adds to the stream
                before the target reads it; into an attention output or z, the heads of its own layer alone

A dictionary on the residual stream re-describes all that was written before its cut. Edges from it are
another description of the same stream as edges from what was written below it, so they are decided apart; and
of a set of them only the last one before a reader is its source, for the ones below are described again by
it. Into a dictionary that reads no stream through weights (an MLP's output), or only what tokens wrote (the
embedding), there are no edges between features. Needs facts alone, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingest.errors import InputError
from ingest.models.facts import Facts
from ingest.models.order import read_cut, write_event

if TYPE_CHECKING:
    from ingest.dictionaries import Layout

__all__ = ["Standing", "check_weights", "head_layers", "pair_notes", "sources_of"]

_STREAM = ("resid_pre", "resid_mid", "resid_post")
_BEHIND_HEADS = ("attn.out", "attn.z")


@dataclass(frozen=True)
class Standing:
    """Where one dictionary stands in the order of writes and reads."""

    set: str
    site: str  # read
    layer: int
    event: int  # of its first write: a cross-layer transcoder has several
    cut: int
    redescribes: bool
    # What a head's output is for it: joined to the stream, at the module (before what stands behind
    # attention), or its own part of z.
    heads: str

    @classmethod
    def of(cls, facts: Facts, set: str, layout: Layout, layer: int) -> Standing:
        """That of a layer of a set."""
        site, writes = layout.read.site, layout.writes[layer]
        return cls(
            set,
            site,
            layer,
            min(write_event(facts, written, at) for at, written, _ in writes),
            read_cut(facts, site, layer),
            any(written in _STREAM for _, written, _ in writes),
            _heads(facts, layout),
        )

    @property
    def reads_stream(self) -> bool:
        """Whether it has reading vectors in the stream: DIRECT and EMBEDS may end in it."""
        return self.site not in (*_BEHIND_HEADS, "mlp.out")


def sources_of(target: Standing, candidates: Sequence[Standing]) -> list[Standing]:
    """Those of the candidates whose edges may end in the target, DIRECT or VIA_HEAD, in their order."""
    if target.site in ("mlp.out", "embed"):
        return []
    below = [
        one
        for one in candidates
        if one.event < target.cut
        and not (one.redescribes and target.redescribes and one.event == target.event)
    ]
    last: dict[str, int] = {}
    for one in below:
        if one.redescribes:
            last[one.set] = max(last.get(one.set, -1), one.event)
    return [one for one in below if not one.redescribes or one.event == last[one.set]]


def head_layers(facts: Facts, source: Standing, target: Standing) -> tuple[int, ...]:
    """The layers whose heads pass a source on to a target; the source is one of `sources_of` it."""
    if target.site in _BEHIND_HEADS:
        return (target.layer,)
    events = {layer: write_event(facts, "attn", layer) for layer in range(facts.n_layers)}
    return tuple(layer for layer, event in events.items() if source.event < event < target.cut)


def check_weights(facts: Facts, name: str, layout: Layout) -> None:
    """InputError where a set can be no part of a weight graph on this model."""
    for layer, writes in layout.writes.items():
        if len(writes) > 1 and facts.norm_after:
            raise InputError(
                f"{name}: writes in {len(writes)} layers, and in {facts.architecture} a norm with a scale of"
                " its own stands behind each MLP: no one weight out of it is the same on every input; leave"
                " cross-layer transcoders out of an atlas of this model"
            )
        standing = Standing.of(facts, name, layout, layer)
        if standing.event < standing.cut and not standing.redescribes and standing.site != "embed":
            at, site, _ = min(writes, key=lambda one: write_event(facts, one[1], one[0]))
            raise InputError(
                f"{name}: layer {layer}: reads {standing.site} and writes {site} of layer {at}, which the"
                " model computed before; expected a write after what is read"
            )


def pair_notes(name: str, layout: Layout) -> tuple[str, ...]:
    """What a user should know of the edges of a set."""
    site = layout.read.site
    notes = []
    if any(written in _STREAM for writes in layout.writes.values() for _, written, _ in writes):
        notes.append(
            f"{name}: describes the residual stream again, with all that was written below it: edges from it"
            " are chosen apart from those of other sets, from the last layer before each reader, and are not"
            " to be added to theirs"
        )
    if site == "mlp.out":
        notes.append(f"{name}: reads the MLP's output: what feeds it is not a weight, so no edges end in it")
    elif site in _BEHIND_HEADS:
        notes.append(f"{name}: reads {site}: only VIA_HEAD edges through its own layer's heads end in it")
    elif site == "embed":
        notes.append(f"{name}: reads the embedding: only EMBEDS edges end in it")
    return tuple(notes)


def _heads(facts: Facts, layout: Layout) -> str:
    site = layout.read.site
    if site == "attn.z":
        return "z"
    if site != "attn.out" or not (facts.norm_after or facts.branch_multiplier != 1.0):
        return "stream"
    written = {at for writes in layout.writes.values() for _, one, at in writes if one == "attn"}
    if len(written) != 1:
        raise InputError(
            f"{layout.source}: reads attn.out, and in {facts.architecture} a norm or a multiplier stands"
            " behind attention: it does not say on which side of it; expected one that writes where it reads"
        )
    return str(written.pop())
