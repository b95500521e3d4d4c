"""The tables that steps leave as Parquet files: the declarations behind `atlas/schema.py`.

Nodes are named by a content hash and a number. Rows hold no ids of an atlas, no run and no time, so that an
artifact can be shared between atlases and is rebuilt byte for byte.
"""

from __future__ import annotations

from atlas.columns import ArtifactTable, Column, Kind
from atlas.graph import (
    DICTIONARY_COLUMNS,
    FEATURE_NORMS,
    HEAD_NUMBERS,
    MODEL_FACTS,
    READING,
    SELECTED,
    SET_COLUMNS,
    TOKEN_RANK,
    WEIGHT,
)

__all__ = ["ARTIFACT_TABLES"]

_MODEL_HASH = Column("model", Kind.NAME, "hash of the model")
_SOURCE = (
    Column("source_dictionary", Kind.NAME, "hash of the source's dictionary"),
    Column("source", Kind.INT, "number of the source in it"),
)
_TARGET = (
    Column("target_dictionary", Kind.NAME, "hash of the target's dictionary"),
    Column("target", Kind.INT, "number of the target in it"),
)
_TOKEN = (_MODEL_HASH, Column("token", Kind.INT, "the token's id in the vocabulary"))

ARTIFACT_TABLES: dict[str, ArtifactTable] = {
    table.name: table
    for table in (
        ArtifactTable("models", "Model", "The model's facts.", MODEL_FACTS),
        ArtifactTable(
            "dictionary_sets",
            "DictionarySet",
            "One row for each set.",
            (Column("model", Kind.STRING, "hash of the model"), *SET_COLUMNS),
        ),
        ArtifactTable(
            "dictionaries",
            "Dictionary",
            "One row for each dictionary.",
            (
                Column("model", Kind.STRING, "hash of the model"),
                Column("set", Kind.STRING, "name of the set"),
                Column("key", Kind.STRING, "`model/set/L08.mlp`"),
                *DICTIONARY_COLUMNS,
            ),
        ),
        ArtifactTable(
            "features",
            "Feature",
            "One row for each feature.",
            (
                Column("dictionary", Kind.NAME, "hash of the dictionary"),
                Column("number", Kind.INT, "its row in the dictionary"),
                Column("label", Kind.STRING, "a name that came with the dictionary", nullable=True),
                *FEATURE_NORMS,
            ),
        ),
        ArtifactTable(
            "labels",
            "Feature",
            "One row for each label of an import. Rank 1 fills `label`, `label_source` and `label_score`, of"
            " several imports the last one's.",
            (
                Column("dictionary", Kind.NAME, "hash of the dictionary"),
                Column("number", Kind.INT, "the feature's row in the dictionary"),
                Column("rank", Kind.SMALL_INT, "1, 2 … of a feature: by score, then as in the file"),
                Column("label", Kind.STRING, "the text"),
                Column("label_source", Kind.NAME, "who gave it"),
                Column("label_score", Kind.DOUBLE, "the score by which labels are ranked", nullable=True),
                Column("scores", Kind.STRING, "all its scores by name, as JSON", nullable=True),
                Column("author", Kind.NAME, "the model and the method that wrote it", nullable=True),
            ),
        ),
        ArtifactTable(
            "heads",
            "Head",
            "One row for each head.",
            (
                _MODEL_HASH,
                Column("layer", Kind.INT, "its layer"),
                Column("number", Kind.INT, "its number within the layer"),
            ),
        ),
        ArtifactTable(
            "tokens",
            "Token",
            "One row for each entry of the vocabulary.",
            (
                _MODEL_HASH,
                Column("number", Kind.INT, "the token's id in the vocabulary"),
                Column("text", Kind.STRING, "the token as text"),
            ),
        ),
        ArtifactTable("DIRECT", "DIRECT", "Selected direct edges.", (*_SOURCE, *_TARGET, *SELECTED)),
        ArtifactTable(
            "VIA_HEAD",
            "VIA_HEAD",
            "Selected edges through one head.",
            (*_SOURCE, *_TARGET, *SELECTED, _MODEL_HASH, *HEAD_NUMBERS),
        ),
        ArtifactTable(
            "EMBEDS",
            "EMBEDS",
            "Selected token-to-feature weights.",
            (*_TOKEN, *_TARGET, READING, WEIGHT, TOKEN_RANK),
        ),
        ArtifactTable(
            "PROMOTES",
            "PROMOTES",
            "Selected feature-to-token weights.",
            (*_SOURCE, *_TOKEN, WEIGHT, TOKEN_RANK),
        ),
    )
}
