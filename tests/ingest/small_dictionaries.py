"""Small dictionaries written in a format's own layout from known tensors, and a model's outline to read them
for.

The outline has the attributes that ingest.dictionaries uses, and no weights: what reads a real model's
neurons is in test_dictionaries_neurons.py.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from ingest.dictionaries import open_set
from ingest.models import Norm

HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out"}
THRESHOLD = "activation_function.threshold"
RMS_NORM = Norm(centred=False, gain="weight", bias=False, eps=1e-6)


@dataclass(frozen=True)
class Facts:
    n_layers: int = 3
    d_model: int = 8
    d_mlp: int = 12
    architecture: str = "SmallForCausalLM"
    parallel: bool = False
    gated: bool = False
    activation: str = "gelu"
    norm: Norm = RMS_NORM
    norm_before: bool = True
    norm_after: bool = False
    one_norm: bool = False
    branch_multiplier: float = 1.0
    embedding_factor: float = 1.0
    n_heads: int = 4
    d_head: int = 2


@dataclass(frozen=True)
class Outline:
    facts: Facts = field(default_factory=Facts)
    name: str = "small"
    hash: str = "a" * 64
    source: Path = Path("small-model")


def tensors(seed=0, size=20, width=8, threshold=False, skip=False, dtype=torch.float32):
    """One layer in circuit-tracer's layout: random, no symmetry, biases far from zero."""
    make = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    layer = {
        "W_enc": random(size, width),
        "b_enc": 0.5 * random(size),
        "W_dec": random(size, width) * (0.4 + torch.rand(size, 1, generator=make)),
        "b_dec": random(width),
    }
    if threshold:
        layer[THRESHOLD] = 0.3 + torch.rand(size, generator=make)
    if skip:
        layer["W_skip"] = random(width, width)
    return {key: tensor.to(dtype) for key, tensor in layer.items()}


def write_set(folder, layers, **config):
    """A per-layer directory: {layer: tensors}, and config.yaml with the usual hooks unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer, values in layers.items():
        save_file(values, str(folder / f"layer_{layer}.safetensors"))
    keys = {key: value for key, value in {**HOOKS, **config}.items() if value is not None}
    (folder / "config.yaml").write_text(yaml.safe_dump(keys))
    return folder


def opened(folder, facts=None, **options):
    """The set in a folder, for an outline of a model."""
    return open_set(folder, name="tc", model=Outline(facts or Facts()), **options)
