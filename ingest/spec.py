"""The spec of a build: which models, which dictionaries, which edges to keep. YAML, checked before anything
runs.

    atlas: 1
    models: {smol: {path: …, tokenizer: …}}
    dictionaries:
      neurons: {model: smol, format: neurons, layers: all, alias: n}
      sae: {model: smol, path: …, reads: hook_resid_post, writes: hook_resid_post, layer: 5}
    edges:
      - {types: [DIRECT, VIA_HEAD], from: [neurons], to: [neurons], keep: {any: [{z: 6}, {top: 16}]}}
      - {types: [EMBEDS, PROMOTES], from: [neurons], to: [neurons], keep: {top: 16}}
    seed: 0

Paths are seen from the spec's folder; `package:NAME/FILE` is a file of an installed Python package,
`owner/name` a hub name, of dictionaries also `owner/name/sub/folder`. `reads`, `writes` and `layer` say of
a set what its files do not. Without `from` and `to` an entry means every set; without an entry for DIRECT or
VIA_HEAD both are kept by z > 6; what no entry says of EMBEDS and PROMOTES is the top 16 of each sign ({top:
0}: none). An edge is kept if any entry keeps it. `seed`: of the sample on which what was
left out is surveyed, and of the rotation of its floor. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ingest.dictionaries.layout import Declared
from ingest.errors import InputError
from ingest.places import PACKAGE, is_hub_name, resolve_place
from ingest.rules import (
    DEFAULT_RULE,
    Absolute,
    All_,
    Any_,
    Everything,
    Rule,
    Top,
    Z,
    rule_from_data,
    rule_to_data,
)
from ingest.spec_file import FEATURE_TYPES, TOKEN_TYPES, File, mistakes_of, read_file
from ingest.spec_text import Mistake, SpecError, SpecText, parse_text, read_text

__all__ = [
    "Absolute", "All_", "Any_", "DictionaryEntry", "EdgeRequest", "Everything", "Mistake", "ModelEntry",
    "Rule", "Spec", "SpecError", "TokenRequest", "Top", "Z", "load_spec", "parse_spec", "spec_for",
]  # fmt: skip

DEFAULT_TOP = 16  # tokens of each sign


@dataclass(frozen=True)
class ModelEntry:
    """A model: where it is (absolute path, or hub name) and as it was written."""

    path: str
    where: str
    tokenizer: str | None = None  # resolved like `where`


@dataclass(frozen=True)
class DictionaryEntry:
    """A set of dictionaries of one model; without a path the model's own neurons."""

    model: str
    path: str | None = None
    where: str | None = None
    format: str | None = None
    layers: str | tuple[int, ...] = "all"
    alias: str | None = None
    reads: str | None = None  # what the files do not say, as ingest.dictionaries.Declared has it
    writes: str | None = None
    layer: int | None = None

    @property
    def declared(self) -> Declared:
        """For `open_set` and `describe_set`."""
        return Declared(self.reads, self.writes, self.layer)


@dataclass(frozen=True)
class EdgeRequest:
    """Edges between features: of these types, from these sets to these, kept by this rule."""

    types: tuple[str, ...]
    from_: tuple[str, ...]
    to: tuple[str, ...]
    keep: Rule


@dataclass(frozen=True)
class TokenRequest:
    """EMBEDS into, or PROMOTES out of, these sets: for each feature the top tokens of each sign; 0 for
    none."""

    type: str
    sets: tuple[str, ...]
    top: int


@dataclass(frozen=True)
class Spec:
    """A checked spec: every reference holds, every local path exists."""

    models: Mapping[str, ModelEntry]
    dictionaries: Mapping[str, DictionaryEntry]
    edges: tuple[EdgeRequest, ...]
    tokens: tuple[TokenRequest, ...]
    seed: int = 0
    source: str = field(default="", compare=False)

    def sets_of(self, model: str) -> tuple[str, ...]:
        """The sets of one model, in the spec's order."""
        return tuple(name for name, entry in self.dictionaries.items() if entry.model == model)

    def rule(self, type: str, source: str, target: str) -> Rule | None:
        """The rule for edges of one type between two sets; None where no entry wants any."""
        if self.dictionaries[source].model != self.dictionaries[target].model:
            return None
        rules = tuple(
            dict.fromkeys(
                request.keep
                for request in self.edges
                if type in request.types and source in request.from_ and target in request.to
            )
        )
        return None if not rules else rules[0] if len(rules) == 1 else Any_(rules)

    def top(self, type: str, name: str) -> int:
        """How many tokens of each sign EMBEDS or PROMOTES keeps for each feature of a set."""
        return sum(request.top for request in self.tokens if request.type == type and name in request.sets)

    def canonical(self) -> dict[str, Any]:
        """The spec as plain data with every default written out and paths absolute: itself a spec."""
        models: dict[str, Any] = {}
        for name, model in self.models.items():
            models[name] = {"path": model.path if model.path.startswith(PACKAGE) else model.where}
            if model.tokenizer:
                models[name]["tokenizer"] = model.tokenizer
        dictionaries: dict[str, Any] = {}
        for name, entry in self.dictionaries.items():
            packaged = entry.path is not None and entry.path.startswith(PACKAGE)
            values = {
                "model": entry.model,
                "path": entry.path if packaged else entry.where,
                "format": entry.format,
                "layers": entry.layers if isinstance(entry.layers, str) else list(entry.layers),
                "alias": entry.alias,
                "reads": entry.reads,
                "writes": entry.writes,
                "layer": entry.layer,
            }
            dictionaries[name] = {key: value for key, value in values.items() if value is not None}
        edges: list[dict[str, Any]] = [
            {
                "types": list(request.types),
                "from": list(request.from_),
                "to": list(request.to),
                "keep": rule_to_data(request.keep),
            }
            for request in self.edges
        ]
        for token in self.tokens:
            side = "to" if token.type == "EMBEDS" else "from"
            edges.append({"types": [token.type], side: list(token.sets), "keep": {"top": token.top}})
        return {
            "atlas": 1,
            "models": models,
            "dictionaries": dictionaries,
            "edges": edges,
            "corpora": {},
            "runs": {},
            "seed": self.seed,
        }

    def to_yaml(self) -> str:
        """`canonical` as text, for the file that a build leaves in the atlas."""
        return yaml.safe_dump(self.canonical(), sort_keys=False, allow_unicode=True, width=110)


