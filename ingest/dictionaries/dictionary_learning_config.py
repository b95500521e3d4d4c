"""dictionary_learning's config.json, written by its trainers: where a dictionary stood, how it was trained.

What it computes, the tensors say. Nothing here is needed, and nothing is passed over in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ingest.dictionaries.configs import Fields, read_json
from ingest.errors import InputError

__all__ = ["Config", "hook_name", "read_config"]

# group_sizes stand in the weights too.
_TRAINING = (
    "lr", "l1_penalty", "warmup_steps", "resample_steps", "sparsity_warmup_steps", "steps",
    "decay_start", "seed", "device", "wandb_name", "auxk_alpha", "threshold_beta",
    "threshold_start_step", "top_k_aux", "k_anneal_steps", "group_sizes", "group_fractions",
    "group_weights", "bandwidth", "sparsity_penalty", "target_l0", "sparsity_function", "p_start",
    "p_end", "anneal_start", "sparsity_queue_length", "n_sparsity_updates", "use_constrained_optimizer",
    "initial_sparsity_penalty",
)  # fmt: skip
_BUFFER = (
    "n_ctxs", "ctx_len", "refresh_batch_size", "out_batch_size", "device", "remove_bos", "add_special_tokens",
    "max_activation_norm_multiple",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What config.json says; everything may be missing, and so may the file."""

    path: Path
    found: bool
    trainer: str | None
    dict_class: str | None
    d: int | None
    size: int | None
    k: int | None
    layer: int | None
    submodule: str | None
    side: str  # in, out or in_and_out
    model: str | None
    notes: tuple[str, ...]


def read_config(path: Path) -> Config:
    """The choices of a config.json, if there is one. Raises InputError for a field that is not known."""
    found = path.is_file()
    fields = Fields(path, read_json(path) if found else {})
    trainer, buffer = fields.section("trainer"), fields.section("buffer")
    width = buffer.take("d_submodule", int, None)
    submodule = trainer.take("submodule_name", str, None)
    # Only a module's path leaves its side open.
    unsaid = (
        f"{path.name} has no buffer.io: {submodule} is read at its output"
        if "." in (submodule or "")
        else None
    )
    config = Config(
        path=path,
        found=found,
        trainer=trainer.take("trainer_class", str, None),
        dict_class=trainer.take("dict_class", str, None),
        d=trainer.take("activation_dim", int, width),
        size=trainer.take("dict_size", int, None),
        k=trainer.take("k", int, None),
        layer=trainer.take("layer", int, None),
        submodule=submodule,
        side=buffer.one_of("io", ("in", "out", "in_and_out"), "out", note=unsaid),
        model=trainer.take("lm_name", str, None),
        notes=tuple(fields.notes),
    )
    trainer.ignore(*_TRAINING)
    buffer.ignore(*_BUFFER)
    fields.done()
    return config


def hook_name(config: Config) -> str | None:
    """The name of what is read, with its side; None where config.json does not say."""
    if config.side == "in_and_out":
        raise InputError(
            f"{config.path}: buffer.io: in_and_out, a transcoder, of which its files do not say what the bias"
            " is subtracted from; not supported"
        )
    name = config.submodule
    if name is None or name.endswith((".input", ".output")):
        return name
    if "." in name:  # a module's path, such as model.layers.4.mlp
        return f"{name}.{'input' if config.side == 'in' else 'output'}"
    return name if config.side == "out" else None  # resid_post_layer_4 is an output
