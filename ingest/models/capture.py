"""Batched forward passes: what dictionaries read and write, captured; and the model with something else in
its place.

Where things are, for a layer L (methods: A model seen from its residual stream):

    embed          what tokens and positions (and a norm on embeddings) give: the stream before block 0
    resid_pre      the stream before block L;  resid_post behind it;  resid_mid = resid_pre + attention's part
    attn.in mlp.in raw: the stream that the branch reads (in a parallel block the MLP reads resid_pre);
                   normalised: (x C)/σ;  with gain: behind the norm, as the branch's matrices get it
    attn.z         the heads' outputs side by side, before W_O
    attn, mlp      module: the branch's output;  stream: what joins, behind a post-norm and the multiplier

A replacement is live: it sees what is read in the pass that it changes, so that several compound as they
would in use. Torch hooks carry it, as in ingest.models.runtime, and the pass stops when all is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ingest.dictionaries.types import WRITE_SITES, At, Read, Space
from ingest.errors import InputError
from ingest.models.layers import component
from ingest.models.residual import ResidualModel
from ingest.models.rows import Affine

__all__ = ["Captured", "Point", "Replacement", "capture", "logits_with", "point_read"]

Point = tuple[int, str, At]  # layer, one of WRITE_SITES, before or behind what follows a branch
Reads = Mapping[tuple[int, Read], torch.Tensor]
# (the value that the model has there (B, T, d), what is read in this pass) -> what to put there (B, T, d)
Replacement = Callable[[torch.Tensor, Reads], torch.Tensor]
_RESIDUAL = ("embed", "resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True, eq=False)
class Captured:
    """Values of one pass, float32, without gradient."""

    inputs: Mapping[tuple[int, Read], torch.Tensor]  # (B, T, d_in)
    outputs: Mapping[Point, torch.Tensor]  # (B, T, d_out)
    logits: torch.Tensor | None = None  # (B, T, d_vocab), where asked for


def capture(
    model: ResidualModel,
    tokens: torch.Tensor,
    inputs: Sequence[tuple[int, Read]] = (),
    outputs: Sequence[Point] = (),
    autocast: bool = False,
    logits: bool = False,
) -> Captured:
    """One forward over token ids (B, T), as far as the last thing asked for; to the end with `logits`.

    autocast: matrix products in bfloat16, the stream in float32.
    Raises InputError for ids or lengths that the model does not have, and for what it has no place for.
    """
    taps = _Taps(model, _checked(model, tokens))
    values = {key: taps.of_read(*key) for key in inputs}
    written = {key: taps.of_point(key) for key in outputs}
    found, result = _run(model, tokens, taps, {}, None, autocast, stop=not logits)
    return Captured(
        inputs={key: value(found).float() for key, value in values.items()},
        outputs={key: value(found).float() for key, value in written.items()},
        logits=None if result is None else result.float(),
    )


def logits_with(
    model: ResidualModel,
    tokens: torch.Tensor,
    replace: Mapping[Point, Replacement],
    reads: Sequence[tuple[int, Read]] = (),
    scored: torch.Tensor | None = None,
    autocast: bool = False,
) -> torch.Tensor:
    """(B, T, d_vocab) float32 logits of the model with each point's value replaced.

    A replacement is called once, with the value that this pass has there and the `reads` as far as the pass
    has come: what stands before the point. scored: (B, T), where to replace; elsewhere the model keeps its
    own value. A replacement that returns what it is given changes no bit.
    """
    taps = _Taps(model, _checked(model, tokens))
    values = {key: taps.of_read(*key) for key in reads}
    _, logits = _run(model, tokens, taps, replace, scored, autocast, stop=False, values=values)
    assert logits is not None  # nothing stopped it
    return logits.float()


def point_read(layer: int, read: Read, at: At = At.MODULE) -> Point | None:
    """The point whose value a dictionary reads, where that is one that can be written too; None for what
    stands behind a norm, and for a branch's input."""
    site = {"mlp.out": "mlp", "attn.out": "attn", "attn.z": "attn.z"}.get(read.site)
    if site is not None:
        return layer, site, at if site != "attn.z" else At.MODULE
    if read.site in _RESIDUAL and read.space == Space.RAW:
        return layer, read.site, At.MODULE
    return None


# --- what is seen -------------------------------------------------------------------------------------------

Found = dict[tuple[str, int], torch.Tensor]
Value = Callable[[Found], torch.Tensor]