def load_spec(path: str | Path) -> Spec:
    """The spec of a file. Raises SpecError with every mistake, InputError where there is no YAML to speak
    of."""
    path = Path(path)
    return parse_spec(read_text(path), source=str(path), base=path.resolve().parent)


def parse_spec(text: str, *, source: str = "spec", base: Path | None = None) -> Spec:
    """The spec of a text; `base` is the folder from which its paths are seen (default: the working
    folder)."""
    return _checked(parse_text(text, source), base or Path.cwd())


def spec_for(
    model: str,
    dictionaries: Sequence[str] = ("neurons",),
    *,
    tokenizer: str | None = None,
    keep: Rule = DEFAULT_RULE,
    base: Path | None = None,
) -> Spec:
    """The spec of `atlas build --model MODEL --dictionaries …`: every layer, every pair of sets, one rule.

    `dictionaries` are paths, hub names or the word "neurons". Names come from the last part of each path.
    Raises InputError.
    """
    base = base or Path.cwd()
    name = _name_of(model, base, taken=())
    sets: dict[str, Any] = {}
    for given in dictionaries:
        own = given == "neurons"
        entry = {"model": name, "format": "neurons", "alias": "n"} if own else {"model": name, "path": given}
        sets[given if own else _name_of(given, base, taken=sets)] = entry
    data = {
        "atlas": 1,
        "models": {name: {"path": model} | ({"tokenizer": tokenizer} if tokenizer else {})},
        "dictionaries": sets,
        "edges": [{"types": list(FEATURE_TYPES), "keep": rule_to_data(keep)}],
    }
    return _checked(SpecText("--model and --dictionaries", data, {}, ()), base)


def _name_of(place: str, base: Path, taken: Any) -> str:
    """A name from a path: its last part, without what a name may not hold, and unlike the names taken."""
    path = Path(place) if place.startswith(PACKAGE) or is_hub_name(place) else (base / place).resolve()
    stem = path.stem if path.suffix.lower() == ".gguf" else path.name
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("_.-") or "set"
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def _checked(text: SpecText, base: Path) -> Spec:
    file, mistakes = read_file(text)
    mistakes += mistakes_of(text)
    places: dict[tuple[str, str, str], str] = {}
    for section, key in (("models", "path"), ("models", "tokenizer"), ("dictionaries", "path")):
        entries = text.data.get(section) if isinstance(text.data, dict) else None
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            written = entry.get(key) if isinstance(entry, dict) else None
            if isinstance(written, str):
                try:
                    places[section, str(name), key] = resolve_place(
                        written, base, folders=section == "dictionaries"
                    )
                except InputError as error:
                    mistakes.append(text.mistake((section, str(name), key), str(error)))
    if file is None or mistakes:
        raise SpecError(text.source, mistakes)
    return _spec(file, places, text.source)


def _spec(file: File, places: Mapping[tuple[str, str, str], str], source: str) -> Spec:
    models = {
        name: ModelEntry(
            entry.path, places["models", name, "path"], places.get(("models", name, "tokenizer"))
        )
        for name, entry in file.models.items()
    }
    dictionaries = {
        name: DictionaryEntry(
            model=entry.model,
            path=entry.path,
            where=places.get(("dictionaries", name, "path")),
            format=entry.format,
            layers=entry.layers,
            alias=entry.alias,
            reads=entry.reads,
            writes=entry.writes,
            layer=entry.layer,
        )
        for name, entry in file.dictionaries.items()
    }
    every = tuple(dictionaries)
    edges: list[EdgeRequest] = []
    tokens: list[TokenRequest] = []
    for entry in file.edges:
        from_, to = entry.from_ or every, entry.to or every
        if set(entry.types) <= set(FEATURE_TYPES):
            rule = DEFAULT_RULE if entry.keep is None else rule_from_data(entry.keep)
            edges.append(EdgeRequest(entry.types, from_, to, rule))
        else:
            top = DEFAULT_TOP if entry.keep is None else entry.keep["top"]
            tokens += [TokenRequest(type, to if type == "EMBEDS" else from_, top) for type in entry.types]
    for type in TOKEN_TYPES:
        said = {name for request in tokens if request.type == type for name in request.sets}
        if rest := tuple(name for name in every if name not in said):
            tokens.append(TokenRequest(type, rest, DEFAULT_TOP))
    return Spec(
        models=models,
        dictionaries=dictionaries,
        edges=tuple(edges) or (EdgeRequest(FEATURE_TYPES, every, every, DEFAULT_RULE),),
        tokens=tuple(tokens),
        seed=file.seed,
        source=source,
    )
