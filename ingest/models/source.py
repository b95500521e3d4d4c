"""Where a model comes from: a Hugging Face directory, a hub name or a GGUF file, as one Source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.errors import InputError
from ingest.models.architectures import read_facts
from ingest.models.facts import Facts
from ingest.models.gguf_file import GGUFFile
from ingest.models.gguf_models import gguf_config, gguf_names, gguf_tensor
from ingest.models.libraries import library_errors, one_line
from ingest.places import is_hub_name, resolve_place

if TYPE_CHECKING:
    import torch

__all__ = ["Source", "describe_model", "find_source"]

_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt"]
# Constants that older libraries saved with the weights.
_CONSTANTS = re.compile(r"(\.attn|\.attention|\.attn\.attention)\.(bias|masked_bias)$|\.inv_freq$")
# Image-and-text models: their language model is read, the tensors of the other senses are not.
_WITH_IMAGES = ("gemma3",)
_OTHER_SENSES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
_LANGUAGE = re.compile(r"^(model\.)?language_model\.")
_MOST_LAYERS = 10_000  # beyond this building the model's outline would go on for hours
# Names on disk that transformers gives another name in the model.
_RENAMED = {"embed_out.weight": "lm_head.weight"}


@dataclass(frozen=True)
class Source:
    """A model on disk. `config` is transformers' configuration object."""

    path: Path  # the directory or the file
    config: Any
    dtype: str
    gguf: GGUFFile | None
    with_images: bool = False  # the configuration is the language model's, the checkpoint holds more

    @property
    def facts(self) -> Facts:
        return read_facts(self.config, self.dtype, self.path)

    def tensors(
        self, wanted: Mapping[str, tuple[int, ...]], prefix: str
    ) -> dict[str, Callable[[], torch.Tensor]]:
        """Hugging Face's name -> a call that reads the tensor, for every tensor that the checkpoint holds
        (saved constants apart). `prefix`: the base model's, which some checkpoints leave out."""
        if self.gguf is not None:
            return _gguf_tensors(self.gguf, wanted)
        from ingest.models.checkpoint import read_directory

        stored = read_directory(self.path)
        found = {}
        for name, read in stored.items():
            if self.with_images:
                if _OTHER_SENSES.match(name):
                    continue
                name = _LANGUAGE.sub("", name)
            if name not in wanted:
                if f"{prefix}.{name}" in wanted:
                    name = f"{prefix}.{name}"
                elif _RENAMED.get(name) in wanted:
                    name = _RENAMED[name]
                elif _CONSTANTS.search(name):
                    continue
            found[name] = read
        return found


def _gguf_tensors(file: GGUFFile, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Callable]:
    import torch

    def reader(stored: str) -> Callable[[], torch.Tensor]:
        return lambda: torch.from_numpy(gguf_tensor(file, stored))

    return {name: reader(stored) for name, stored in gguf_names(file, wanted).items()}


def describe_model(where: str | Path) -> Facts:
    """A model's facts from its configuration alone (config.json, or a GGUF file's metadata); no weights.

    Raises InputError for what cannot be found or read, and for an architecture that is refused, with the
    reason.
    """
    return find_source(where, weights=False).facts


def find_source(where: str | Path, *, weights: bool = True) -> Source:
    """The source that `where` names: a path, `package:NAME/FILE`, or a hub name (fetched into the hub's own
    cache; the configuration alone where `weights` is false)."""
    place = resolve_place(str(where))
    path = Path(place)
    if not path.exists() and is_hub_name(place):
        path = _from_hub(place, weights)
    if path.is_file():
        file = GGUFFile(path)
        return Source(path, _config(path, gguf_config(file)), file.dtype, file)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"{path}: no config.json; expected a Hugging Face model directory or a GGUF file")
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{config_file}: cannot be read as JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(f"{config_file}: has no model_type; expected a Hugging Face configuration")
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    language = values.get("text_config")
    if values["model_type"] in _WITH_IMAGES and isinstance(language, dict) and "model_type" in language:
        if "tie_word_embeddings" in values:
            language = {"tie_word_embeddings": values["tie_word_embeddings"]} | language
        return Source(path, _config(config_file, language), dtype, None, with_images=True)
    return Source(path, _config(config_file, values), dtype, None)


def _config(where: Path, values: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = dict(values)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise InputError(f"{where}: model_type {model_type!r} is not known to the transformers library")
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(layers := values.get(key), int) and layers > _MOST_LAYERS:
            raise InputError(f"{where}: {key} is {layers}; a damaged configuration")
    refused = f"{where}: transformers refuses this configuration"
    try:
        with library_errors(refused):
            return AutoConfig.for_model(model_type, **values)
    except StrictDataclassError as error:
        raise InputError(f"{refused}: {one_line(error)}") from error


def _from_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = _HUB_FILES if weights else ["config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(f"{name}: cannot be fetched from the hub: {one_line(error)}") from error
