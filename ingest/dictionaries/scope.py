"""What the layouts of OpenMOSS' library (Language-Model-SAEs, now Llamascopium) have in common: the fields of
their configurations, and the folding of their scales into one dictionary on raw activations.

    x' = s_in x,  s_in = sqrt(d) / average norm at the hook read, s_out likewise of the hook written
    pre' = (x' - b) @ W_E + b_E         b: the decoder's bias, where apply_decoder_bias_to_pre_encoder
    a'   = pre' where the activation function lets n pre' through, n = |W_D| of each latent (1 without
           sparsity_include_decoder_norm)
    s_out · out = a' @ W_D + b_D

On raw activations, with a = a' / s_in, the library's own folded convention:

    pre = (x - b / s_in) @ W_E + b_E / s_in
    out = a @ (W_D s_in / s_out) + b_D / s_out
    JumpReLU: n pre' > t  where  pre > t / (n s_in);   TopK of n pre'  is  TopK of n pre

The library's own folding leaves t as it is, and so changes which latents fire: it is not followed. With
`inference` all this is already in the weights, though the norms may still stand in the file; `token-wise`
norms are each token's own, and of a transcoder's output nobody knows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.configs import Fields, read_json
from ingest.dictionaries.found import check_declared
from ingest.dictionaries.hooks import ReadHook, WriteHook, mlp_input, read_hook, write_hook
from ingest.dictionaries.layout import Declared
from ingest.dictionaries.tensor_files import Entry, read_numbers
from ingest.dictionaries.types import At, Gate, InputNorm, JumpReLU, Read, ReLU, RescaledInput, TopK
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.models import Facts

__all__ = [
    "NORM_KEY",
    "Config",
    "Scale",
    "Site",
    "config_of",
    "gate_of",
    "language_model",
    "norms_of",
    "site_of",
]

NORM_KEY = "dataset_average_activation_norm."

_JOINT = {
    "batchtopk": "the k largest of a whole batch",
    "layertopk": "the k largest of all layers together",
    "batchlayertopk": "the k largest of a whole batch and all layers together",
}
# Known, and nothing of them bears on what the dictionary computes: how it was trained, initialised, loaded or
# sped up. `force_unit_decoder_norm` and its kin were applied before saving.
WITHOUT_MEANING = (
    "device", "dtype", "promote_act_fn_dtype", "sae_pretrained_name_or_path", "strict_loading",
    "use_triton_kernel", "sparsity_threshold_for_triton_spmm_kernel", "sparsity_threshold_for_csr",
    "decode_with_csr", "jumprelu_threshold_window", "force_unit_decoder_norm",
    "init_cross_layer_decoder_all_zero",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What a configuration says of the computation, the same for every layout."""

    d_model: int
    latents: int
    activation: str  # relu, jumprelu or topk
    k: int  # of topk
    norm: str  # dataset-wise, token-wise or inference
    decoder_norm: bool  # the gate sees the pre-activation times the decoder's norm
    centred: bool  # the decoder's bias is subtracted from the input
    bias: bool  # there is a decoder bias

    @property
    def named(self) -> str:
        """The activation function, for people."""
        return {"relu": "ReLU", "jumprelu": "JumpReLU"}.get(self.activation, f"TopK {self.k}")

    @property
    def input_norm(self) -> InputNorm | None:
        """The norm that is taken anew for every token."""
        return RescaledInput(math.sqrt(self.d_model)) if self.norm == "token-wise" else None


def config_of(fields: Fields, *, centred: bool = False, norms: tuple[str, ...] = ()) -> Config:
    """The fields that every layout has. `centred` is the layout's default of
    apply_decoder_bias_to_pre_encoder, `norms` what norm_activation may be besides the three known.

    Raises InputError for what cannot be evaluated one token at a time, and for what no latent's one reading
    can express.
    """
    for key in ("d_model", "expansion_factor"):
        if fields.take(key, int | float) <= 0:
            raise InputError(f"{fields.place(key)}: expected more than 0, found {fields.values[key]}")
    d_model = fields.take("d_model", int)
    activation = fields.take("act_fn", str).lower()
    if activation in _JOINT:
        raise InputError(
            f"{fields.place('act_fn')}: {activation} keeps {_JOINT[activation]}, so no token can be evaluated"
            " by itself; expected relu, jumprelu or topk: convert it to jumprelu, with a threshold, and save"
            " that"
        )
    if activation not in ("relu", "jumprelu", "topk"):
        raise InputError(
            f'{fields.place("act_fn")}: expected one of "relu", "jumprelu", "topk", found "{activation}"'
        )
    norm = fields.one_of("norm_activation", ("dataset-wise", "token-wise", "batch-wise", "inference", *norms))
    if norm == "batch-wise":
        raise InputError(
            f"{fields.place('norm_activation')}: batch-wise norms are those of a whole batch, so no token can"
            " be evaluated by itself; expected dataset-wise, token-wise or inference"
        )
    if fields.take("use_glu_encoder", bool, False):
        raise InputError(
            f"{fields.place('use_glu_encoder')}: a latent that multiplies two readings is not supported;"
            " expected false"
        )
    fields.ignore(*WITHOUT_MEANING)
    k = fields.take("top_k", int, 0)
    latents = int(d_model * fields.take("expansion_factor", int | float))
    if activation == "topk" and not 1 <= k <= latents:
        raise InputError(
            f"{fields.place('top_k')}: act_fn is topk; expected 1 to {latents} (the latents), found {k}"
        )
    return Config(
        d_model=d_model,
        latents=latents,
        activation=activation,
        k=k,
        norm="inference" if norm in norms else norm,
        decoder_norm=_default(fields, "sparsity_include_decoder_norm", True),
        centred=_default(fields, "apply_decoder_bias_to_pre_encoder", centred, told=centred),
        bias=fields.take("use_decoder_bias", bool, True),
    )


