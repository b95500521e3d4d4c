"""The real model's forward pass, seen and held: what each module reads and returns, and a second pass with
patterns, norm scales and MLP outputs frozen, in which attributions are exact (methods: Attribution).

Torch hooks on the bridge's components carry this, not its hook points: those are read-only for patterns on
some architectures, and crash or lack a place for norms on others. A frozen pattern is put in as the heads'
outputs z = A v with v from the model's own V projection in this pass; a frozen norm as (x C ⊙ γ)/σ + β.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ingest.errors import InputError
from ingest.models.layers import component
from ingest.models.residual import ResidualModel
from ingest.models.rows import Affine

__all__ = ["Trace", "Write", "run"]


@dataclass(frozen=True, eq=False)
class Trace:
    """One forward over T tokens. Streams and outputs in residual-stream units, of the type that
    the bridge runs in (float32).

    Scales σ are those of the pass (the frozen ones in a frozen pass); 1 where there is no norm.
    """

    tokens: torch.Tensor  # (T,) int64
    logits: torch.Tensor  # (T, d_vocab), after the cap
    resid_pre: torch.Tensor  # (n_layers, T, d_model)
    resid_post: torch.Tensor  # (T, d_model): of the last layer
    attn_in: torch.Tensor  # (n_layers, T, d_model): behind norm, gain and bias
    mlp_in: torch.Tensor  # (n_layers, T, d_model)
    final_in: torch.Tensor  # (T, d_model)
    pattern: torch.Tensor  # (n_layers, n_heads, T query, T key)
    z: torch.Tensor  # (n_layers, T, n_heads, d_head)
    attn_out: torch.Tensor  # (n_layers, T, d_model), as it joins the stream
    mlp_out: torch.Tensor  # (n_layers, T, d_model), as it joins the stream
    attn_module: torch.Tensor  # (n_layers, T, d_model): the module's output
    mlp_module: torch.Tensor  # (n_layers, T, d_model)
    sigma1: torch.Tensor  # (n_layers, T) float64: the norm attention reads through
    sigma2: torch.Tensor  # (n_layers, T): the norm the MLP reads through
    sigma_post1: torch.Tensor  # (n_layers, T): behind attention
    sigma_post2: torch.Tensor  # (n_layers, T): behind the MLP
    sigma_final: torch.Tensor  # (T,)

    @property
    def resid_mid(self) -> torch.Tensor:
        """(n_layers, T, d_model): resid_pre and what attention adds. In a parallel block nobody reads it."""
        return self.resid_pre + self.attn_out


@dataclass(frozen=True, eq=False)
class Write:
    """Vectors (T, d_model) added at a write site: 'embed', 'attn' or 'mlp' of a layer; at the branch module's
    output ('module', before a norm behind it and the multiplier) or where it joins the stream ('stream')."""

    site: str
    layer: int
    vectors: torch.Tensor
    at: str = "stream"


def run(
    model: ResidualModel,
    tokens: Any,
    *,
    frozen: Trace | None = None,
    writes: Iterable[Write] = (),
    live_heads: Iterable[tuple[int, int]] | str = (),
) -> Trace:
    """A forward of the real model over token ids (T,).

    With `frozen`, norm scales and MLP outputs are held at that trace's; heads return its z, except
    `live_heads` ((layer, head) pairs, or 'all'), which keep its pattern over values computed anew. `writes`
    need `frozen`. Raises InputError for an id outside the vocabulary, or more tokens than positions.
    """
    ids = torch.as_tensor(tokens, dtype=torch.long).reshape(-1)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= model.facts.d_vocab:
        raise InputError(f"token ids must be 0 to {model.facts.d_vocab - 1}, and at least one")
    if model.facts.positions == "learned":
        model.position_vectors(len(ids))  # says how many there are, where there are too few
    writes = tuple(writes)
    if writes and frozen is None:
        raise ValueError("a write needs a frozen trace")
    seen = _Seen(model, len(ids))
    with model.running, torch.no_grad(), _hooks() as add:
        if frozen is not None:
            _freeze(model, frozen, add, live_heads, writes)
        _watch(model, seen, add)
        logits = model.bridge(ids[None])
    return seen.trace(ids, logits[0].detach(), frozen)


@contextmanager
def _hooks() -> Iterator[Callable[[Any], None]]:
    handles: list[Any] = []
    try:
        yield handles.append
    finally:
        for handle in handles:
            handle.remove()


def _flat(value: Any, width: int) -> torch.Tensor:
    """(1, T, width), (T, width) or a tuple that starts with one -> (T, width)."""
    tensor = value[0] if isinstance(value, tuple) else value
    return tensor.detach().reshape(-1, width)


# --- watching ----------------------------------------------------------------------------------------------


class _Seen:
    def __init__(self, model: ResidualModel, length: int) -> None:
        self.model, self.length = model, length
        self.found: dict[tuple[str, int], torch.Tensor] = {}

    def keep(self, name: str, layer: int, value: Any, width: int) -> None:
        self.found[name, layer] = _flat(value, width)

    def stack(self, name: str) -> torch.Tensor:
        layers = range(self.model.facts.n_layers)
        if missing := [layer for layer in layers if (name, layer) not in self.found]:
            raise InputError(
                f"{self.model.facts.architecture}: {name} of layer {missing[0]} is not seen in a forward "
                f"pass: TransformerBridge does not call the module"
            )
        return torch.stack([self.found[name, layer] for layer in layers])

    def trace(self, ids: torch.Tensor, logits: torch.Tensor, frozen: Trace | None) -> Trace:
        facts, length = self.model.facts, self.length
        pattern = self.stack("pattern").reshape(facts.n_layers, facts.n_heads, length, length)
        attn_module, mlp_module = self.stack("attn_module"), self.stack("mlp_module")
        attn_out = self.stack("attn_post") if facts.norm_after else attn_module
        mlp_out = self.stack("mlp_post") if facts.norm_after else mlp_module
        if facts.branch_multiplier != 1.0:
            attn_out, mlp_out = attn_out * facts.branch_multiplier, mlp_out * facts.branch_multiplier
        ones = torch.ones(facts.n_layers, length, dtype=torch.float64)
        before, after = facts.norm_before, facts.norm_after
        scales = {
            "sigma1": self._scales("ln1") if before else ones,
            "sigma2": self._scales("ln1" if facts.one_norm else "ln2") if before else ones,
            "sigma_post1": self._scales("ln1_post") if after else ones,
            "sigma_post2": self._scales("ln2_post") if after else ones,
            "sigma_final": self._scale(self.found["final_stream", 0]),
        }
        if frozen is not None:
            scales = {name: getattr(frozen, name) for name in scales}
        return Trace(
            tokens=ids,
            logits=logits,
            resid_pre=self.stack("resid_pre"),
            resid_post=self.found["final_stream", 0],
            attn_in=self.stack("attn_in"),
            mlp_in=self.stack("mlp_in"),
            final_in=self.found["final_in", 0],
            pattern=pattern if frozen is None else frozen.pattern,
            z=self.stack("z").reshape(facts.n_layers, length, facts.n_heads, facts.d_head),
            attn_out=attn_out,
            mlp_out=mlp_out,
            attn_module=attn_module,
            mlp_module=mlp_module,
            **scales,
        )

    def _scales(self, norm: str) -> torch.Tensor:
        return torch.stack([self._scale(x) for x in self.stack(norm)])

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        if self.model.facts.norm.centred:
            x = x - x.mean(-1, keepdim=True)
        return (x.pow(2).mean(-1) + self.model.facts.norm.eps).sqrt()


def _watch(model: ResidualModel, seen: _Seen, add: Callable[[Any], None]) -> None:
    facts, d = model.facts, model.facts.d_model

    def before(module: Any, name: str, layer: int, width: int) -> None:
        def hook(_: Any, args: tuple, kwargs: dict) -> None:
            value = args[0] if args else kwargs.get("hidden_states", kwargs.get("input"))
            seen.keep(name, layer, value, width)

        add(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(module: Any, name: str, layer: int, width: int) -> None:
        def hook(_: Any, __: tuple, out: Any) -> None:
            seen.keep(name, layer, out, width)

        add(module.register_forward_hook(hook))

    heads = facts.n_heads * facts.d_head
    for layer, block in enumerate(model.bridge.blocks):
        before(block, "resid_pre", layer, d)
        before(block.attn.v, "attn_in", layer, d)
        before(component(block.mlp, "in"), "mlp_in", layer, d)
        after(block.attn.hook_pattern, "pattern", layer, seen.length)
        before(block.attn.o, "z", layer, heads)
        after(block.attn.o, "attn_module", layer, d)
        after(component(block.mlp, "out"), "mlp_module", layer, d)
        names = [("ln1", facts.norm_before), ("ln2", facts.norm_before and not facts.one_norm)]
        for norm, there in [*names, ("ln1_post", facts.norm_after), ("ln2_post", facts.norm_after)]:
            if there:
                before(component(block, norm), norm, layer, d)
        if facts.norm_after:
            after(block.ln1_post, "attn_post", layer, d)
            after(block.ln2_post, "mlp_post", layer, d)
    before(model.bridge.ln_final, "final_stream", 0, d)
    after(model.bridge.ln_final, "final_in", 0, d)


# --- freezing and writing ----------------------------------------------------------------------------------


def _freeze(
    model: ResidualModel,
    frozen: Trace,
    add: Callable[[Any], None],
    live_heads: Iterable[tuple[int, int]] | str,
    writes: tuple[Write, ...],
) -> None:
    facts = model.facts
    every = {(layer, head) for layer in range(facts.n_layers) for head in range(facts.n_heads)}
    live: set[tuple[int, int]] = every if isinstance(live_heads, str) else set(live_heads)
    kv = torch.tensor([model.kv(head) for head in range(facts.n_heads)])
    for layer, (block, weights) in enumerate(zip(model.bridge.blocks, model.layers, strict=True)):
        if facts.norm_before:
            _freeze_norm(block.ln1, weights.ln1, frozen.sigma1[layer], add)
            if not facts.one_norm:
                _freeze_norm(block.ln2, weights.ln2, frozen.sigma2[layer], add)
        if facts.norm_after:
            _freeze_norm(block.ln1_post, weights.ln1_post, frozen.sigma_post1[layer], add)
            _freeze_norm(block.ln2_post, weights.ln2_post, frozen.sigma_post2[layer], add)
        alive = sorted(head for at, head in live if at == layer)
        _freeze_heads(block.attn, frozen.pattern[layer], frozen.z[layer], kv, alive, add)
        _replace(component(block.mlp, "out"), partial(_instead, frozen.mlp_module[layer]), add)
    _freeze_norm(model.bridge.ln_final, model.ln_final, frozen.sigma_final, add)
    for write in writes:
        _write(model, write, add)


def _instead(held: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return held


def _replace(module: Any, change: Callable[[torch.Tensor], torch.Tensor], add: Callable[[Any], None]) -> None:
    """Replaces a module's output (…, T, width) by change(output (T, width))."""

    def hook(_: Any, __: tuple, out: Any) -> Any:
        tensor = out[0] if isinstance(out, tuple) else out
        new = change(tensor.reshape(-1, tensor.shape[-1])).to(tensor.dtype).reshape(tensor.shape)
        return (new, *out[1:]) if isinstance(out, tuple) else new

    add(module.register_forward_hook(hook))


