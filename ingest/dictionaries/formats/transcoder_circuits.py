"""transcoder_circuits: one file for each dictionary, `.pt` or `.pkl.gz`, of {cfg, state_dict}.

    W_enc (d_in, F)  b_enc (F)  W_dec (F, d_out)  b_dec (d_in)       a = ReLU((x - b_dec) @ W_enc + b_enc)
    transcoder: b_dec_out (d_out)                                    out = a @ W_dec + b_dec_out
    SAE                                                              out = a @ W_dec + b_dec

cfg is a pickled object of the training script's configuration; its attributes are read as data and no class
is needed. It names the hooks of TransformerLens' folded model, on which all of this holds: norms without
gain, so that `ln2.hook_normalized` is before the model's own gain, and, of a model with LayerNorm, a stream
whose mean is taken out. The weights of a dictionary that reads such a stream, or a branch's output, are made
to read the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.configs import Fields
from ingest.dictionaries.folders import dictionary_folders
from ingest.dictionaries.found import Found, check_declared, check_width, layout_of
from ingest.dictionaries.hooks import ReadHook, WriteHook, mlp_input, read_hook, write_hook
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout
from ingest.dictionaries.pickled_tensors import (
    Configuration,
    Named,
    PickledFile,
    PickledTensor,
    pickle_head,
    read_pickled,
    read_pickled_tensors,
    state_dict,
)
from ingest.dictionaries.tensor_files import check_keys, check_shape
from ingest.dictionaries.types import At, Dictionary, Encoder, Read, ReLU, Space, Write
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.models import Facts

__all__ = ["FORMAT"]

_CLASS = "sae_training.config.LanguageModelSAERunnerConfig"
_SUFFIXES = (".pt", ".pkl.gz", ".pkl")
_NAME = "sparse_autoencoder"  # in every name that the library gives a file
_SPARSITY = "_log_feature_sparsity.pt"  # which it writes beside, of training
_REQUIRED = {"W_enc", "b_enc", "W_dec", "b_dec"}
_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64"}
# How it was trained, on what, and what was logged. A sparse connection is a term of the loss.
_TRAINING = (
    "dataset_path", "is_dataset_tokenized", "context_size", "use_cached_activations",
    "cached_activations_path", "n_batches_in_buffer", "total_training_tokens", "store_batch_size",
    "device", "seed", "is_sparse_connection", "sparse_connection_sae_path", "sparse_connection_l1_coeff",
    "sparse_connection_use_W_enc", "b_dec_init_method", "expansion_factor", "from_pretrained_path",
    "l1_coefficient", "lp_norm", "lr", "lr_scheduler_name", "lr_warm_up_steps", "train_batch_size",
    "use_ghost_grads", "feature_sampling_window", "feature_sampling_method", "resample_batches",
    "feature_reinit_scale", "dead_feature_window", "dead_feature_estimation_method",
    "dead_feature_threshold", "log_to_wandb", "wandb_project", "wandb_entity", "wandb_log_frequency",
    "n_checkpoints", "checkpoint_path", "use_tqdm", "tokens_per_buffer", "run_name",
)  # fmt: skip
_FOLDED = (
    "made on TransformerLens' folded model: norms without gain, and, where the norm is a LayerNorm, a stream"
    " without its mean"
)


@dataclass(frozen=True)
class TranscoderCircuits:
    name: str = "transcoder_circuits"
    hub_files: tuple[str, ...] = (f"*{_NAME}*.pt", f"*{_NAME}*.pkl.gz")

    def recognises(self, where: Path) -> bool:
        """A file named as the library names them or with its configuration inside, there or in a folder."""
        return bool(_files(where))

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is None:
            raise InputError(f"format {self.name!r} needs a path: a .pt or .pkl.gz file, or a folder of them")
        files = _files(where) or ([where] if where.is_file() else [])
        if not files:
            raise InputError(f"{where}: no .pt or .pkl.gz file of {self.name} is here; expected one a layer")
        if declared.layer is not None and len(files) > 1:
            raise InputError(
                f"{where}: holds {len(files)} dictionaries, layer says {declared.layer} of one; give the path"
                " of that file"
            )
        found = [_found(path, facts, declared) for path in files]
        return layout_of(self.name, where, found, facts, layers)


def _files(where: Path) -> list[Path]:
    if where.is_file():
        return [where] if _is_ours(where) else []
    return [path for folder in dictionary_folders(where, lambda _: True) for path in _in(folder)]


def _in(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and _is_ours(path))


def _is_ours(path: Path) -> bool:
    if not path.name.endswith(_SUFFIXES) or path.name.endswith(_SPARSITY):
        return False
    return _NAME in path.name or _CLASS.rpartition(".")[2].encode() in pickle_head(path)


# --- cfg ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Config:
    """What cfg says of reading and writing."""

    hook: str | None
    layer: int | None
    hook_out: str | None
    layer_out: int | None
    transcoder: bool | None
    sizes: Mapping[str, int | None]  # d_in, d_sae, d_out
    dtype: str | None
    model: str | None


def _config(path: Path, cfg: object) -> _Config:
    values = cfg.fields if isinstance(cfg, Configuration) else cfg
    if not isinstance(values, dict):
        raise InputError(f"{path}: cfg: expected the training script's configuration, found {cfg!r:.80}")
    fields = Fields(path, values, "cfg.")
    head = fields.take("hook_point_head_index", object, None)
    if head is not None:
        raise InputError(
            f"{fields.place('hook_point_head_index')}: {head!r:.20}, one head's output alone; not supported"
        )
    dtype = fields.take("dtype", object, None)
    config = _Config(
        hook=fields.take("hook_point", str, None),
        layer=fields.take("hook_point_layer", int, None),
        hook_out=fields.take("out_hook_point", str, None),
        layer_out=fields.take("out_hook_point_layer", int, None),
        transcoder=fields.take("is_transcoder", bool, None),
        sizes={key: fields.take(key, int, None) for key in ("d_in", "d_sae", "d_out")},
        dtype=dtype.name if isinstance(dtype, Named) else None,
        model=fields.take("model_name", str, None),
    )
    fields.ignore(*_TRAINING)
    fields.done()
    return config


# --- where it stands ----------------------------------------------------------------------------------------


def _place(
    path: Path, config: _Config, transcoder: bool, facts: Facts | None, declared: Declared
) -> tuple[ReadHook, WriteHook, int, int]:
    """What is read and written, of which layer read, of which written."""
    hook, key = config.hook or declared.reads, "cfg.hook_point"
    if hook is None:
        raise InputError(f"{path}: {key}: is missing; say what it reads with reads")
    where = f"{path}: {key}" if config.hook else "reads"
    read = read_hook(hook, facts, where, folded=True)
    if read.read.space == Space.Z:
        raise InputError(
            f"{where}: {hook} of the folded model is without the values' biases, which this model has there;"
            " not supported"
        )
    if transcoder:
        read = replace(read, read=mlp_input(read.read))
        out, told = config.hook_out or declared.writes, f"{path}: cfg.out_hook_point"
        if out is None:
            raise InputError(f"{told}: is missing; say what it writes with writes")
        write = write_hook(out, facts, told if config.hook_out else "writes")
    else:
        write = write_hook(hook, facts, where)
    layer = _layer(path, {key: read.layer, "cfg.hook_point_layer": config.layer, "layer": declared.layer})
    beside = config.layer_out if transcoder else None
    unsaid = write.layer is None and beside is None
    written = (
        layer if unsaid else _layer(path, {"cfg.out_hook_point": write.layer, "out_hook_point_layer": beside})
    )
    if config.hook:
        read, write = replace(read, layer=layer), replace(write, layer=written)
        check_declared(declared, read, write, facts, where, folded=True)
    return read, write, layer, written


def _layer(path: Path, told: Mapping[str, int | None]) -> int:
    said = {key: layer for key, layer in told.items() if layer is not None}
    if len(set(said.values())) != 1:
        listed = ", ".join(f"{key} says {layer}" for key, layer in said.items())
        raise InputError(f"{path}: of which layer? {listed or 'it says none; say it with layer'}")
    return next(iter(said.values()))


# --- the weights --------------------------------------------------------------------------------------------


def _found(path: Path, facts: Facts | None, declared: Declared) -> Found:
    file = read_pickled(path, {_CLASS})
    if not isinstance(file.value, dict) or set(file.value) != {"cfg", "state_dict"}:
        keys = ", ".join(file.value) if isinstance(file.value, dict) else type(file.value).__name__
        raise InputError(f"{path}: expected cfg and state_dict, found {keys[:200] or 'nothing'}")
    config = _config(path, file.value["cfg"])
    header = state_dict(path, file.value["state_dict"])
    transcoder = "b_dec_out" in header
    if config.transcoder not in (None, transcoder):
        raise InputError(
            f"{path}: cfg.is_transcoder: {str(config.transcoder).lower()}, but the tensors are"
            f" {', '.join(sorted(header))}; expected b_dec_out of a transcoder, and of nothing else"
        )
    d_in, size, d_out = _check(path, header, config)
    read, write, layer, written = _place(path, config, transcoder, facts, declared)
    check_width(f"{path}: W_enc", d_in, read.read.site, facts)
    check_width(f"{path}: W_dec", d_out, write.site, facts)
    raw = read.read.space in (Space.RAW, Space.BRANCH_OUTPUT)
    centred = raw and facts is not None and facts.norm.centred
    dtypes = frozenset(entry.dtype for entry in header.values())
    notes = [_FOLDED, *(note for note in (read.note, write.note) if note)]
    if config.dtype is not None and {_DTYPES.get(config.dtype)} != dtypes:
        notes.append(f"cfg says {config.dtype}, the tensors are {', '.join(sorted(dtypes))}: they decide")
    return Found(
        where=path,
        kind="transcoder" if transcoder else "sae",
        layer=layer,
        size=size,
        read=read.read,
        writes=((written, write.site, write.at),),
        activation="ReLU",
        bytes=4 * sum(entry.count for entry in header.values()),
        dtypes=dtypes,
        widths=(d_in, d_out),
        load=partial(_load, file, header, layer, read.read, (written, write.site, write.at), centred),
        provenance={"folded": _FOLDED, **({"model_name": config.model} if config.model else {})},
        notes=tuple(notes),
        folded=True,
    )


def _check(path: Path, header: Mapping[str, PickledTensor], config: _Config) -> tuple[int, int, int]:
    """(d_in, F, d_out). Raises InputError for tensors missing, left over or of another shape."""
    check_keys(path, header, _REQUIRED, {"b_dec_out"})
    for key in ("W_enc", "W_dec"):
        shape = header[key].shape
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"{path}: {key} has shape {shape}, expected two sizes")
    (d_in, size), d_out = header["W_enc"].shape, header["W_dec"].shape[1]
    told = f"W_enc is {header['W_enc'].shape}"
    check_shape(path, "W_dec", header["W_dec"], (size, d_out if "b_dec_out" in header else d_in), told)
    check_shape(path, "b_enc", header["b_enc"], (size,), told)
    check_shape(path, "b_dec", header["b_dec"], (d_in,), told)
    if "b_dec_out" in header:
        check_shape(path, "b_dec_out", header["b_dec_out"], (d_out,), f"W_dec is {header['W_dec'].shape}")
    has = {"d_in": d_in, "d_sae": size, "d_out": d_out}
    for key, said in config.sizes.items():
        # An SAE's cfg may hold a d_out that its class never looked at.
        if said not in (None, has[key]) and (key != "d_out" or "b_dec_out" in header):
            raise InputError(
                f"{path}: cfg.{key}: {said}, but W_enc is {header['W_enc'].shape} and W_dec"
                f" {header['W_dec'].shape}; they are of two dictionaries"
            )
    return d_in, size, d_out


def _load(
    file: PickledFile,
    header: Mapping[str, PickledTensor],
    layer: int,
    read: Read,
    writes: tuple[int, str, At],
    centred: bool,
) -> Dictionary:
    tensors = read_pickled_tensors(file, header)
    W_enc, b_enc, b_in = tensors["W_enc"].T, tensors["b_enc"], tensors["b_dec"]  # (F, d_in)
    if centred:
        # Of x as they were of x C: (x C - b) W.T is (x - b) (W C).T less mean(W) times the sum of b.
        mean = W_enc.mean(dim=-1)
        W_enc, b_enc = W_enc - mean[:, None], b_enc - mean * b_in.sum()
    written, site, at = writes
    return Dictionary(
        set="",
        kind="transcoder" if "b_dec_out" in tensors else "sae",
        layer=layer,
        read=read,
        encoders=(Encoder("in", W_enc.contiguous(), b_enc),),
        writes=(Write(written, site, at, tensors["W_dec"], tensors.get("b_dec_out", b_in)),),
        gate=ReLU(),
        b_in=b_in,
    )


FORMAT = TranscoderCircuits()
