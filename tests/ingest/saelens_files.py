"""SAELens' layout written from known tensors: cfg.json as version 6 and as those before it have it."""

import json

import torch
from safetensors.torch import save_file

from ingest.models import Norm

D, F = 8, 20
POST, MLP_OUT, NORMALISED = (
    "blocks.1.hook_resid_post",
    "blocks.1.hook_mlp_out",
    "blocks.1.ln2.hook_normalized",
)
LAYER_NORM = Norm(centred=True, gain="weight", bias=True, eps=1e-5)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = 2 * random(99, 12, D).double() + 0.7  # a mean that is not zero


def weights(*more, d_out=D):
    """The tensors of a standard dictionary and those named; no two alike, biases far from zero."""
    values = {
        "W_enc": random(1, D, F),
        "b_enc": 0.5 * random(2, F),
        "W_dec": random(3, F, d_out) * (0.4 + random(4, F, 1).abs()),
        "b_dec": random(5, d_out),
        "threshold": random(6, F),
        "b_gate": random(7, F),
        "r_mag": 0.5 * random(8, F),
        "b_mag": random(9, F),
        "W_skip": random(10, d_out, D),
        "scaling_factor": 1 + random(11, F).abs(),
    }
    keep = {"W_enc", "W_dec", "b_dec", *more} | (set() if "b_gate" in more else {"b_enc"})
    return {key: value for key, value in values.items() if key in keep}


def current(architecture="standard", hook=POST, metadata=None, **fields):
    """cfg.json as version 6 writes it."""
    return {
        "d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": True,
        "normalize_activations": "none", "reshape_activations": "none", "architecture": architecture,
        "metadata": {"sae_lens_version": "6.5.0", "model_name": "m", "hook_name": hook, **(metadata or {})},
        **fields,
    }  # fmt: skip


def transcoder(architecture="transcoder", **fields):
    metadata = {"hook_name_out": MLP_OUT}
    fields = {"apply_b_dec_to_input": False, "d_out": D, **fields}
    return current(architecture, NORMALISED, metadata, **fields)


def legacy(**fields):
    """cfg.json as versions before 6 wrote it; a field of None is left out."""
    values = {
        "architecture": "standard", "d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu",
        "model_name": "small", "hook_name": POST, "hook_layer": 1, "hook_head_index": None,
        "activation_fn_str": "relu", "activation_fn_kwargs": {}, "apply_b_dec_to_input": True,
        "finetuning_scaling_factor": False, "normalize_activations": "none", "prepend_bos": True,
        "model_from_pretrained_kwargs": {}, **fields,
    }  # fmt: skip
    return {key: value for key, value in values.items() if value is not None}


def written(folder, values, config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in values.items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder
