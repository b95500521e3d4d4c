"""Opening a model: weights placed and compared by name, the bridge built, the identities checked."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ingest.models.checkpoint import load_weights
from ingest.models.checks import check_model, check_tokens
from ingest.models.libraries import library_errors
from ingest.models.residual import ResidualModel
from ingest.models.source import Source, find_source

__all__ = ["open_model"]

_OPENING = threading.Lock()


def open_model(
    where: str | Path, *, name: str | None = None, tokenizer: str | Path | None = None, check: bool = True
) -> ResidualModel:
    """The residual view of the model at `where`: a Hugging Face directory, a hub name, or a GGUF file.

    name: how keys call it (default: the directory's or the file's). tokenizer: a directory or tokenizer.json
    to take token texts from. check=False leaves out the identities (they cost two short forward passes) for
    a model that this machine has checked already; names, shapes and finiteness are always compared.

    Raises InputError, one line: what is missing, damaged, refused or not what the configuration says.
    """
    # Opening sets the libraries' logging aside for a while: one model at a time.
    with _OPENING:
        return _open(find_source(where), name, Path(tokenizer) if tokenizer else None, check)


def _open(source: Source, name: str | None, tokenizer: Path | None, check: bool) -> ResidualModel:
    facts = source.facts
    model = load_weights(source)
    tensors = {key: value.detach() for key, value in model.state_dict().items()}
    reference = None
    if check:
        with torch.no_grad(), library_errors(f"{source.path}: {facts.architecture} cannot run as configured"):
            reference = model(check_tokens(facts.d_vocab)[None]).logits[0].float()
    with _quiet():
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        with library_errors(f"{source.path}: TransformerBridge does not take this {facts.architecture}"):
            bridge = build_bridge_from_module(
                model, facts.architecture, hf_config=model.config, dtype=torch.float32, device="cpu"
            )
    bridge.eval()
    name = name or (source.path.stem if source.gguf is not None else source.path.name)
    residual = ResidualModel(bridge, facts, source, name, tokenizer, tensors)
    if reference is not None:
        check_model(residual, reference)
    return residual


@contextmanager
def _quiet() -> Iterator[None]:
    """The libraries warn about what is wanted here (raw weights, no tokenizer)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
