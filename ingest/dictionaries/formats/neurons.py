"""The model's own MLP neurons as a dictionary: what the MLP is, exactly, with no file and no error.

A neuron reads the MLP's input through a column of W_in and writes a row of W_out. A neuron of a gated MLP
reads twice, through `gate` and `up`, and is activation(gate) * up: two edges into it, one out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ingest.dictionaries.hashing import derived_hash
from ingest.dictionaries.layout import NOTHING, Declared, Layers, Layout, choose_layers
from ingest.dictionaries.types import (
    NEURON_ACTIVATIONS,
    At,
    Dictionary,
    Encoder,
    GatedMLP,
    Pointwise,
    Read,
    Space,
    Write,
)
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.models import Facts, ResidualModel

__all__ = ["FORMAT"]

_READ = Read("mlp.in", Space.NORMALISED_WITH_GAIN)


@dataclass(frozen=True)
class Neurons:
    name: str = "neurons"
    hub_files: tuple[str, ...] = ()

    def recognises(self, where: Path) -> bool:
        """No file holds neurons: they are asked for by name."""
        return False

    def scan(
        self, where: Path | None, facts: Facts | None, layers: Layers, declared: Declared = NOTHING
    ) -> Layout:
        if where is not None:
            raise InputError(f"{where}: format 'neurons' reads the model itself; leave the path out")
        if facts is None:
            raise InputError("format 'neurons' reads a model: say which")
        if declared != NOTHING:
            raise InputError("format 'neurons': reads, writes and layer are the model's own; leave them out")
        if facts.activation not in NEURON_ACTIVATIONS:
            raise InputError(
                f"neurons of {facts.architecture}: activation {facts.activation!r} is not supported; known:"
                f" {', '.join(NEURON_ACTIVATIONS)}"
            )
        chosen, notes = choose_layers(range(facts.n_layers), layers, facts, "neurons")
        readings = ("gate", "up") if facts.gated else ("in",)
        per_neuron = (len(readings) + 1) * facts.d_model * 4 + len(readings) * 4
        return Layout(
            format=self.name,
            kind="neurons",
            source=None,
            sizes=dict.fromkeys(chosen, facts.d_mlp),
            read=_READ,
            writes={layer: ((layer, "mlp", At.MODULE),) for layer in chosen},
            readings=readings,
            activation=f"{facts.activation} (gate) × up" if facts.gated else facts.activation,
            load=_load,
            hash_of=lambda layer, model_hash: derived_hash(model_hash, "mlp neurons", layer),
            bytes=dict.fromkeys(chosen, per_neuron * facts.d_mlp),
            widths=dict.fromkeys(chosen, (facts.d_model, facts.d_model)),
            notes=notes,
        )


def _load(layer: int, model: ResidualModel) -> Dictionary:
    weights = model.mlp_weights(layer)
    d_mlp, d_model = weights.W_out.shape
    paths: list[tuple[str, Tensor, Tensor | None]] = (
        [("in", weights.W_in, weights.b_in)]
        if weights.W_gate is None
        else [("gate", weights.W_gate, weights.b_gate), ("up", weights.W_in, weights.b_in)]
    )
    encoders = []
    for reading, W, b in paths:
        if tuple(W.shape) != (d_model, d_mlp):
            raise InputError(
                f"{model.source}: layer {layer}: the MLP's {reading} weights have shape {tuple(W.shape)},"
                f" its output weights {tuple(weights.W_out.shape)}; expected ({d_model}, {d_mlp})"
            )
        bias = W.new_zeros(d_mlp) if b is None else b
        encoders.append(
            Encoder(reading, W.T.float().contiguous(), bias.float().contiguous())
        )  # (d_mlp, d_model)
    return Dictionary(
        set="",
        kind="neurons",
        layer=layer,
        read=_READ,
        encoders=tuple(encoders),
        writes=(Write(layer, "mlp", At.MODULE, weights.W_out.float().contiguous(), weights.b_out),),
        gate=Pointwise(weights.activation) if weights.W_gate is None else GatedMLP(weights.activation),
    )


FORMAT = Neurons()
