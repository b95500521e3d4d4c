"""One frozen type for every feature dictionary, whatever file it came from: one `Dictionary` for each layer
read.

A dictionary turns the vectors x (n, d_in) that it reads into activations a (n, F), and adds a @ W_dec
somewhere:

    x'   = norm(x)                         run-time input normalisation, where there is one
    pre  = (x' - b_in) @ W_enc.T + b_enc   for each encoder (a gated neuron has two: gate and up)
    a    = gate(pre)
    out  = a @ W_dec + b_out (+ x @ W_skip)     for each write

Everything a file may scale is folded in by its reader, so that a threshold here is always a plain threshold
on `pre` as computed from the raw input (methods: Public dictionary formats). Tensors are float32, widened
exactly. This module does not import torch: `atlas estimate` reads headers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "At",
    "Dictionary",
    "Encoder",
    "Gate",
    "Gated",
    "GatedMLP",
    "GroupMax",
    "InputNorm",
    "JumpReLU",
    "LayerNormInput",
    "Pointwise",
    "ReLU",
    "Read",
    "RescaledInput",
    "ScalarThreshold",
    "Space",
    "TopK",
    "Write",
]  # fmt: skip


class Space(StrEnum):
    """What the numbers at a site are, and so how an encoder row becomes a reading vector (methods §1)."""

    RAW = "raw"  # the residual stream itself
    NORMALISED = "normalised"  # after the norm's centring and scale, before its gain
    NORMALISED_WITH_GAIN = "normalised with gain"  # after the gain (and the norm's bias)
    BRANCH_OUTPUT = "branch output"  # an attention or MLP output: no stream is read
    Z = "z"  # the heads' outputs side by side, before W_O


class At(StrEnum):
    """Whether a write stands before or after what follows a branch (a post-norm, a branch multiplier)."""

    MODULE = "module"
    STREAM = "stream"


READ_SITES = (
    "embed", "mlp.in", "attn.in", "resid_pre", "resid_mid", "resid_post", "mlp.out", "attn.out", "attn.z",
)  # fmt: skip
WRITE_SITES = ("embed", "attn", "attn.z", "mlp", "resid_pre", "resid_mid", "resid_post")
READINGS = ("in", "gate", "up")
# Of neurons, by Hugging Face's names; ingest.dictionaries.encode has their formulas.
NEURON_ACTIVATIONS = (
    "relu", "relu2", "silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh",
    "quick_gelu",
)  # fmt: skip


@dataclass(frozen=True)
class Read:
    """Where a dictionary reads, in its own layer, and in which space."""

    site: str  # one of READ_SITES
    space: Space

    def __post_init__(self) -> None:
        if self.site not in READ_SITES:
            raise ValueError(f"read site {self.site!r}: expected one of {', '.join(READ_SITES)}")


@dataclass(frozen=True, eq=False)
class Encoder:
    """One way of reading. `in` for a latent; a gated neuron reads twice, through `gate` and through `up`."""

    reading: str  # one of READINGS
    W_enc: Tensor  # (F, d_in) float32
    b_enc: Tensor  # (F,) float32


@dataclass(frozen=True, eq=False)
class Write:
    """What a latent adds, at one layer. A cross-layer transcoder has several."""

    layer: int
    site: str  # one of WRITE_SITES
    at: At
    W_dec: Tensor  # (F, d_out) float32
    b_out: Tensor | None  # (d_out,) float32; added once per token, whatever fires


# --- what happens to the input before it is read ------------------------------------------------------------


@dataclass(frozen=True)
class LayerNormInput:
    """(x - mean) / (std + eps) over a token's components, std with n - 1; the output is scaled and moved back
    by the same figures where `restores` says so (SAELens: an SAE's, never a transcoder's)."""

    eps: float = 1e-5
    restores: bool = True


@dataclass(frozen=True)
class RescaledInput:
    """x * norm / |x|: every token has the same norm; scaled back on the way out where `restores` says so."""

    norm: float
    restores: bool = True


InputNorm = LayerNormInput | RescaledInput


# --- gates: pre-activation to activation --------------------------------------------------------------------


@dataclass(frozen=True)
class ReLU:
    """max(pre, 0)."""


@dataclass(frozen=True, eq=False)
class JumpReLU:
    """pre where pre > threshold (strictly), else 0; with `relu_too` never negative.

    Without it a negative threshold lets negative values pass: circuit-tracer does so, SAELens and
    dictionary_learning apply ReLU as well.
    """

    threshold: Tensor  # (F,) float32
    relu_too: bool


@dataclass(frozen=True)
class ScalarThreshold:
    """One threshold for all latents (BatchTopK at inference): pre where pre > threshold, then ReLU if
    said."""

    threshold: float
    relu_too: bool = True


@dataclass(frozen=True)
class TopK:
    """The k largest pre-activations of a token, ties to the smaller number; with `by_magnitude` the k largest
    |pre|, signs kept. `relu_too`: of those only the positive ones, so fewer than k may stay."""

    k: int
    by_magnitude: bool = False
    relu_too: bool = True


@dataclass(frozen=True)
class GroupMax:
    """ReLU, then of each of `groups` consecutive equal groups of latents the largest alone."""

    groups: int


@dataclass(frozen=True, eq=False)
class Gated:
    """A second, scaled reading decides: max(pre, 0) where (pre - b_enc) * scale + b_gate > 0, else 0.

    `pre` and `b_enc` are the magnitude path's; scale is exp(-r_mag) where a file holds r_mag.
    """

    scale: Tensor  # (F,) float32
    b_gate: Tensor  # (F,) float32


@dataclass(frozen=True)
class Pointwise:
    """A neuron of a plain MLP: the model's own activation function (Hugging Face's name) of pre."""

    activation: str


@dataclass(frozen=True)
class GatedMLP:
    """A neuron of a gated MLP: activation(pre of `gate`) * pre of `up`."""

    activation: str


Gate = ReLU | JumpReLU | ScalarThreshold | TopK | GroupMax | Gated | Pointwise | GatedMLP


# --- the dictionary -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dictionary:
    """All of one dictionary that reads one layer, with its tensors (CPU, float32, contiguous)."""

    set: str
    kind: str  # transcoder | cross-layer transcoder | sae | snmf | neurons
    layer: int
    read: Read
    encoders: tuple[Encoder, ...]
    writes: tuple[Write, ...]
    gate: Gate
    b_in: Tensor | None = None  # (d_in,), subtracted from the (normalised) input
    W_skip: Tensor | None = None  # (d_in, d_out): x @ W_skip joins the first write
    input_norm: InputNorm | None = None
    decoder_norm_in_gate: Tensor | None = (
        None  # (F,): TopK and GroupMax choose by pre * this, the value is pre
    )
    hash: str = ""  # provenance: sha256 of tensors, meaning and model (ingest.dictionaries.hashing)

    def __post_init__(self) -> None:
        size, width = self.encoders[0].W_enc.shape
        for encoder in self.encoders:
            _expect(f"W_enc of {encoder.reading}", encoder.W_enc, (size, width))
            _expect(f"b_enc of {encoder.reading}", encoder.b_enc, (size,))
        if self.readings != (("gate", "up") if isinstance(self.gate, GatedMLP) else ("in",)):
            raise ValueError(f"readings {self.readings} do not fit the gate {type(self.gate).__name__}")
        for write in self.writes:
            if write.site not in WRITE_SITES:
                raise ValueError(f"write site {write.site!r}: expected one of {', '.join(WRITE_SITES)}")
            _expect(f"W_dec of layer {write.layer}", write.W_dec, (size, write.W_dec.shape[-1]))
            _expect(f"b_out of layer {write.layer}", write.b_out, (write.W_dec.shape[-1],))
        _expect("b_in", self.b_in, (width,))
        _expect("decoder_norm_in_gate", self.decoder_norm_in_gate, (size,))
        if self.W_skip is not None:
            _expect("W_skip", self.W_skip, (width, self.writes[0].W_dec.shape[-1]))
        match self.gate:
            case JumpReLU(threshold=threshold):
                _expect("threshold", threshold, (size,))
            case Gated(scale=scale, b_gate=b_gate):
                _expect("scale of the gate", scale, (size,))
                _expect("b_gate", b_gate, (size,))

    @property
    def size(self) -> int:
        """F, the number of latents."""
        return self.encoders[0].W_enc.shape[0]

    @property
    def readings(self) -> tuple[str, ...]:
        """("in",), or ("gate", "up") of gated neurons: one edge each."""
        return tuple(encoder.reading for encoder in self.encoders)

    @property
    def signed(self) -> bool:
        """Whether an activation can be negative."""
        match self.gate:
            case JumpReLU(threshold=threshold, relu_too=relu_too):
                return not relu_too and bool((threshold < 0).any())
            case ScalarThreshold(threshold=scalar, relu_too=relu_too):
                return not relu_too and scalar < 0
            case TopK(relu_too=relu_too):
                return not relu_too
            case Pointwise(activation=name):
                return name not in ("relu", "relu2")
            case GatedMLP():
                return True
        return False

    @property
    def rescalable(self) -> bool:
        """Whether a latent's scale is arbitrary (e to c e, d to d / c changes no output): then |V| compares
        only after scaling to unit writing norm. Not so for neurons, whose scale is the model's, unless they
        are plain ReLUs."""
        return not isinstance(self.gate, GatedMLP) and not (
            isinstance(self.gate, Pointwise) and self.gate.activation != "relu"
        )


def _expect(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Readers report a user's files; this catches a reader that builds nonsense."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
