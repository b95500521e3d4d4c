"""Feature dictionaries of any format as one type, one for each layer read. Functions on tensors: `.encode`.

Importing this imports no torch: headers answer `describe_set`.
"""

from ingest.dictionaries.formats import formats
from ingest.dictionaries.layout import Declared, Format, Layers, Layout
from ingest.dictionaries.sets import DictionarySet, describe_set, dictionary_key, open_set
from ingest.dictionaries.types import (
    At,
    Dictionary,
    Encoder,
    Gate,
    Gated,
    GatedMLP,
    GroupMax,
    InputNorm,
    JumpReLU,
    LayerNormInput,
    Pointwise,
    Read,
    ReLU,
    RescaledInput,
    ScalarThreshold,
    Space,
    TopK,
    Write,
)

__all__ = [
    "At",
    "Declared",
    "Dictionary",
    "DictionarySet",
    "Encoder",
    "Format",
    "Gate",
    "Gated",
    "GatedMLP",
    "GroupMax",
    "InputNorm",
    "JumpReLU",
    "LayerNormInput",
    "Layers",
    "Layout",
    "Pointwise",
    "ReLU",
    "Read",
    "RescaledInput",
    "ScalarThreshold",
    "Space",
    "TopK",
    "Write",
    "describe_set",
    "dictionary_key",
    "formats",
    "open_set",
]  # fmt: skip