class _Taps:
    """Which tensors a pass must keep, by name and layer, and how what is asked for comes from them."""

    def __init__(self, model: ResidualModel, shape: tuple[int, int]) -> None:
        self.model, self.shape = model, shape
        self.wanted: set[tuple[str, int]] = set()

    def of_read(self, layer: int, read: Read) -> Value:
        """Raises InputError for a space that the site does not have."""
        facts, site, space = self.model.facts, read.site, read.space
        self._layer(layer, site)
        point = point_read(layer, read)
        if point is not None:
            return self.of_point(point)
        if space in (Space.BRANCH_OUTPUT, Space.Z) or site == "embed":
            raise InputError(f"{site} has no space {str(space)!r}: nothing can be read there")
        if space == Space.NORMALISED_WITH_GAIN and site in ("attn.in", "mlp.in"):
            return self._tap(site, layer)
        stream = self._stream(layer, site)
        if space == Space.RAW:
            return stream
        norm, there = self._norm(layer, site), facts.norm_before
        if site == "resid_post" and layer + 1 == facts.n_layers:
            there = True
        if not there:
            return stream
        gain = space == Space.NORMALISED_WITH_GAIN
        eps = facts.norm.eps
        return lambda found: _normalised(stream(found), norm, eps, gain)

    def of_point(self, point: Point) -> Value:
        layer, site, at = point
        self._layer(layer, site)
        if site not in WRITE_SITES:
            raise InputError(f"{site!r} is nothing that can be written; known: {', '.join(WRITE_SITES)}")
        if site in _RESIDUAL:
            return self._stream(layer, site)
        if site == "attn.z":
            return self._tap("z", layer)
        return self._branch(layer, site, at)

    def _branch(self, layer: int, site: str, at: At) -> Value:
        facts, m = self.model.facts, self.model.facts.branch_multiplier
        if at == At.MODULE:
            return self._tap(f"{site}_module", layer)
        value = self._tap(f"{site}_post" if facts.norm_after else f"{site}_module", layer)
        return value if m == 1.0 else lambda found: value(found) * m

    def _stream(self, layer: int, site: str) -> Value:
        pre = ("attn.in", "resid_pre", "embed") + (("mlp.in",) if self.model.facts.parallel else ())
        if site in pre:
            return self._tap("resid_pre", layer)
        if site == "resid_post":
            return self._tap("resid_post", layer)
        before, added = self._tap("resid_pre", layer), self._branch(layer, "attn", At.STREAM)
        return lambda found: before(found) + added(found)

    def _norm(self, layer: int, site: str) -> Affine:
        layers = self.model.layers
        if site in ("attn.in", "resid_pre"):
            return layers[layer].ln1
        if site in ("mlp.in", "resid_mid"):
            return layers[layer].ln2
        return layers[layer + 1].ln1 if layer + 1 < len(layers) else self.model.ln_final

    def _tap(self, name: str, layer: int) -> Value:
        self.wanted.add((name, layer))
        return lambda found: found[name, layer]

    def _layer(self, layer: int, site: str) -> None:
        n = self.model.facts.n_layers
        if not 0 <= layer < n or (site == "embed" and layer != 0):
            raise InputError(
                f"{site} of layer {layer}: {self.model.name} has layers 0 to {n - 1}, and embed is layer 0"
            )

    def place(self, name: str, layer: int) -> tuple[Any, bool, int]:
        """(module, whether its output is meant and not its input, width)."""
        facts, block = self.model.facts, self.model.bridge.blocks[layer]
        d = facts.d_model
        places: dict[str, Callable[[], tuple[Any, bool, int]]] = {
            "resid_pre": lambda: (block, False, d),
            "attn.in": lambda: (block.attn.v, False, d),
            "z": lambda: (block.attn.o, False, facts.n_heads * facts.d_head),
            "attn_module": lambda: (block.attn.o, True, d),
            "attn_post": lambda: (block.ln1_post, True, d),
            "mlp.in": lambda: (component(block.mlp, "in"), False, d),
            "mlp_module": lambda: (component(block.mlp, "out"), True, d),
            "mlp_post": lambda: (block.ln2_post, True, d),
            "resid_post": lambda: (block, True, d),
        }
        return places[name]()


def _normalised(x: torch.Tensor, norm: Affine, eps: float, gain: bool) -> torch.Tensor:
    """(x C)/σ, or ((x C) ⊙ γ)/σ + β, rows (…, d), in x's own type."""
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if gain and norm.gain is not None:
        x = x * norm.gain.to(x)
    return x + norm.bias.to(x) if gain and norm.bias is not None else x


# --- the pass -----------------------------------------------------------------------------------------------


class _Enough(Exception):
    """No error: all that was asked for is seen."""


def _run(
    model: ResidualModel,
    tokens: torch.Tensor,
    taps: _Taps,
    replace: Mapping[Point, Replacement],
    scored: torch.Tensor | None,
    autocast: bool,
    stop: bool,
    values: Mapping[tuple[int, Read], Value] | None = None,
) -> tuple[Found, torch.Tensor | None]:
    found: Found = {}
    live = _Live(values or {}, found)
    kind = tokens.device.type
    mixed: Any = torch.autocast(kind, dtype=torch.bfloat16) if autocast else nullcontext()
    with model.running, torch.no_grad(), mixed, _hooks() as add:
        # Hooks of one module run in the order they are put there: what is seen is what was put in.
        for point, change in replace.items():
            _put(model, taps, point, change, live, scored, add)
        if stop and not taps.wanted:
            return found, None
        for name, layer in sorted(taps.wanted):
            _see(taps, name, layer, found, stop, add)
        try:
            logits = model.bridge(tokens)
        except _Enough:
            return found, None
    if missing := sorted(taps.wanted - found.keys()):
        name, layer = missing[0]
        raise InputError(
            f"{model.facts.architecture}: {name} of layer {layer} is not seen in a forward pass: "
            f"TransformerBridge does not call the module"
        )
    return found, logits.detach()


