"""The tensors of a Hugging Face directory: safetensors (one file or several), or torch's own format read
without executing code."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingest.errors import InputError
from ingest.models.libraries import library_errors, one_line

__all__ = ["load_weights", "read_directory"]

Reader = Callable[[], torch.Tensor]


def read_directory(path: Path) -> dict[str, Reader]:
    """Name in the checkpoint -> a call that reads that tensor, in the file's own type.

    Raises InputError for a missing, empty or damaged file, and for an index that names what is not there.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index, single = path / f"{stem}.index.json", path / stem
        if index.is_file():
            return _indexed(index)
        if single.is_file():
            return _file(single)
    raise InputError(f"{path}: no weights; expected model.safetensors, its index, or pytorch_model.bin")


def _indexed(index: Path) -> dict[str, Reader]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{index}: cannot be read as an index of weights ({error})") from None
    found: dict[str, Reader] = {}
    for shard in sorted(set(weight_map.values())):
        file = index.parent / shard
        if file.parent != index.parent or not file.is_file():
            raise InputError(f"{index}: names {shard}, which is not in {index.parent}")
        found |= _file(file)
    if missing := sorted(weight_map.keys() - found.keys()):
        raise InputError(f"{index}: names {missing[0]} (and {len(missing) - 1} more), which no file holds")
    return found


def _file(path: Path) -> dict[str, Reader]:
    return _safetensors(path) if path.suffix == ".safetensors" else _torch(path)


def _safetensors(path: Path) -> dict[str, Reader]:
    from safetensors import SafetensorError, safe_open

    try:
        handle: Any = safe_open(path, "pt")
        names = list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: damaged, truncated or empty: {error}") from None
    return {name: partial(handle.get_tensor, name) for name in names}


def _torch(path: Path) -> dict[str, Reader]:
    import pickle

    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise InputError(f"{path}: cannot be read as weights alone: {one_line(error)}") from None
    if not isinstance(stored, dict) or not all(isinstance(one, torch.Tensor) for one in stored.values()):
        raise InputError(f"{path}: expected a mapping of names to tensors")
    return {name: partial(_itself, tensor) for name, tensor in stored.items()}


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def load_weights(source: Any) -> torch.nn.Module:
    """The Hugging Face model of a Source, float32, eager attention, eval: every tensor of the checkpoint
    placed and no other used.

    Libraries fill a tensor that is missing with random numbers and only warn. So names and shapes are
    compared here first. Raises InputError naming the tensor: missing, left over, of the wrong shape, or
    with a value that is not finite.
    """
    import transformers

    config = source.config
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with library_errors(f"{source.path}: transformers refuses this configuration"), torch.device("meta"):
        skeleton = model_class(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    tied = set(getattr(skeleton, "_tied_weights_keys", None) or ())
    readers = source.tensors(wanted, skeleton.base_model_prefix)
    optional = tied if getattr(config, "tie_word_embeddings", False) else set()
    if missing := sorted(wanted.keys() - readers.keys() - optional):
        raise InputError(f"{source.path}: tensor {_named(missing)} missing; the configuration needs it")
    if left := sorted(readers.keys() - wanted.keys()):
        raise InputError(f"{source.path}: tensor {_named(left)} left over; the model has no place for it")
    state = {name: _checked(source.path, name, wanted[name], read()) for name, read in readers.items()}
    # The flag may claim what the tensors deny: the tensors decide.
    for name in tied & state.keys():
        embedding = skeleton.get_input_embeddings().weight
        places = skeleton.state_dict(keep_vars=True).items()
        stored = next(key for key, value in places if value is embedding)
        if not torch.equal(state[name], state[stored]):
            config.tie_word_embeddings = False
    verbosity = transformers.logging.get_verbosity()
    progress = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with library_errors(f"{source.path}: transformers cannot place the weights"):
            model = model_class.from_pretrained(
                None, config=config, state_dict=state, dtype=torch.float32, attn_implementation="eager"
            )
    finally:
        transformers.logging.set_verbosity(verbosity)
        if progress:
            transformers.logging.enable_progress_bar()
    for name, tensor in model.state_dict().items():
        if name in state and not torch.equal(tensor, state[name]):
            raise InputError(f"{source.path}: tensor {name} was changed by transformers on loading")
    return model.eval().requires_grad_(False)


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _checked(path: Path, name: str, shape: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise InputError(
            f"{path}: tensor {name} has shape {tuple(tensor.shape)}; the configuration needs {shape}"
        )
    if not tensor.dtype.is_floating_point:
        raise InputError(f"{path}: tensor {name} is {tensor.dtype}; expected floating point (not quantised)")
    tensor = tensor.to(torch.float32)
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{path}: tensor {name} holds NaN or infinity")
    return tensor
