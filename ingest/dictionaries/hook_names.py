"""TransformerLens' names of the places where a dictionary reads and writes: hooks.py turned round, for
writing files.

`TransformerBridge` has hooks that `HookedTransformer` has not (an MLP's and attention's own input and
output), and its hook_normalized stands before the gain whatever the norm; `Hook.bridge` says where that is
meant. What a site is: ingest.models.capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingest.dictionaries.types import At, Dictionary, Read, Space, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["Hook", "read_name", "write_name"]


@dataclass(frozen=True)
class Hook:
    """A place by its name within a block; `full` is with the block's number."""

    inner: str
    layer: int
    note: str | None = None  # what the name does not say

    @property
    def full(self) -> str:
        """`blocks.5.hook_resid_post`, or `hook_embed`."""
        return self.inner if self.inner == "hook_embed" else f"blocks.{self.layer}.{self.inner}"

    @property
    def bridge(self) -> bool:
        """Whether the name is TransformerBridge's alone, or means there what is meant here."""
        return self.inner in _BRIDGE


_BRIDGE = {
    "mlp.hook_in", "mlp.hook_out", "attn.hook_in", "attn.hook_out",
    "ln1.hook_normalized", "ln2.hook_normalized",
}  # fmt: skip
_BRANCHES = {
    ("mlp", At.MODULE): "mlp.hook_out",
    ("mlp", At.STREAM): "hook_mlp_out",
    ("attn", At.MODULE): "attn.hook_out",
    ("attn", At.STREAM): "hook_attn_out",
}
_READS = {
    Read("mlp.in", Space.NORMALISED_WITH_GAIN): "mlp.hook_in",
    Read("mlp.in", Space.NORMALISED): "ln2.hook_normalized",
    Read("attn.in", Space.NORMALISED_WITH_GAIN): "attn.hook_in",
    Read("attn.in", Space.NORMALISED): "ln1.hook_normalized",
    **{Read(site, Space.RAW): f"hook_{site}" for site in ("resid_pre", "resid_mid", "resid_post")},
    Read("attn.z", Space.Z): "attn.hook_z",
}


def write_name(write: Write, facts: Facts | None) -> Hook:
    """The hook that a write changes."""
    if write.site in ("mlp", "attn"):
        return Hook(_BRANCHES[write.site, write.at], write.layer)
    if write.site == "embed":
        return _embedding(facts)
    return Hook("attn.hook_z" if write.site == "attn.z" else f"hook_{write.site}", write.layer)


def read_name(dictionary: Dictionary, facts: Facts | None, where: str) -> Hook:
    """The hook that a dictionary reads. `where` begins the error, for a space that no hook shows."""
    read, layer = dictionary.read, dictionary.layer
    if read.site in ("mlp.out", "attn.out") and read.space is Space.BRANCH_OUTPUT:
        site = read.site.removesuffix(".out")
        own = [write.at for write in dictionary.writes if (write.site, write.layer) == (site, layer)]
        return Hook(_BRANCHES[site, own[0] if own else At.MODULE], layer)
    if read == Read("embed", Space.RAW):
        return _embedding(facts)
    if read == Read("mlp.in", Space.RAW):
        if facts is not None and facts.parallel:
            return Hook("hook_mlp_in", layer, "hook_mlp_in is there only where use_hook_mlp_in is set")
        return Hook("hook_resid_mid", layer)
    if read == Read("attn.in", Space.RAW):
        return Hook(
            "hook_resid_pre",
            layer,
            "what attention reads before its norm is named hook_resid_pre, the same vectors: read back it is"
            " the stream's",
        )
    if read not in _READS:
        raise InputError(f"{where}: reads {read.site} ({read.space}), which no hook shows; not supported")
    return Hook(_READS[read], layer)


def _embedding(facts: Facts | None) -> Hook:
    if facts is None:
        return Hook(
            "hook_embed",
            0,
            "hook_embed is the stream before block 0 where nothing is added to the embedding of tokens; of a"
            " model with learnt positions that is blocks.0.hook_resid_pre: say which model",
        )
    if facts.positions == "learned" or facts.embedding_norm:
        return Hook(
            "hook_resid_pre",
            0,
            "the embedding with positions is named blocks.0.hook_resid_pre, the same vectors: read back it is"
            " the stream's",
        )
    return Hook("hook_embed", 0)