class _Live(Mapping[tuple[int, Read], torch.Tensor]):
    """What is read, as far as the pass has come."""

    def __init__(self, values: Mapping[tuple[int, Read], Value], found: Found) -> None:
        self._values, self._found = values, found

    def __getitem__(self, key: tuple[int, Read]) -> torch.Tensor:
        try:
            return self._values[key](self._found).float()
        except KeyError:
            layer, read = key
            asked = "stands behind what is replaced" if key in self._values else "was not asked for"
            raise ValueError(f"{read.site} of layer {layer} {asked}") from None

    def __iter__(self) -> Iterator[tuple[int, Read]]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@contextmanager
def _hooks() -> Iterator[Callable[[Any], None]]:
    handles: list[Any] = []
    try:
        yield handles.append
    finally:
        for handle in handles:
            handle.remove()


def _see(taps: _Taps, name: str, layer: int, found: Found, stop: bool, add: Callable[[Any], None]) -> None:
    module, behind, width = taps.place(name, layer)

    def keep(value: torch.Tensor) -> None:
        # A copy of an output: some blocks add to it in place.
        kept = value.detach().reshape(*taps.shape, width)
        found[name, layer] = kept.clone() if behind else kept
        if stop and len(found) == len(taps.wanted):
            raise _Enough

    _at(module, behind, lambda value: keep(value), add)


def _put(
    model: ResidualModel,
    taps: _Taps,
    point: Point,
    change: Replacement,
    live: Reads,
    scored: torch.Tensor | None,
    add: Callable[[Any], None],
) -> None:
    layer, site, at = point
    taps.of_point(point)  # says where the model has no such place
    facts, m = model.facts, model.facts.branch_multiplier

    def changed(original: torch.Tensor) -> torch.Tensor:
        new = change(original.float(), live).to(original.dtype)
        if new.shape != original.shape:
            raise ValueError(
                f"{site} of layer {layer}: {tuple(new.shape)} cannot replace {tuple(original.shape)}"
            )
        return new if scored is None else torch.where(scored[..., None], new, original)

    def instead(value: torch.Tensor) -> torch.Tensor:
        return changed(value.reshape(*taps.shape, value.shape[-1])).reshape(value.shape)

    def joined(value: torch.Tensor) -> torch.Tensor:
        own = value.reshape(*taps.shape, value.shape[-1]) * m
        return value + ((changed(own) - own) / m).reshape(value.shape)

    name = {"embed": "resid_pre", "attn.z": "z"}.get(site, site)
    if site in ("attn", "mlp"):
        behind_norm = at == At.STREAM and facts.norm_after
        name = f"{site}_post" if behind_norm else f"{site}_module"
        instead = joined if at == At.STREAM and m != 1.0 else instead
    elif site == "resid_mid":
        # Nothing passes through a place called so: what attention adds is changed by the difference.
        before = taps._tap("resid_pre", layer)
        name = "attn_post" if facts.norm_after else "attn_module"

        def middle(value: torch.Tensor) -> torch.Tensor:
            own = before(live._found) + value.reshape(*taps.shape, value.shape[-1]) * m  # type: ignore[attr-defined]
            return value + ((changed(own) - own) / m).reshape(value.shape)

        instead = middle
    module, behind, _ = taps.place(name, layer)
    _at(module, behind, instead, add)


def _at(
    module: Any,
    behind: bool,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    add: Callable[[Any], None],
) -> None:
    """Calls `change` with a module's output, or its input; what it returns takes its place."""
    if behind:

        def after(_: Any, __: tuple, out: Any) -> Any:
            new = change(out[0] if isinstance(out, tuple) else out)
            if new is None:
                return None
            return (new, *out[1:]) if isinstance(out, tuple) else new

        add(module.register_forward_hook(after))
        return

    def before(_: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = next((one for one in ("hidden_states", "input") if one in kwargs), "hidden_states")
        new = change(args[0] if args else kwargs[key])
        if new is None:
            return None
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, key: new})

    add(module.register_forward_pre_hook(before, with_kwargs=True))


def _checked(model: ResidualModel, tokens: torch.Tensor) -> tuple[int, int]:
    facts = model.facts
    if tokens.ndim != 2 or not tokens.numel():
        raise ValueError(f"expected token ids (B, T), found shape {tuple(tokens.shape)}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= facts.d_vocab:
        raise InputError(
            f"token id {low if low < 0 else high}: {model.name} has ids 0 to {facts.d_vocab - 1}"
        )
    if facts.positions == "learned" and tokens.shape[1] > facts.n_ctx:
        raise InputError(f"{tokens.shape[1]} tokens: {model.name} has {facts.n_ctx} positions")
    return int(tokens.shape[0]), int(tokens.shape[1])
