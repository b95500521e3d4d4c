"""Dictionaries in Gemma Scope's layouts from known tensors, and what they compute, in float64."""

import numpy as np
import torch

from tests.ingest.small_dictionaries import Facts

D, F, HEADS = 8, 20, 4
GEMMA = Facts(n_layers=4, architecture="Gemma2ForCausalLM", norm_after=True, embedding_factor=8**0.5)
X = np.random.default_rng(7).standard_normal((40, D)) * np.logspace(-1, 1, 40)[:, None]


def params(seed=0, d_in=D, d_out=D, size=F):
    """One dictionary under Gemma Scope's names: random, no symmetry, biases and thresholds far from zero."""
    rng = np.random.default_rng(seed)
    return {
        "W_enc": rng.standard_normal((d_in, size)),
        "W_dec": rng.standard_normal((size, d_out)) * (0.4 + rng.random((size, 1))),
        "b_enc": rng.standard_normal(size) - 0.5,
        "b_dec": 2 * rng.standard_normal(d_out),
        "threshold": 0.2 + rng.random(size),
    }


def single(values):
    """The same as float32, as it is saved."""
    return {key: value.astype(np.float32) for key, value in values.items()}


def activations(values, x):
    """JumpReLU by loops: the whole pre-activation where it is over the threshold."""
    values = {key: value.astype(np.float32).astype(np.float64) for key, value in values.items()}
    acts = np.zeros((len(x), values["W_enc"].shape[1]))
    for token, row in enumerate(x):
        for j in range(acts.shape[1]):
            pre = sum(row[k] * values["W_enc"][k, j] for k in range(len(row))) + values["b_enc"][j]
            acts[token, j] = pre if pre > values["threshold"][j] else 0.0
    return acts


def tensor(x):
    return torch.from_numpy(np.asarray(x, np.float32))
