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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from ingest.dictionaries.types import At, Read
from ingest.errors import InputError
from ingest.models.residual import ResidualModel
from ingest.models.taps import Found, Point, Reads, Taps, Value, point_read

__all__ = [
    "Captured",
    "Point",
    "Replacement",
    "Start",
    "capture",
    "logits_with",
    "loss_gradients",
    "point_read",
]

# (the value that the model has there (B, T, d), what is read in this pass) -> what to put there (B, T, d)
Replacement = Callable[[torch.Tensor, Reads], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Start:
    """A pass as far as block `layer`: another one over the same tokens can begin there."""

    layer: int
    before: Any  # what the block below returned: the stream, or a tuple that begins with it


@dataclass(frozen=True, eq=False)
class Captured:
    """Values of one pass, float32, without gradient."""

    inputs: Mapping[tuple[int, Read], torch.Tensor]  # (B, T, d_in)
    outputs: Mapping[Point, torch.Tensor]  # (B, T, d_out)
    logits: torch.Tensor | None = None  # (B, T, d_vocab), where asked for
    starts: Mapping[int, Start] = field(default_factory=dict)


def capture(
    model: ResidualModel,
    tokens: torch.Tensor,
    inputs: Sequence[tuple[int, Read]] = (),
    outputs: Sequence[Point] = (),
    autocast: bool = False,
    logits: bool = False,
    starts: Sequence[int] = (),
) -> Captured:
    """One forward over token ids (B, T), as far as the last thing asked for; to the end with `logits`.

    autocast: matrix products in bfloat16, the stream in float32. starts: layers at which later passes over
    these tokens shall begin (layer 0 needs none).
    Raises InputError for ids or lengths that the model does not have, and for what it has no place for.
    """
    taps = Taps(model, _checked(model, tokens))
    values = {key: taps.of_read(*key) for key in inputs}
    written = {key: taps.of_point(key) for key in outputs}
    kept = {layer: _Kept() for layer in starts if layer > 0}
    found, result = _run(model, tokens, taps, {}, None, autocast, stop=not logits, kept=kept)
    return Captured(
        inputs={key: value(found).float() for key, value in values.items()},
        outputs={key: value(found).float() for key, value in written.items()},
        logits=None if result is None else result.float(),
        starts={layer: Start(layer, one.out) for layer, one in kept.items()},
    )


def logits_with(
    model: ResidualModel,
    tokens: torch.Tensor,
    replace: Mapping[Point, Replacement],
    reads: Sequence[tuple[int, Read]] = (),
    scored: torch.Tensor | None = None,
    autocast: bool = False,
    start: Start | None = None,
) -> torch.Tensor:
    """(B, T, d_vocab) float32 logits of the model with each point's value replaced.

    A replacement is called once, with the value that this pass has there and the `reads` as far as the pass
    has come: what stands before the point. scored: (B, T), where to replace; elsewhere the model keeps its
    own value. A replacement that returns what it is given changes no bit. start: of a pass over the same
    tokens, at a layer that is not above any point or read; the layers below it are not computed again.
    """
    taps = Taps(model, _checked(model, tokens))
    values = {key: taps.of_read(*key) for key in reads}
    lowest = min(
        [*(point[0] for point in replace), *(layer for layer, _ in reads)], default=model.facts.n_layers
    )
    if start is not None and start.layer > lowest:
        raise ValueError(f"a pass that begins at layer {start.layer} does not see layer {lowest}")
    _, logits = _run(model, tokens, taps, replace, scored, autocast, False, values, start=start)
    assert logits is not None  # nothing stopped it
    return logits.float()


def loss_gradients(
    model: ResidualModel,
    tokens: torch.Tensor,
    points: Sequence[Point],
    predicted: torch.Tensor,
    autocast: bool = False,
) -> dict[Point, torch.Tensor]:
    """(B, T, width) float32 at each point: ∂(Σ -log p(next token))/∂(what stands there), in nats per unit of
    the point; one forward and one backward over token ids (B, T).

    predicted: (B, T - 1) bool, the next tokens that count. A position feels its own prediction and, through
    attention, all later ones. autocast: matrix products in bfloat16.
    """
    taps = Taps(model, _checked(model, tokens))
    added: dict[Point, torch.Tensor] = {}

    def adding(point: Point) -> Replacement:
        def change(own: torch.Tensor, _: Reads) -> torch.Tensor:
            added[point] = torch.zeros_like(own, requires_grad=True)
            return own + added[point]

        return change

    put = {point: adding(point) for point in points}
    _, logits = _run(model, tokens, taps, put, None, autocast, False, gradient=True)
    assert logits is not None  # nothing stopped it
    with torch.enable_grad():
        nats = F.cross_entropy(logits[:, :-1][predicted].float(), tokens[:, 1:][predicted], reduction="sum")
    return dict(zip(points, torch.autograd.grad(nats, [added[point] for point in points]), strict=True))


# --- the pass -----------------------------------------------------------------------------------------------


class _Enough(Exception):
    """No error: all that was asked for is seen."""


def _run(
    model: ResidualModel,
    tokens: torch.Tensor,
    taps: Taps,
    replace: Mapping[Point, Replacement],
    scored: torch.Tensor | None,
    autocast: bool,
    stop: bool,
    values: Mapping[tuple[int, Read], Value] | None = None,
    kept: Mapping[int, _Kept] | None = None,
    start: Start | None = None,
    gradient: bool = False,
) -> tuple[Found, torch.Tensor | None]:
    found: Found = {}
    live = _Live(values or {}, found)
    kind = tokens.device.type
    mixed: Any = torch.autocast(kind, dtype=torch.bfloat16) if autocast else nullcontext()
    with model.running, torch.set_grad_enabled(gradient), mixed, _begun(model, start), _hooks() as add:
        # Hooks of one module run in the order they are put there: what is seen is what was put in.
        for point, change in replace.items():
            _put(model, taps, point, change, live, scored, add)
        if stop and not taps.wanted:
            return found, None
        for name, layer in sorted(taps.wanted):
            _see(taps, name, layer, found, stop, add)
        for layer, one in (kept or {}).items():
            add(model.bridge.blocks[layer - 1].register_forward_hook(one))
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
    return found, logits if gradient else logits.detach()


class _Kept:
    """A hook that keeps what a block returns."""

    def __init__(self) -> None:
        self.out: Any = None

    def __call__(self, _: Any, __: tuple, out: Any) -> None:
        # A copy of the stream: some blocks add to their input in place.
        self.out = (out[0].clone(), *out[1:]) if isinstance(out, tuple) else out.clone()


@contextmanager
def _begun(model: ResidualModel, start: Start | None) -> Iterator[None]:
    """The blocks below the start return what the last of them returned."""
    below = list(model.bridge.blocks)[: start.layer] if start is not None else []
    for block in below:
        # Not by assignment: a bridge hands that on to the module inside.
        vars(block)["forward"] = lambda *_, **__: start.before  # type: ignore[union-attr]
    try:
        yield
    finally:
        for block in below:
            del vars(block)["forward"]


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


def _see(taps: Taps, name: str, layer: int, found: Found, stop: bool, add: Callable[[Any], None]) -> None:
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
    taps: Taps,
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
        with torch.autocast(original.device.type, enabled=False):
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
        before = taps.tap("resid_pre", layer)
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
