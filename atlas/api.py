"""An atlas in Python.

    import atlas
    with atlas.open("demo.atlas") as a:
        neuron = a.feature("n8[355]")
        neuron.promotes()
        neuron.upstream(limit=5).to_pandas()
        a.query("MATCH (f:Feature) WHERE f.layer = $l RETURN f.key LIMIT 3", {"l": 8}).rows

Every method answers with a `Table` or an `Answer`; both show themselves in a notebook and at the prompt. The
command line prints the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas import lookups
from atlas.answers import Answer, Table, brief
from atlas.errors import AtlasError
from atlas.keys import (
    DictionaryName,
    dictionaries,
    find_tokens,
    looks_like_feature,
    resolve_feature,
    short_form,
)
from atlas.lookups import FEATURE_TYPES
from atlas.store import Store, open_store
from atlas.store.limit import limited

if TYPE_CHECKING:
    import networkx as nx

    from atlas.svg import Picture

__all__ = ["Atlas", "Feature", "open"]


def open(path: str | Path, *, memory: int | None = None) -> Atlas:
    """Opens an atlas for reading.

    memory: bytes of the database's buffers. Raises AtlasError where there is none, or nothing is loaded in
    it.
    """
    return Atlas(open_store(path, memory=memory))


class Atlas:
    """An open atlas. It stays at the generation that was current when it was opened, until `close`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def uri(self) -> str:
        """Where it is."""
        return self.store.uri

    def __repr__(self) -> str:
        return f"Atlas {self.uri}: {', '.join(sorted({d.model for d in self.dictionaries})) or 'empty'}"

    def __enter__(self) -> Atlas:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self.store.close()

    @cached_property
    def dictionaries(self) -> list[DictionaryName]:
        """Every dictionary of the atlas, by key."""
        return dictionaries(self.store)

    def feature(self, key: str) -> Feature:
        """The feature of a key, whole (`model/set/L08.mlp/355`) or short (`n8[355]`, `L8M355`).

        Raises AtlasError: with the candidates where several fit, with the nearest where none does.
        """
        dictionary, number = resolve_feature(key, self.dictionaries)
        rows = self.store.query(
            "MATCH (f:Feature) WHERE f.key = $key RETURN f", {"key": f"{dictionary.key}/{number}"}
        ).rows
        if not rows:
            raise AtlasError(f"{dictionary.key}/{number}: not in the database; load the atlas again")
        return Feature(self, rows[0][0], short_form(dictionary, number))

    def features(self, keys: Sequence[str]) -> list[Feature]:
        """Several features."""
        return [self.feature(key) for key in keys]

    def edges(
        self,
        key: str,
        direction: str = "down",
        *,
        types: Sequence[str] = FEATURE_TYPES,
        by: str = "weight",
        limit: int | None = 20,
        via: str | None = None,
        layer: int | None = None,
    ) -> Table:
        """The strongest edges out of a feature ("down") or into it ("up").

        types: of DIRECT, VIA_HEAD; by: "weight" or "z"; via: only through one head, `L.H`; layer: only
        neighbours of one layer; limit: None for all. Raises AtlasError.
        """
        node = self.feature(key).properties
        return lookups.neighbours(
            self.store, node, direction, types=types, by=by, limit=limit, via=via, layer=layer
        )

    def search(self, token: str, limit: int = 10) -> Answer:
        """The features that a token's embedding feeds and the features that promote the token.

        token: its text, alone or with a space before it, or `#` and its id. Raises AtlasError with the
        nearest tokens.
        """
        return lookups.search_answer(self.store, token, limit)

    def search_labels(self, text: str, limit: int = 10) -> Answer:
        """The features whose label has a text in it, whatever its case, best score first."""
        return lookups.labelled_answer(self.store, text, limit)

    def labels(self, key: str | None = None) -> Table:
        """The imports of labels; with a feature's key, every label of that feature. Raises AtlasError."""
        from atlas.labels import imports, labels_of_feature

        return imports(self) if key is None else labels_of_feature(self, key)

    def head(self, key: str, limit: int = 20, *, by: str = "weight") -> Answer:
        """A head's strongest pairs, by "weight" or "z", and its share by source and target layer.

        key: `L.H`.
        """
        return lookups.head_answer(self.store, key, limit, by)

    def query(
        self,
        cypher: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        limit: int | None = None,
    ) -> Table:
        """The answer to a reading Cypher query.

        timeout: seconds. limit: rows at most, with a note where there were more. Raises AtlasError.
        """
        bounded = limited(cypher, limit + 1) if limit is not None else cypher
        result = self.store.query(bounded, parameters, timeout=timeout)
        if limit is None or len(result) <= limit:
            return Table(result.columns, result.rows)
        return Table(
            result.columns,
            result.rows[:limit],
            notes=(f"the first {limit:,} rows; there are more (--limit)",),
        )

    def info(self) -> Answer:
        """What the atlas holds: models, sets, counts, sizes, runs."""
        from atlas.inventory import info

        return info(self.store)

    def dropped(self) -> Answer:
        """What the selection of edges dropped, by pairs of layers and by heads."""
        from atlas.inventory import dropped

        return dropped(self.store)

    def runs(self) -> Table:
        """The runs that made it."""
        from atlas.inventory import runs

        return runs(self.uri)

    def paths(
        self,
        source: str,
        target: str,
        k: int = 5,
        *,
        hops: tuple[int, int] = (1, 3),
        types: Sequence[str] = FEATURE_TYPES,
    ) -> Answer:
        """The k strongest paths, by the product of their weights' sizes, between tokens or features.

        source, target: a token's text or a feature's key. hops: the fewest and most DIRECT or VIA_HEAD edges;
        a token adds its EMBEDS or PROMOTES edge. The product is input-invariant: what could flow, not what
        caused anything.
        """
        from atlas.routes import paths_answer

        return paths_answer(self, source, target, k, hops, types)

    def picture(self) -> Picture:
        """A heat map: edges by source and target layer, and by layer and head. Shows itself in a notebook."""
        from atlas.overview import overview

        return overview(self.store)

    def export(self, out: str | Path, **options: Any) -> Answer:
        """Writes the atlas, a neighbourhood or a selection as Parquet, CSV or GraphML: see
        `atlas.export.export`.
        """
        from atlas.export import export

        return export(self, Path(out), **options)

    def to_networkx(self, around: str | None = None, **options: Any) -> nx.MultiDiGraph:
        """The atlas, or a part of it, as a networkx graph: nodes by key, edges with their `type`.

        around and options: see `atlas.selection.select`. Needs networkx.
        """
        from atlas.networks import to_networkx

        return to_networkx(self, around=around, **options)

    def ends(self, text: str) -> tuple[str, list[tuple[int, str]]]:
        """What an end of a path means: ("feature" or "token", [(id, text)]). Raises AtlasError."""
        if looks_like_feature(text):
            feature = self.feature(text)
            return "feature", [(feature.id, feature.key)]
        return "token", [(token.id, token.text) for token in find_tokens(text, self.store)]


