"""Dictionaries of Language-Model-SAEs and Llamascopium written from known tensors in each layout, and what
the library computes on them, in float64 and in its own normalised space: the reader folds instead."""

import json
import math

import torch
from safetensors.torch import save_file

D, F, K = 8, 24, 5
X = torch.randn(60, D, generator=torch.Generator().manual_seed(7)) * torch.logspace(-0.5, 1, 60)[:, None]
HOOK = "blocks.1.hook_resid_post"
NORM = "dataset_average_activation_norm."
THRESHOLD = "activation_function.log_jumprelu_threshold"

NOW = {
    "sae_type": "sae", "d_model": D, "expansion_factor": 3.0, "use_decoder_bias": True, "act_fn": "relu",
    "norm_activation": "dataset-wise", "sparsity_include_decoder_norm": True, "top_k": K,
    "use_triton_kernel": False, "sparsity_threshold_for_triton_spmm_kernel": 0.996,
    "jumprelu_threshold_window": 2.0, "hook_point_in": HOOK, "hook_point_out": HOOK,
    "use_glu_encoder": False,
}  # fmt: skip
IN_2025 = {
    **NOW, "expansion_factor": 3, "jump_relu_threshold": 0.0, "apply_decoder_bias_to_pre_encoder": False,
    "force_unit_decoder_norm": False,
}  # fmt: skip
IN_2024 = {
    "device": "cpu", "seed": 42, "dtype": "torch.float", "hook_point_in": HOOK, "hook_point_out": HOOK,
    "use_decoder_bias": True, "apply_decoder_bias_to_pre_encoder": False, "expansion_factor": 3, "d_model": D,
    "d_sae": F, "bias_init_method": "all_zero", "act_fn": "jumprelu", "jump_relu_threshold": 0.6,
    "norm_activation": "dataset-wise", "dataset_average_activation_norm": {"in": 11.0, "out": 4.0},
    "decoder_exactly_fixed_norm": False, "sparsity_include_decoder_norm": True, "use_glu_encoder": False,
    "init_decoder_norm": 1.0, "init_encoder_norm": None, "init_encoder_with_decoder_transpose": True, "lp": 1,
    "l1_coefficient": 8e-05, "l1_coefficient_warmup_steps": 0.1, "top_k": K, "initial_k": 0.48,
    "k_warmup_steps": 0.1, "use_batch_norm_mse": True, "use_ghost_grads": False, "tp_size": 1, "ddp_size": 1,
}  # fmt: skip


def known(seed=0, dtype=torch.float32):
    """W_E (d, F), b_E, W_D (F, d), b_D, log thresholds: decoder norms 0.4 to 1.6, biases far from 0."""
    make = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    directions = torch.nn.functional.normalize(random(F, D), dim=1)
    found = {
        "W_E": 0.6 * random(D, F),
        "b_E": 0.4 * random(F),
        "W_D": directions * (0.4 + 1.2 * torch.rand(F, 1, generator=make)),
        "b_D": random(D),
    }
    return {key: value.to(dtype) for key, value in found.items()} | {THRESHOLD: random(F) - 0.5}


def scale(norm):
    return math.sqrt(D) / norm


def expected(values, into, out, keep, *, gate=True, centred=False):
    """(activations in normalised space, outputs): the library's encode and decode on s_in x."""
    values = {key: value.double() for key, value in values.items()}
    x = X.double() * into
    pre = (x - values["b_D"] if centred else x) @ values["W_E"] + values["b_E"]
    acts = pre * keep(pre * values["W_D"].norm(dim=1) if gate else pre)
    return acts, (acts @ values["W_D"] + values["b_D"]) / out


def positive(score):
    return score > 0


def over(threshold):
    return lambda score: score > threshold


def largest(k):
    """The k largest, of those only the positive ones; by loops."""

    def keep(score):
        mask = torch.zeros_like(score)
        for token, row in enumerate(score.tolist()):
            for latent in sorted(range(len(row)), key=lambda j: -row[j])[:k]:
                mask[token, latent] = row[latent] > 0
        return mask

    return keep


def write_now(folder, values, norms=None, **config):
    """Llamascopium; `norms` by hook."""
    config = {**NOW, **config}
    own = {key: value for key, value in values.items() if key != THRESHOLD or config["act_fn"] == "jumprelu"}
    if not config["use_decoder_bias"]:
        del own["b_D"]
    return _write(folder, own, norms, config, version="2.0.0b34")


def write_2025(folder, values, norms=None, **config):
    config = {**IN_2025, **config}
    own = _linear(values)
    if config["act_fn"] == "jumprelu":
        own["log_jumprelu_threshold"] = values[THRESHOLD]
    return _write(folder, own, norms, config, version="9acd54bc")


def write_2024(folder, values, **config):
    config = {**IN_2024, **config}
    own = _linear(values)
    if not config["use_decoder_bias"]:
        del own["decoder.bias"]
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    save_file(own, str(folder / "checkpoints" / "final.safetensors"), {"version": "d7a3e4c3"})
    _write_config(folder / "hyperparams.json", config)
    return folder


def write_clt(folder, layers, norms=None, **config):
    """`layers`: W_E, b_E, threshold by layer read, W_D[i][j - i] and b_D by layer written."""
    depth = len(layers)
    own = {
        "W_E": torch.stack([layer["W_E"] for layer in layers]),
        "b_E": torch.stack([layer["b_E"] for layer in layers]),
        **{f"b_D.{j}": layer["b_D"] for j, layer in enumerate(layers)},
        **{f"W_D.{j}": torch.stack([layers[i]["W_D"][j - i] for i in range(j + 1)]) for j in range(depth)},
    }
    hooks = {
        "hook_points_in": [f"blocks.{layer}.hook_resid_mid" for layer in range(depth)],
        "hook_points_out": [f"blocks.{layer}.hook_mlp_out" for layer in range(depth)],
        "decode_with_csr": False,
        "sparsity_threshold_for_csr": 0.05,
        "init_cross_layer_decoder_all_zero": False,
    }
    left_out = ("hook_point_in", "hook_point_out", "use_glu_encoder")
    base = {key: value for key, value in NOW.items() if key not in left_out}
    config = {**base, "sae_type": "clt", **hooks, **config}
    if config["act_fn"] == "jumprelu":
        own[THRESHOLD] = torch.stack([layer[THRESHOLD] for layer in layers])
    return _write(folder, own, norms, config, version="2.0.0b34")


def _linear(values):
    return {
        "encoder.weight": values["W_E"].T.contiguous(),
        "encoder.bias": values["b_E"],
        "decoder.weight": values["W_D"].T.contiguous(),
        "decoder.bias": values["b_D"],
    }


def _write(folder, tensors, norms, config, version):
    folder.mkdir(parents=True, exist_ok=True)
    norms = {HOOK: 3.7} if norms is None else norms
    scalars = {NORM + hook: torch.tensor(norm) for hook, norm in norms.items()}
    save_file({**tensors, **scalars}, str(folder / "sae_weights.safetensors"), {"version": version})
    _write_config(folder / "config.json", config)
    return folder


def _write_config(path, config):
    """All but the fields that are `...`."""
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