def _default(fields: Fields, key: str, default: bool, told: bool = True) -> bool:
    note = (
        f"{key} is not in {fields.path.name}: the library's default, {str(default).lower()}" if told else None
    )
    found: bool = fields.take(key, bool, default, note=note)
    return found


# --- where it reads and writes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """Where one dictionary reads and writes."""

    layer: int
    read: Read
    write: tuple[int, str, At]
    notes: tuple[str, ...]


def site_of(
    hook_in: str, hook_out: str, place: tuple[str, str], facts: Facts | None, declared: Declared
) -> Site:
    """The sites of two hooks. `place`: "file: key" of each. Raises InputError."""
    read, write = read_hook(hook_in, facts, place[0]), write_hook(hook_out, facts, place[1])
    layer = read.layer if read.layer is not None else declared.layer
    if layer is None:
        raise InputError(f"{place[0]}: {hook_in} names no layer; say it with layer")
    written = layer if write.layer is None else write.layer
    if written < layer:
        raise InputError(
            f"{place[1]}: writes layer {written}, but layer {layer} is read; expected none before it"
        )
    reads = mlp_input(read.read) if (written, write.site) == (layer, "mlp") else read.read
    check_declared(
        declared,
        ReadHook(layer, reads, None),
        WriteHook(written, write.site, write.at, None),
        facts,
        place[0],
    )
    notes = [note for note in (read.note, write.note) if note]
    if facts is not None and facts.norm.centred:
        notes.append(
            "the files do not say on which form of the model it was trained: recent versions of the library"
            " use TransformerLens' folded one, whose branch outputs are centred"
        )
    return Site(layer, reads, (written, write.site, write.at), tuple(notes))


def language_model(folder: Path) -> dict[str, str]:
    """The model's name, where lm_config.json lies beside the dictionary: provenance."""
    path = folder / "lm_config.json"
    name = read_json(path).get("model_name") if path.is_file() else None
    return {"model_name": name} if isinstance(name, str) else {}


# --- the scales ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """s_in and s_out."""

    into: float = 1.0
    out: float = 1.0


def norms_of(
    path: Path,
    header: Mapping[str, Entry],
    hooks: tuple[str, str],
    config: Config,
    older: Fields | None = None,
) -> tuple[Scale, dict[str, str]]:
    """The scales of a pair of hooks, and the average norms for provenance; ones where none apply.

    The norms stand in the weights by the hook's name, or as `in` and `out`, or in an `older` configuration.
    Raises InputError where one that applies is missing or is no norm.
    """
    if config.norm == "token-wise" and hooks[0] != hooks[1]:
        raise InputError(
            f"{path}: norm_activation is token-wise and {hooks[1]} is written, {hooks[0]} read: the output is"
            " in units of the target's own norm, which nothing tells; expected dataset-wise or inference"
        )
    if config.norm != "dataset-wise":
        return Scale(), {}
    found = []
    for hook, side in zip(hooks, ("in", "out"), strict=True):
        key = next((NORM_KEY + name for name in (hook, side) if NORM_KEY + name in header), None)
        value = read_numbers(path, header, [key])[key] if key else None
        place = f"{path}: {key or NORM_KEY + hook}"
        if key is None and older is not None:
            value, place = older.take(side, float, None), older.place(side)
        if value is None:
            have = ", ".join(sorted(key for key in header if key.startswith(NORM_KEY))) or "no norm"
            raise InputError(
                f"{place}: is missing: norm_activation is dataset-wise; expected the average norm at {hook},"
                f" found {have}"
            )
        if not 0 < value < math.inf:
            raise InputError(
                f"{place} is {value}, expected an average norm above 0; it was never set: if the scale is"
                " already in the weights, norm_activation should say inference"
            )
        found.append(float(value))
    scale = Scale(*(math.sqrt(config.d_model) / norm for norm in found))
    return scale, {
        f"average_norm_{side}": f"{norm:g}" for side, norm in zip(("in", "out"), found, strict=True)
    }


def gate_of(
    config: Config, into: float, decoder_norm: Tensor, log_threshold: Tensor | None
) -> tuple[Gate, Tensor | None]:
    """The gate on the raw pre-activation, and the decoder norm that a TopK chooses by.

    `decoder_norm` (F,): of the file's own decoder, over all targets together; `into`: s_in. Thresholds are
    computed in float64 and rounded once. A latent without a decoder never fires.
    """
    import torch

    norm = decoder_norm if config.decoder_norm else None
    if config.activation == "topk":
        return TopK(config.k), norm
    if config.activation == "relu" or log_threshold is None:
        return ReLU(), None
    threshold = log_threshold.double().exp() / into
    if norm is not None:
        threshold = torch.where(norm > 0, threshold / norm.double(), torch.inf)
    return JumpReLU(threshold.float(), relu_too=False), None