class Feature:
    """A feature: its properties as attributes, its neighbours as tables."""

    def __init__(self, atlas: Atlas, properties: dict[str, Any], short: str | None = None) -> None:
        self._atlas = atlas
        self.properties = properties
        self.short = short

    id: int
    key: str
    layer: int
    number: int

    def __getattr__(self, name: str) -> Any:
        from atlas.schema import NODES

        if name in self.__dict__.get("properties", {}):
            return self.properties[name]
        if name in {column.name for column in NODES["Feature"].columns}:
            return None  # a property without a value: no corpus was harvested, no label given
        raise AttributeError(f"Feature has no {name}")

    def __repr__(self) -> str:
        label = f": {brief(self.label)}" if self.label else ""
        return f"Feature {self.key}{f' ({self.short})' if self.short else ''}{label}"

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()

    def edges(self, direction: str = "down", **options: Any) -> Table:
        """Like `Atlas.edges`."""
        return lookups.neighbours(self._atlas.store, self.properties, direction, **options)

    def upstream(self, limit: int | None = 20, **options: Any) -> Table:
        """The strongest edges into it."""
        return self.edges("up", limit=limit, **options)

    def downstream(self, limit: int | None = 20, **options: Any) -> Table:
        """The strongest edges out of it."""
        return self.edges("down", limit=limit, **options)

    def embeds(self, limit: int = 10) -> dict[str, Table]:
        """De-embedding: the tokens that it reads highest and lowest, by reading (in, or gate and up)."""
        return lookups.embeds(self._atlas.store, self.properties, limit)

    def promotes(self, limit: int = 10) -> Table:
        """The tokens whose logits it raises and lowers most."""
        return lookups.promotes(self._atlas.store, self.properties, limit)

    def picture(
        self, up: int = 10, down: int = 10, *, by: str = "weight", types: Sequence[str] = FEATURE_TYPES
    ) -> Picture:
        """Its tokens and its strongest neighbours as an SVG, which shows itself in a notebook.

        up, down: edges at most; by: "weight" or "z"; see `atlas.picture.neighbourhood`. Raises AtlasError.
        """
        from atlas.picture import neighbourhood

        return neighbourhood(self._atlas, self, up, down, by, types)

    def page(self, limit: int = 10) -> Answer:
        """All of it: properties, tokens, the strongest neighbours on both sides."""
        facts = {name: value for name, value in self.properties.items() if name not in ("_label", "step")}
        tables = {f"embeds_{reading}": table for reading, table in self.embeds(limit).items()}
        tables |= {
            "promotes": self.promotes(limit),
            "upstream": self.upstream(limit),
            "downstream": self.downstream(limit),
        }
        return Answer(repr(self), facts, tables)
