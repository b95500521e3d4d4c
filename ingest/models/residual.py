"""A model seen from its residual stream (methods: A model seen from its residual stream).

Everything is a row vector and a read-only view: accessors may be called from several threads. What is
float64 is computed elementwise (ingest.models.rows), so it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ingest.errors import InputError
from ingest.models.facts import Facts
from ingest.models.layers import Layer, MLPWeights, embedding_tables, norm_of, read_layer
from ingest.models.order import read_cut, write_event
from ingest.models.rows import Affine, row_sums
from ingest.models.source import Source
from ingest.models.token_texts import token_texts

if TYPE_CHECKING:
    from ingest.models.runtime import Trace, Write

__all__ = ["ResidualModel"]


class ResidualModel:
    """The weights of a decoder as the algebra needs them, and its forward pass.

    `bridge` is the TransformerBridge it stands on: raw weights, float32, in eval mode.
    """

    def __init__(
        self,
        bridge: Any,
        facts: Facts,
        source: Source,
        name: str,
        tokenizer: Path | None,
        tensors: dict[str, torch.Tensor],
    ) -> None:
        self.bridge, self.facts, self.name = bridge, facts, name
        self.source: Path = source.path
        self._source, self._tokenizer = source, tokenizer
        self.tensors = tensors  # Hugging Face's names; they share memory with the bridge
        if len(bridge.blocks) != facts.n_layers:
            raise InputError(
                f"{source.path}: {len(bridge.blocks)} blocks; the configuration says {facts.n_layers}"
            )
        self.layers: tuple[Layer, ...] = tuple(
            read_layer(block, number, facts) for number, block in enumerate(bridge.blocks)
        )
        self.ln_final: Affine = norm_of(bridge.ln_final, facts, "the final norm")
        self._embedding_norm = (
            norm_of(bridge.embed_ln, facts, "the embeddings' norm") if facts.embedding_norm else None
        )
        self._W_E, self._W_pos, self._W_U = embedding_tables(bridge, facts)
        self._b_U = getattr(bridge.unembed.original_component, "bias", None)
        self._lock, self._hash = threading.Lock(), ""
        self.running = threading.Lock()  # a forward hangs its hooks on the bridge: one at a time

    @property
    def hash(self) -> str:
        """SHA-256 over the float32 tensors by Hugging Face's names: where they came from does not enter."""
        with self._lock:
            if not self._hash:
                self._hash = _hash_of(self.tensors)
            return self._hash

    # --- the ends of the stream -----------------------------------------------------------------------------

    def token_vectors(self, lo: int = 0, hi: int | None = None) -> torch.Tensor:
        """(n, d_model) float64: what tokens lo … hi-1 add to the stream (factor and embedding norm in)."""
        rows = self._W_E[lo:hi].double()
        if self.facts.embedding_factor != 1.0:
            # The model multiplies in float32 by the factor rounded to float32.
            rows = rows * float(np.float32(self.facts.embedding_factor))
        norm = self._embedding_norm
        if norm is None:
            return rows
        through = norm.through(rows)
        centred = Affine(norm.centred).through(rows)
        scale = (row_sums(centred * centred) / self.facts.d_model + self.facts.norm.eps).sqrt()
        return through / scale + (0.0 if norm.bias is None else norm.bias)

    def position_vectors(self, n: int) -> torch.Tensor:
        """(n, d_model) float64: what positions 0 … n-1 add to the stream; zeros without learned positions."""
        if self._W_pos is None:
            return torch.zeros(n, self.facts.d_model, dtype=torch.float64)
        first = self.facts.position_offset
        if first + n > len(self._W_pos):
            raise InputError(f"{n} tokens: {self.name} has {len(self._W_pos) - first} positions")
        return self._W_pos[first : first + n].double()

    def unembedding(self, lo: int = 0, hi: int | None = None) -> torch.Tensor:
        """(n, d_model) float64: rows lo … hi-1 of W_Uᵀ × the logit multiplier (before the logit cap)."""
        rows = self._W_U[lo:hi].double()
        return rows if self.facts.logit_multiplier == 1.0 else rows * self.facts.logit_multiplier

    def logit_bias(self) -> torch.Tensor:
        """(d_vocab,) float64: what every logit gets before the cap, whatever the stream holds: βf W_U + b_U,
        × the logit multiplier."""
        total = torch.zeros(self.facts.d_vocab, dtype=torch.float64)
        if self._b_U is not None:
            total += self._b_U.detach().double() * self.facts.logit_multiplier
        if self.ln_final.bias is not None:
            for lo in range(0, self.facts.d_vocab, 4096):
                rows = self.unembedding(lo, lo + 4096)
                total[lo : lo + 4096] += row_sums(rows * self.ln_final.bias)[:, 0]
        return total

    @property
    def tokenizer(self) -> Path | None:
        """Where token texts come from, where that is not the model itself."""
        return self._tokenizer

    def token_texts(self, tokenizer: Path | None = None) -> list[str]:
        """What each of the d_vocab ids reads as, by `tokenizer` or the model's own; see
        ingest.models.token_texts."""
        return token_texts(self._source, self.facts.d_vocab, tokenizer or self._tokenizer)

    # --- attention ------------------------------------------------------------------------------------------

    def W_V(self, layer: int) -> torch.Tensor:
        """(n_kv_heads, d_model, d_head) float32, a view."""
        return self.layers[layer].W_V

    def W_O(self, layer: int) -> torch.Tensor:
        """(n_heads, d_head, d_model) float64, as it joins the stream: the centring and gain of a norm behind
        attention and the branch multiplier folded in (that norm's scale σ_post1 left out)."""
        return self.joining(layer, "attn", self.layers[layer].W_O.double())

    def kv(self, head: int) -> int:
        """The key-value head that a query head reads."""
        return head // (self.facts.n_heads // self.facts.n_kv_heads)

    def attention_input(self, layer: int, omega: torch.Tensor) -> torch.Tensor:
        """ω C ⊙ γ1 for rows (N, d_model) float64: what attention of the layer sees, σ1 left out."""
        return self.layers[layer].ln1.through(omega)

    def final_input(self, omega: torch.Tensor) -> torch.Tensor:
        """ω C ⊙ γf for rows (N, d_model) float64: what the unembedding sees, σ_final left out."""
        return self.ln_final.through(omega)

    def joining(self, layer: int, branch: str, rows: torch.Tensor) -> torch.Tensor:
        """What rows (…, d_model) float64 at the output of the branch's module ('attn' or 'mlp') become where
        it joins the stream: (d C_post ⊙ γ_post) × branch multiplier, σ_post left out."""
        post = self.layers[layer].ln1_post if branch == "attn" else self.layers[layer].ln2_post
        rows = post.through(rows)
        return rows if self.facts.branch_multiplier == 1.0 else rows * self.facts.branch_multiplier

    def mlp_weights(self, layer: int) -> MLPWeights:
        """The MLP's own weights, float32 views; `joining` says what its output becomes."""
        return self.layers[layer].mlp

    # --- biases: each a node of its own in the sums of methods §3 -------------------------------------------

    def value_bias(self, layer: int) -> torch.Tensor:
        """(n_heads, d_model) float64: (β1 W_V[kv(h)] + b_V[kv(h)]) W_O[h] as it joins, divided at run time by
        σ_post1 only. Constant because pattern rows sum to 1."""
        weights, heads = self.layers[layer], self.facts.n_heads
        value = torch.zeros(self.facts.n_kv_heads, self.facts.d_head, dtype=torch.float64)
        if weights.ln1.bias is not None:
            value += row_sums(weights.ln1.bias * weights.W_V.double().transpose(1, 2))[..., 0]
        if weights.b_V is not None:
            value += weights.b_V.double()
        by_head = value[[self.kv(head) for head in range(heads)]]  # (n_heads, d_head)
        return row_sums(by_head[:, None, :] * self.W_O(layer).transpose(1, 2))[..., 0]

    def output_bias(self, layer: int) -> torch.Tensor:
        """(d_model,) float64: b_O as it joins, divided at run time by σ_post1."""
        b = self.layers[layer].b_O
        zero = torch.zeros(self.facts.d_model, dtype=torch.float64)
        return zero if b is None else self.joining(layer, "attn", b.double()[None])[0]

    def post_bias(self, layer: int, branch: str) -> torch.Tensor:
        """(d_model,) float64: the bias of the norm behind a branch ('attn' or 'mlp') × branch multiplier."""
        post = self.layers[layer].ln1_post if branch == "attn" else self.layers[layer].ln2_post
        zero = torch.zeros(self.facts.d_model, dtype=torch.float64)
        return zero if post.bias is None else post.bias * self.facts.branch_multiplier

    def input_bias(self, site: str, layer: int) -> torch.Tensor:
        """(d_model,) float64: β of the norm that a site reads through ('attn.in', 'mlp.in', 'final')."""
        norm = {"attn.in": "ln1", "mlp.in": "ln2"}.get(site)
        affine = self.ln_final if norm is None else getattr(self.layers[layer], norm)
        return torch.zeros(self.facts.d_model, dtype=torch.float64) if affine.bias is None else affine.bias

    # --- which pairs have edges -----------------------------------------------------------------------------

    def event(self, site: str, layer: int) -> int:
        """When something is written: embed 0, attn(L) 1 + 2L, mlp(L) 2 + 2L."""
        return write_event(self.facts, site, layer)

    def cut(self, site: str, layer: int) -> int:
        """A reader sees every event before its cut: DIRECT exists where event(source) < cut(target)."""
        return read_cut(self.facts, site, layer)

    # --- run time -------------------------------------------------------------------------------------------

    def trace(self, tokens: Any) -> Trace:
        """One forward of the real model over token ids (T,): logits, streams, patterns, scales."""
        from ingest.models.runtime import run

        return run(self, tokens)

    def run_frozen(self, trace: Trace, writes: tuple[Write, ...] = (), live_heads: Any = ()) -> Trace:
        """The real model again with every pattern, norm scale and MLP output held at `trace`'s, and vectors
        added; see ingest.models.runtime.run."""
        from ingest.models.runtime import run

        return run(self, trace.tokens, frozen=trace, writes=writes, live_heads=live_heads)


def _hash_of(tensors: dict[str, torch.Tensor]) -> str:
    def digest(name: str) -> bytes:
        tensor = tensors[name].detach().float().contiguous()
        head = f"{name}\0{tuple(tensor.shape)}\0".encode()
        found = hashlib.sha256(head)
        found.update(tensor.numpy().tobytes())
        return found.digest()

    with ThreadPoolExecutor(2) as pool:
        return hashlib.sha256(b"".join(pool.map(digest, sorted(tensors)))).hexdigest()
