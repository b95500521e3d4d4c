"""The atlas's nodes that weights stand between: a model's tokens and heads, a set, a dictionary's
features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from workers.pairs import READINGS
from workers.sides import DictionaryEntry
from workers.steps import Context, Done, Step
from workers.tables import repeated, write_table
from workers.vectors import Vectors

__all__ = ["dictionary_step", "model_step", "set_step"]


def _row(folder: Path, table: str, values: Mapping[str, Any]) -> None:
    write_table(folder, table, [pa.table({name: [value] for name, value in values.items()})])


def model_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """models, tokens and heads. params: name, texts (a hash of the tokens'). inputs: model, and the tokenizer
    where it is not the model's own."""
    model = Vectors(step, inputs, context).model
    facts = model.facts
    _row(
        out,
        "models",
        {
            "name": step.params["name"],
            "hash": model.hash,
            "architecture": facts.architecture,
            "n_layers": facts.n_layers,
            "d_model": facts.d_model,
            "n_heads": facts.n_heads,
            "n_kv_heads": facts.n_kv_heads,
            "d_head": facts.d_head,
            "d_mlp": facts.d_mlp,
            "d_vocab": facts.d_vocab,
            "n_ctx": facts.n_ctx,
            "parallel": facts.parallel,
            "gated": facts.gated,
            "activation": facts.activation,
            "dtype": facts.dtype,
            "facts": json.dumps(asdict(facts), sort_keys=True, default=str),
        },
    )
    texts = model.token_texts(inputs.get("tokenizer"))
    write_table(
        out,
        "tokens",
        [
            pa.table(
                {"model": repeated(model.hash, len(texts)), "number": np.arange(len(texts)), "text": texts}
            )
        ],
    )
    heads = facts.n_layers * facts.n_heads
    layer, number = np.divmod(np.arange(heads), facts.n_heads)
    write_table(
        out, "heads", [pa.table({"model": repeated(model.hash, heads), "layer": layer, "number": number})]
    )
    return Done({"tokens": len(texts), "heads": heads})


def set_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """dictionary_sets. params: model (hash), and the row's name, alias, kind, format, hash, provenance."""
    _row(
        out,
        "dictionary_sets",
        {**step.params, "provenance": json.dumps(step.params["provenance"], sort_keys=True)},
    )
    return Done()


def dictionary_step(step: Step, inputs: Mapping[str, Path], out: Path, context: Context) -> Done:
    """dictionaries and features of one dictionary. params: entry, set, key, activation. inputs: model,
    dictionaries."""
    entry = DictionaryEntry(**step.params["entry"])
    vectors = Vectors(step, inputs, context)
    dictionary = vectors.dictionary(entry)
    _row(
        out,
        "dictionaries",
        {
            "model": vectors.model.hash,
            "set": step.params["set"],
            "key": step.params["key"],
            "layer": entry.layer,
            "site": step.params["key"].rsplit("/", 1)[1].split(".", 1)[1],
            "size": dictionary.size,
            "activation": step.params["activation"],
            "reads": json.dumps({"site": dictionary.read.site, "space": str(dictionary.read.space)}),
            "writes": json.dumps(
                [{"layer": w.layer, "site": w.site, "at": str(w.at)} for w in dictionary.writes]
            ),
            "readings": ",".join(dictionary.readings),
            "hash": entry.hash,
        },
    )
    readers = vectors.readers(entry)
    size = dictionary.size
    length = {
        READINGS[readers.reading[n * size]]: readers.norms.length[n * size :][:size]
        for n in range(len(dictionary.readings))
    }
    features = {
        "dictionary": repeated(entry.hash, size),
        "number": np.arange(size),
        "label": pa.nulls(size, pa.string()),
        "write_norm": vectors.writers(entry).norms.length,
        "read_norm": length.get("in", length.get("gate")),
        "read_norm_up": length.get("up", pa.nulls(size, pa.float64())),
    }
    write_table(out, "features", [pa.table(features)])
    return Done({"features": size})