def _freeze_norm(module: Any, norm: Affine, sigma: torch.Tensor, add: Callable[[Any], None]) -> None:
    def hook(_: Any, args: tuple, kwargs: dict, out: torch.Tensor) -> torch.Tensor:
        x = args[0] if args else kwargs["hidden_states"]
        y = norm.through(x.double()) / sigma.reshape(*x.shape[:-1], 1)
        return (y if norm.bias is None else y + norm.bias).to(out.dtype)

    add(module.register_forward_hook(hook, with_kwargs=True))


def _freeze_heads(
    attn: Any,
    pattern: torch.Tensor,
    z: torch.Tensor,
    kv: torch.Tensor,
    alive: list[int],
    add: Callable[[Any], None],
) -> None:
    values: list[torch.Tensor] = []

    def keep_values(_: Any, __: tuple, out: torch.Tensor) -> None:
        values[:] = [out]

    def put_z(_: Any, args: tuple) -> tuple:
        held = z.clone()  # (T, n_heads, d_head)
        if alive:
            if not values:
                raise InputError("the model does not call its V projection: its patterns cannot be frozen")
            v = values[0].reshape(len(z), -1, z.shape[-1])[:, kv[alive]]  # (T, alive, d_head)
            held[:, alive] = torch.einsum("hts,shd->thd", pattern[alive].double(), v.double()).to(held.dtype)
        return (held.reshape(args[0].shape), *args[1:])

    add(attn.v.register_forward_hook(keep_values))
    add(attn.o.register_forward_pre_hook(put_z))


def _write(model: ResidualModel, write: Write, add: Callable[[Any], None]) -> None:
    facts, vectors = model.facts, write.vectors.to(model.bridge.embed.weight.dtype)
    if write.site == "embed":

        def at_embedding(_: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args:
                return (args[0] + vectors, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + vectors}

        add(model.bridge.blocks[0].register_forward_pre_hook(at_embedding, with_kwargs=True))
        return
    if write.site not in ("attn", "mlp") or write.at not in ("module", "stream"):
        raise ValueError(f"write at {write.site!r} ({write.at!r}) is not known")
    block = model.bridge.blocks[write.layer]
    module = block.attn.o if write.site == "attn" else component(block.mlp, "out")
    if write.at == "stream":
        if facts.norm_after:
            module = block.ln1_post if write.site == "attn" else block.ln2_post
        vectors = vectors / facts.branch_multiplier
    _replace(module, lambda out: out + vectors, add)
