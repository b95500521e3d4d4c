"""Names of places in a model, as the formats write them, and the sites of ours that they mean.

A name is a TransformerLens hook (`blocks.5.hook_resid_post`, `blocks.5.ln2.hook_normalized`), a module with
its side (`model.layers.12.output`, `model.layers.12.self_attn.o_proj.input`), a submodule of
dictionary_learning's (`resid_post_layer_4`) or one of our own sites (`mlp.in`, `resid_post`); the block's
number may be left out. What a name means can depend on the model: `hook_normalized` stands behind gain and
bias where the norm is a LayerNorm and before the gain where it is an RMSNorm (methods: hook_normalized trap).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingest.dictionaries.types import At, Read, Space
from ingest.errors import InputError, near

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["ReadHook", "WriteHook", "mlp_input", "read_hook", "write_hook"]


@dataclass(frozen=True)
class ReadHook:
    """Where a name reads. `layer` is None where the name holds none; an embedding is of layer 0."""

    layer: int | None
    read: Read
    note: str | None  # what had to be assumed


@dataclass(frozen=True)
class WriteHook:
    """Where a name writes; `site` is one of types.WRITE_SITES."""

    layer: int | None
    site: str
    at: At
    note: str | None


@dataclass(frozen=True)
class _Place:
    read: Read
    write: tuple[str, At] | None  # None: what is written there joins no stream
    vague: bool = False  # says `output` without saying on which side of what stands behind the branch


_MLP_IN = _Place(Read("mlp.in", Space.NORMALISED_WITH_GAIN), None)
_ATTN_IN = _Place(Read("attn.in", Space.NORMALISED_WITH_GAIN), None)
_RESID = {
    site: _Place(Read(site, Space.RAW), (site, At.STREAM))
    for site in ("resid_pre", "resid_mid", "resid_post")
}
_MLP_READ = Read("mlp.out", Space.BRANCH_OUTPUT)
_ATTN_READ = Read("attn.out", Space.BRANCH_OUTPUT)
_MLP_MODULE, _MLP_STREAM = _Place(_MLP_READ, ("mlp", At.MODULE)), _Place(_MLP_READ, ("mlp", At.STREAM))
_ATTN_MODULE, _ATTN_STREAM = _Place(_ATTN_READ, ("attn", At.MODULE)), _Place(_ATTN_READ, ("attn", At.STREAM))
_Z = _Place(Read("attn.z", Space.Z), ("attn.z", At.MODULE))
_EMBED = _Place(Read("embed", Space.RAW), ("embed", At.STREAM))

_TRANSFORMER_LENS = {
    "hook_embed": _EMBED,
    "hook_resid_pre": _RESID["resid_pre"],
    "hook_resid_mid": _RESID["resid_mid"],
    "hook_resid_post": _RESID["resid_post"],
    "hook_mlp_in": _Place(Read("mlp.in", Space.RAW), None),
    "hook_attn_in": _Place(Read("attn.in", Space.RAW), None),
    "ln1.hook_normalized": _ATTN_IN,  # the space by the norm's kind
    "ln2.hook_normalized": _MLP_IN,
    "mlp.hook_in": _MLP_IN,
    "attn.hook_in": _ATTN_IN,
    "mlp.hook_out": _MLP_MODULE,
    "hook_mlp_out": _MLP_STREAM,
    "attn.hook_out": _ATTN_MODULE,
    "hook_attn_out": _ATTN_STREAM,
    "attn.hook_z": _Z,
}
_BY_MODULE = {
    "input": _RESID["resid_pre"],
    "output": _RESID["resid_post"],
    **{f"{mlp}.input": _MLP_IN for mlp in ("mlp", "feed_forward")},
    **{f"{mlp}.output": _MLP_MODULE for mlp in ("mlp", "feed_forward")},
    **{
        f"mlp.{into}.input": _MLP_IN
        for into in ("up_proj", "gate_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in")
    },
    **{f"mlp.{out}.output": _MLP_MODULE for out in ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out")},
    **{
        f"{norm}.{side}": place
        for norm in ("pre_feedforward_layernorm", "ln_2")
        for side, place in (("input", _RESID["resid_mid"]), ("output", _MLP_IN))
    },
    **{
        f"{norm}.{side}": place
        for norm in ("input_layernorm", "ln_1")
        for side, place in (("input", _RESID["resid_pre"]), ("output", _ATTN_IN))
    },
    **{
        f"{norm}.{side}": place
        for norm in ("post_feedforward_layernorm", "post_mlp_layernorm")
        for side, place in (("input", _MLP_MODULE), ("output", _MLP_STREAM))
    },
    "post_self_attn_layernorm.input": _ATTN_MODULE,
    "post_self_attn_layernorm.output": _ATTN_STREAM,
    **{
        f"{attention}.{inside}{side}": place
        for attention in ("self_attn", "attn", "attention", "self_attention", "attn.attention")
        for inside, side, place in (
            ("", "input", _ATTN_IN),
            ("", "output", _ATTN_MODULE),
            *(
                (f"{out}.", side, place)
                for out in ("o_proj", "c_proj", "dense", "out_proj")
                for side, place in (("input", _Z), ("output", _ATTN_MODULE))
            ),
        )
    },
}
_OWN = {
    **_RESID,
    "embed": _EMBED,
    "mlp.in": _MLP_IN,
    "attn.in": _ATTN_IN,
    "mlp.out": _Place(_MLP_READ, ("mlp", At.MODULE), vague=True),
    "attn.out": _Place(_ATTN_READ, ("attn", At.MODULE), vague=True),
    "attn.z": _Z,
}
_SUBMODULES = {
    "resid_pre": _RESID["resid_pre"],
    "resid_mid": _RESID["resid_mid"],
    "resid_post": _RESID["resid_post"],
    "resid": _RESID["resid_post"],
    "mlp_in": _MLP_IN,
    "mlp_out": _MLP_MODULE,
    "mlp": _MLP_MODULE,
    "attn_out": _ATTN_MODULE,
    "attn": _ATTN_MODULE,
}
_PLACES = {**_TRANSFORMER_LENS, **_BY_MODULE, **_OWN}
_EMBEDDINGS = ("embed_tokens.output", "wte.output", "embed_in.output", "word_embeddings.output")
_NORMALISED = {"ln1.hook_normalized", "ln2.hook_normalized"}
_NEURONS = {
    "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post", "mlp.hook_mid",
    *(f"mlp.{out}.input" for out in ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out")),
    *(f"mlp.{into}.output" for into in ("up_proj", "gate_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in")),
}  # fmt: skip

_BLOCK = re.compile(r"(?:(?:[a-z_]+\.)*(?:blocks|layers|h)\.)(0|[1-9]\d*)\.(.+)")
_SUBMODULE = re.compile(r"([a-z_]+?)_layer_?(0|[1-9]\d*)")


def read_hook(name: str, facts: Facts | None, where: str, *, folded: bool = False) -> ReadHook:
    """The site and space that `name` reads. `where` begins the error: "file: key".

    `folded`: the name is of TransformerLens' folded model, whose norms have no gain. Raises InputError for a
    name not known, for one that is no site (`mlp.hook_post`), and for one that the model has not.
    """
    layer, inner, place = _place(name, facts, where)
    read, note = place.read, None
    if inner in _NORMALISED:
        if facts is not None and not facts.norm_before:
            raise InputError(
                f"{where}: {name} does not exist in {facts.architecture}, whose branches read the stream"
                f" without a norm; it is for another model"
            )
        if folded or facts is None or not facts.norm.centred:
            read = Read(read.site, Space.NORMALISED)
        if facts is None and not folded:
            note = (
                f"{name} is read as normalised without gain, as it is where the norm is an RMSNorm; of a"
                " model with LayerNorm it is after gain and bias: say which model"
            )
    if inner == "embeddings" and facts is not None and facts.embedding_factor != 1:
        note = (
            f"{name} is read as the embedding that joins the stream, with the model's factor of"
            f" {facts.embedding_factor:g}"
        )
    return ReadHook(layer, read, note)


def write_hook(name: str, facts: Facts | None, where: str) -> WriteHook:
    """The site that `name` writes, and on which side of what stands behind a branch. `where` begins the
    error.

    Raises InputError for a name not known, for one at which nothing joins the stream (the MLP's input), and
    for `mlp.out` or `attn.out` alone on a model where a norm or a multiplier stands behind the branch.
    """
    layer, _, place = _place(name, facts, where)
    if place.write is None:
        raise InputError(
            f"{where}: {name} cannot be written to here: what a branch reads does not join the residual"
            f" stream; expected a residual, embedding, attention or MLP output"
        )
    site, at = place.write
    note = None
    if place.vague:
        behind = facts is None or facts.norm_after or facts.branch_multiplier != 1
        if behind and facts is not None:
            raise InputError(
                f"{where}: {name} is not enough on {facts.architecture}, where a norm or a multiplier stands"
                f" behind the branch; expected {site}.hook_out (the module's output) or hook_{site}_out (what"
                f" joins the stream)"
            )
        if behind:
            note = f"{name} is taken as the module's output, before any norm or multiplier behind it"
    return WriteHook(layer, site, at, note)


def mlp_input(read: Read) -> Read:
    """What an MLP's transcoder reads where its file says hook_resid_mid: the MLP's input before its norm."""
    return Read("mlp.in", Space.RAW) if read == _RESID["resid_mid"].read else read


def _place(name: str, facts: Facts | None, where: str) -> tuple[int | None, str, _Place]:
    """(layer or None, the name within a block, the place)."""
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{where}: expected the name of a hook, such as blocks.5.hook_resid_post, found {name!r}"
        )
    if (submodule := _SUBMODULE.fullmatch(name)) and submodule[1] in _SUBMODULES:
        return int(submodule[2]), submodule[1], _existing(name, _SUBMODULES[submodule[1]], facts, where)
    if name.endswith(_EMBEDDINGS):
        return 0, "embeddings", _EMBED
    block = _BLOCK.fullmatch(name)
    layer, inner = (int(block[1]), block[2]) if block else (None, name)
    if inner in _NEURONS:
        raise InputError(
            f"{where}: {name} is the space of the MLP's neurons, which is no site here; expected a residual"
            f" stream, or an MLP's or attention's input or output"
        )
    if inner in ("post_attention_layernorm.output", "post_attention_layernorm.input"):
        return layer, inner, _post_attention(name, inner, facts, where)
    if inner not in _PLACES:
        sided = f"{inner}.output" in _PLACES and f"{inner}.input" in _PLACES
        hint = f"; say {name}.input or {name}.output" if sided else near(inner, _PLACES)
        if not sided and hint.startswith("; expected"):
            hint = f"; expected one of {', '.join(_TRANSFORMER_LENS)}, or a module's .input or .output"
        raise InputError(f"{where}: unknown hook {name!r}{hint}")
    place = _existing(name, _PLACES[inner], facts, where)
    return 0 if place is _EMBED else layer, inner, place


def _existing(name: str, place: _Place, facts: Facts | None, where: str) -> _Place:
    if place is _RESID["resid_mid"] and facts is not None and facts.parallel:
        raise InputError(
            f"{where}: {name} does not exist in the parallel blocks of {facts.architecture}; expected"
            f" mlp.hook_in or hook_mlp_in: it is for another model"
        )
    return place


def _post_attention(name: str, inner: str, facts: Facts | None, where: str) -> _Place:
    """Llama's norm before the MLP, OLMo 2's norm behind attention; of models with both kinds either."""
    if facts is None or (facts.norm_before and facts.norm_after):
        on = "without a model" if facts is None else f"on {facts.architecture}"
        raise InputError(
            f"{where}: {name} is ambiguous {on}: some models have that norm before the MLP, some behind"
            f" attention; expected mlp.hook_in (the MLP's input) or hook_attn_out (what attention adds)"
        )
    side = inner.rpartition(".")[2]
    if facts.norm_after:
        return _ATTN_STREAM if side == "output" else _ATTN_MODULE
    return _MLP_IN if side == "output" else _existing(name, _RESID["resid_mid"], facts, where)
