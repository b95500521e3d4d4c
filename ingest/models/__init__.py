"""The residual view of a model: facts from its configuration, weights as the algebra needs them, and its
forward pass with everything frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingest.models.facts import Facts, Norm

if TYPE_CHECKING:
    from ingest.models.layers import MLPWeights
    from ingest.models.linear import Replay, replay
    from ingest.models.opening import open_model
    from ingest.models.residual import ResidualModel
    from ingest.models.runtime import Trace, Write
    from ingest.models.source import describe_model
    from ingest.models.vectors import encoder_vectors, reading_vectors, writing_vectors

__all__ = [
    "Facts", "MLPWeights", "Norm", "Replay", "ResidualModel", "Trace", "Write", "describe_model",
    "encoder_vectors", "open_model", "reading_vectors", "replay", "writing_vectors",
]  # fmt: skip

_HOMES = {
    "MLPWeights": "layers", "Replay": "linear", "replay": "linear", "open_model": "opening",
    "ResidualModel": "residual", "Trace": "runtime", "Write": "runtime", "describe_model": "source",
    "encoder_vectors": "vectors", "reading_vectors": "vectors", "writing_vectors": "vectors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads torch and transformers only when something that needs them is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
