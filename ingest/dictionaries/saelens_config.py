"""cfg.json of SAELens, of version 6 and of those before it, as one set of choices.

Version 6 keeps what the dictionary computes at the top and what it was made from under `metadata`, which is
free in form: keys there that are not known are told in a note. Before version 6 all lies flat, TopK may hide
under architecture `standard`, and older names of a key stand for newer ones (`hook_point` for `hook_name`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ingest.dictionaries.configs import REQUIRED, Fields, read_json
from ingest.errors import InputError, near

__all__ = ["Config", "Origin", "read_config"]

_SAES = ("standard", "topk", "abstopk", "jumprelu", "gated")
_TRANSCODERS = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")
_LEGACY = ("standard", "topk", "jumprelu", "gated")
_WHOLE_BATCH = (
    "a training checkpoint, whose top k is over a whole batch; save it with save_inference_model, which"
    " writes a jumprelu"
)
_REFUSED = {
    "batchtopk": _WHOLE_BATCH,
    "matryoshka_batchtopk": _WHOLE_BATCH,
    "matching_pursuit": "a code found by iterative projection, which has no linear encoder",
    "temporal": "a code of a whole sequence, which has no encoder of one token",
}
_NORMS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm", "covariance_whitening")
_NOT_FOLDED = (
    "normalize_activations is expected_average_only_in, and the factor is not in the file: none is applied,"
    " as where it was folded in at saving"
)
_UNPROCESSED = (
    "model_from_pretrained_kwargs is not in cfg.json: read as made for the model as it is, though before"
    " version 3 of the library it was the folded one"
)

# What cfg.json says beside what is computed: of a training run, of tokens, of where it came from.
_TRAINING = (
    "device", "decoder_init_norm", "l1_coefficient", "lp_norm", "l1_warm_up_steps", "l0_coefficient",
    "l0_warm_up_steps", "pre_act_loss_coefficient", "jumprelu_init_threshold", "jumprelu_bandwidth",
    "jumprelu_sparsity_loss_mode", "jumprelu_tanh_scale", "aux_loss_coefficient", "use_sparse_activations",
)  # fmt: skip
_LEGACY_TRAINING = (
    "noise_scale", "mse_loss_normalization", "use_ghost_grads", "normalize_sae_decoder",
    "decoder_orthogonal_init", "decoder_heuristic_init", "decoder_heuristic_init_norm",
    "init_encoder_as_decoder_transpose", "scale_sparsity_penalty_by_decoder_norm", "b_dec_init_method",
    "expansion_factor", "from_pretrained_path", "hook_eval", "streaming", "is_dataset_tokenized",
    "use_cached_activations", "cached_activations_path", "n_batches_in_buffer", "training_tokens",
    "finetuning_tokens", "finetuning_method", "store_batch_size_prompts", "store_batch_size",
    "train_batch_size_tokens", "train_batch_size", "act_store_device", "seed", "autocast", "autocast_lm",
    "compile_llm", "llm_compilation_mode", "compile_sae", "sae_compilation_mode", "adam_beta1", "adam_beta2",
    "lr", "lr_end", "lr_scheduler_name", "lr_warm_up_steps", "lr_decay_steps", "n_restart_cycles",
    "feature_sampling_window", "dead_feature_window", "dead_feature_threshold", "n_eval_batches",
    "eval_batch_size_prompts", "log_to_wandb", "log_activations_store_to_wandb",
    "log_optimizer_state_to_wandb", "wandb_project", "wandb_id", "wandb_entity", "wandb_log_frequency",
    "eval_every_n_wandb_logs", "run_name", "resume", "n_checkpoints", "checkpoint_path", "verbose",
    "model_kwargs", "tokens_per_buffer", "use_error_term", "sparsity", "total_training_tokens",
)  # fmt: skip
_ORIGIN = (
    "sae_lens_training_version", "neuronpedia_id", "context_size", "prepend_bos", "seqpos_slice",
    "exclude_special_tokens", "dataset_trust_remote_code", "sequence_separator_token", "neuronpedia",
    "disable_concat_sequences",
)  # fmt: skip
_SHOWN = ("model_name", "model_hash", "dataset_path", "sae_lens_version", "training_architecture")


@dataclass(frozen=True)
class Origin:
    """Where a dictionary stood when it was made. `plain`: hook_normalized is before a gain, whatever the
    norm; `centred`: every writer to the stream, and so the stream, had mean zero (center_writing_weights)."""

    hook: str | None
    hook_key: str
    hook_out: str | None
    layer: int | None  # as said beside the hook
    layer_out: int | None
    plain: bool
    centred: bool
    folded_values: bool
    provenance: dict[str, str]


@dataclass(frozen=True)
class Config:
    """What cfg.json says, whatever its age."""

    path: Path
    architecture: str
    d_in: int
    d_out: int  # d_in, of an SAE
    d_sae: int
    k: int | None  # of topk and abstopk
    norm: str  # none, layer_norm or constant_norm_rescale
    subtracts: bool  # b_dec from the (normalised) input
    scales: bool  # activations by the decoder's norms
    finetuned: bool  # the weights have a factor on activations, for the decoder alone
    dtype: str | None  # as declared; the tensors decide
    l0: float | None  # a top k
    origin: Origin
    notes: tuple[str, ...]

    @property
    def transcoder(self) -> bool:
        """Whether it writes elsewhere than it reads."""
        return self.architecture in _TRANSCODERS


def read_config(path: Path) -> Config:
    """The choices of a cfg.json.

    Raises InputError for an architecture that is not read (by name), for a field that is not known, and for a
    value that makes no sense.
    """
    fields = Fields(path, read_json(path))
    legacy = "metadata" not in fields
    metadata = fields if legacy else fields.section("metadata")
    architecture, k, scales, finetuned = _architecture(fields, legacy)
    transcoder = architecture in _TRANSCODERS
    d_in, d_sae = (_positive(fields, key) for key in ("d_in", "d_sae"))
    if k is not None and k > d_sae:
        raise InputError(f"{path}: k: expected at most the {d_sae} latents (d_sae), found {k}")
    fields.one_of("reshape_activations", ("none", "hook_z"), "none")  # the hook says it too
    details = metadata.take("training_architecture_details", dict, {})
    trained_k = k if k is not None else details.get("k")
    told = isinstance(trained_k, int | float) and not isinstance(trained_k, bool) and 0 < trained_k <= d_sae
    config = Config(
        path=path,
        architecture=architecture,
        d_in=d_in,
        d_out=_positive(fields, "d_out") if transcoder else d_in,
        d_sae=d_sae,
        k=k,
        norm=_normalisation(fields),
        subtracts=_subtracts(fields, transcoder),
        scales=scales,
        finetuned=finetuned,
        dtype=fields.take("dtype", str, None),
        l0=trained_k if told else None,
        origin=_origin(metadata, legacy, transcoder),
        notes=(),
    )
    fields.ignore(*_TRAINING, *(_LEGACY_TRAINING if legacy else ()))
    metadata.ignore(*_ORIGIN)
    if not legacy and (free := metadata.unknown()):
        metadata.ignore(*free)
        fields.notes.append(f"metadata has {', '.join(free)}, not known here and not used")
    fields.done()
    return Config(**{**vars(config), "notes": tuple(fields.notes)})


def _architecture(fields: Fields, legacy: bool) -> tuple[str, int | None, bool, bool]:
    """(architecture, k, whether activations are scaled, whether there is a finetuning factor)."""
    note = "architecture is not in cfg.json: read as standard"
    found = fields.take("architecture", str, "standard" if legacy else REQUIRED, note=note)
    known = _LEGACY if legacy else (*_SAES, *_TRANSCODERS)
    if found in _REFUSED:
        raise InputError(f"{fields.place('architecture')}: {found} is not supported: it is {_REFUSED[found]}")
    if found not in known:
        hint = near(found, known)
        listed = "" if hint.startswith("; expected") else f"; known: {', '.join(known)}"
        raise InputError(f"{fields.place('architecture')}: {found!r} is not known{hint}{listed}")
    if not legacy:
        topk = found in ("topk", "abstopk")
        k = _positive(fields, "k") if topk else None
        return found, k, topk and fields.take("rescale_acts_by_decoder_norm", bool, False), False
    finetuned = fields.take("finetuning_scaling_factor", bool, False)
    key = _renamed(fields, "activation_fn_str", "activation_fn")
    activation = fields.one_of(key, ("relu", "topk"), "topk" if found == "topk" else "relu")
    kwargs = fields.section("activation_fn_kwargs")
    if activation != "topk":
        if found == "topk":
            raise InputError(
                f"{fields.place(key)}: expected topk, as the architecture is, found {activation!r}"
            )
        return found, None, False, finetuned
    if found not in ("standard", "topk"):
        raise InputError(f"{fields.place(key)}: topk does not go with architecture {found}; expected relu")
    return "topk", _positive(kwargs, "k"), False, finetuned


def _normalisation(fields: Fields) -> str:
    found = fields.one_of("normalize_activations", (*_NORMS, False, True), "none")
    if found in (True, "expected_average_only_in"):  # true: an early name of it
        fields.notes.append(_NOT_FOLDED)
        return "none"
    # Whitening is folded into the weights that are saved.
    return str(found) if found in ("layer_norm", "constant_norm_rescale") else "none"


def _subtracts(fields: Fields, transcoder: bool) -> bool:
    key = "apply_b_dec_to_input"
    if not transcoder:
        note = f"{key} is not in cfg.json: b_dec is subtracted from the input, as the library does"
        return bool(fields.take(key, bool, True, note=note))
    if fields.take(key, bool, False):
        raise InputError(
            f"{fields.place(key)}: expected false, as a transcoder's b_dec is of its output, found true"
        )
    return False


def _origin(fields: Fields, legacy: bool, transcoder: bool) -> Origin:
    hook_key = _renamed(fields, "hook_name", "hook_point")
    hook = fields.take(hook_key, str, None)
    out = fields.take("hook_name_out", str, None)
    if not transcoder and out not in (None, hook):
        raise InputError(
            f"{fields.place('hook_name_out')}: expected {hook or 'none'}, as an SAE gives back what it reads,"
            f" found {out!r}; architecture should name a transcoder"
        )
    layer = fields.take(_renamed(fields, "hook_layer", "hook_point_layer"), int, None)
    for key in (_renamed(fields, "hook_head_index", "hook_point_head_index"), "hook_head_index_out"):
        if fields.take(key, int, None) is not None:
            raise InputError(f"{fields.place(key)}: a dictionary of one head is not supported; expected null")
    layer_out = fields.take("hook_layer_out", int, None)
    library = fields.one_of(
        "model_class_name", ("HookedTransformer", "TransformerBridge", "AutoModelForCausalLM"),
        "HookedTransformer",
    )  # fmt: skip
    if library == "AutoModelForCausalLM":  # whose modules' outputs are hooked
        hook, out = (name and f"{name}.output" for name in (hook, out))
    if legacy and fields.values.get("model_from_pretrained_kwargs") is None:
        fields.notes.append(_UNPROCESSED)
    loading = fields.take("model_from_pretrained_kwargs", dict, {})
    return Origin(
        hook=hook,
        hook_key=fields.place(hook_key),
        hook_out=out,
        layer=layer,
        layer_out=layer_out,
        plain=library == "TransformerBridge" or bool(loading.get("fold_ln")),
        centred=bool(loading.get("center_writing_weights")),
        folded_values=bool(loading.get("fold_value_biases")),
        provenance={key: str(value) for key in _SHOWN if (value := fields.take(key, object, None))},
    )


def _renamed(fields: Fields, name: str, old: str) -> str:
    """Whichever of a key's two names is there. Raises InputError where both are and differ."""
    fields.ignore(name, old)
    if name in fields and old in fields and fields.values[name] != fields.values[old]:
        raise InputError(
            f"{fields.place(old)}: {fields.values[old]!r} is not {name}'s {fields.values[name]!r}, of which"
            " it is an older name; remove one"
        )
    return old if old in fields and name not in fields else name


def _positive(fields: Fields, key: str) -> int:
    value = fields.take(key, int)
    if value < 1:
        raise InputError(f"{fields.place(key)}: expected 1 or more, found {value}")
    return int(value)
