"""The shape of a spec's YAML, by pydantic, and what pydantic cannot see: references between its sections."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ingest.errors import near
from ingest.rules import RuleMistakes, rule_from_data
from ingest.spec_text import Mistake, Place, SpecText

__all__ = ["FEATURE_TYPES", "TOKEN_TYPES", "File", "Name", "layers_of", "mistakes_of", "read_file"]

FEATURE_TYPES = ("DIRECT", "VIA_HEAD")
TOKEN_TYPES = ("EMBEDS", "PROMOTES")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ALIAS = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z_])?")
_RANGE = re.compile(r"(\d+)-(\d+)")


# --- values -------------------------------------------------------------------------------------------------


def _name(value: Any) -> Any:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"expected a name of letters, digits, _ . and -, found {value!r}")
    return value


def _alias(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or not _ALIAS.fullmatch(value)):
        # The layer's number follows it, as in tc8[355].
        raise ValueError(f"expected letters, digits and _, a letter first and no digit last, found {value!r}")
    return value


def layers_of(value: Any) -> Any:
    """all, 5, [0, 1, 5], 0-5, [0-5, 8] as "all" or a tuple, ascending."""
    if value == "all":
        return value
    chosen: set[int] = set()
    for item in value if isinstance(value, list) else [value]:
        match = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if match and int(match[1]) <= int(match[2]) < 10_000:
            chosen |= set(range(int(match[1]), int(match[2]) + 1))
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            chosen.add(item)
        else:
            raise ValueError(f"expected all, a layer (5), layers (0-11) or a list of these, found {value!r}")
    if not chosen:
        raise ValueError("expected all, or at least one layer, found an empty list")
    return tuple(sorted(chosen))


def _one_or_more(value: Any) -> Any:
    """One word may stand for a list of one; lists become tuples."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _empty(value: Any) -> Any:
    if value not in (None, {}, []):
        raise ValueError("is not read by this version, which maps weights; leave it empty ({}) or out")
    return {}


def _keep(value: Any) -> Any:
    if value is not None and not _is_token_top(value):
        rule_from_data(value)
    return value


def _is_token_top(value: Any) -> bool:
    """{top: 0} is a rule for tokens only, and judged with the entry's types."""
    return (
        isinstance(value, dict) and set(value) == {"top"} and value["top"] == 0 and value["top"] is not False
    )


# --- sections -----------------------------------------------------------------------------------------------

Name = Annotated[str, BeforeValidator(_name)]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_more), Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=False)


class ModelSection(_Section):
    path: str
    tokenizer: str | None = None


class DictionarySection(_Section):
    model: str
    path: str | None = None
    format: str | None = None
    layers: Annotated[Any, BeforeValidator(layers_of)] = "all"
    alias: Annotated[Any, BeforeValidator(_alias)] = None
    reads: str | None = None
    writes: str | None = None
    layer: Annotated[int, Field(ge=0)] | None = None


class EdgeSection(_Section):
    types: Annotated[
        tuple[Literal["DIRECT", "VIA_HEAD", "EMBEDS", "PROMOTES"], ...],
        BeforeValidator(_one_or_more),
        Field(min_length=1),
    ]
    from_: Annotated[Names | None, Field(alias="from")] = None
    to: Names | None = None
    keep: Annotated[Any, BeforeValidator(_keep)] = None


class File(_Section):
    atlas: Literal[1]
    models: Annotated[dict[Name, ModelSection], Field(min_length=1)]
    dictionaries: Annotated[dict[Name, DictionarySection], Field(min_length=1)]
    edges: list[EdgeSection] = []
    corpora: Annotated[dict[str, Any], BeforeValidator(_empty)] = {}
    runs: Annotated[dict[str, Any], BeforeValidator(_empty)] = {}
    seed: Annotated[int, Field(ge=0)] = 0


_SECTIONS: dict[Place, type[BaseModel]] = {
    (): File,
    ("models", "*"): ModelSection,
    ("dictionaries", "*"): DictionarySection,
    ("edges", "*"): EdgeSection,
}
_EXPECTED = {
    "atlas": "atlas: 1",
    "models": "one model or more, NAME: {path: …}",
    "dictionaries": "one set or more, NAME: {model: …, path: …} or NAME: {model: …, format: neurons}",
    "path": "where the model is",
    "model": "the name of a model of this spec",
    "types": f"some of {', '.join(FEATURE_TYPES + TOKEN_TYPES)}",
}
_KINDS = {
    "string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "finite_number": "a finite number",
    "list_type": "a list", "tuple_type": "a list",
    "dict_type": "names with values", "model_type": "keys with values",
}  # fmt: skip


def read_file(text: SpecText) -> tuple[File | None, list[Mistake]]:
    """The file by its shape, or None and all that is wrong with it."""
    mistakes = list(text.twice)
    if not isinstance(text.data, dict):
        return None, [
            *mistakes,
            text.mistake((), "expected a spec that begins with atlas: 1 and names models"),
        ]
    try:
        return File.model_validate(text.data), mistakes
    except ValidationError as error:
        for item in error.errors(include_url=False):
            mistakes += _told(text, item)
        return None, mistakes


def _told(text: SpecText, item: Any) -> list[Mistake]:
    place: Place = tuple(part for part in item["loc"] if part != "[key]")
    kind, found, context = item["type"], item.get("input"), item.get("ctx", {})
    last = str(place[-1]) if place else ""
    if isinstance(context.get("error"), RuleMistakes):
        return [text.mistake((*place, *inner), said) for inner, said in context["error"].mistakes]
    if kind == "value_error":
        return [text.mistake(place, str(context["error"]))]
    if kind == "missing":
        return [text.mistake(place, f"is missing; expected {_EXPECTED.get(last, 'a value')}")]
    if kind == "extra_forbidden":
        level = place[:-1] if len(place) < 2 else (place[0], "*")
        fields = _SECTIONS[level].model_fields
        return [
            text.mistake(place, f"unknown key{near(last, [f.alias or name for name, f in fields.items()])}")
        ]
    if place == ("atlas",):
        newer = isinstance(found, int) and found > 1
        hint = "; it was written for a newer version of this program" if newer else ""
        return [text.mistake(place, f"expected 1, found {found!r}{hint}")]
    if kind == "literal_error":
        return [text.mistake(place, f"unknown edge type {found!r}{near(found, FEATURE_TYPES + TOKEN_TYPES)}")]
    if kind in ("too_short", "model_type", "dict_type") and last in _EXPECTED:
        return [text.mistake(place, f"expected {_EXPECTED[last]}, found {found if found else 'nothing'!r}")]
    if kind == "too_short":
        return [text.mistake(place, "expected at least one, found an empty list")]
    if kind in ("greater_than_equal", "less_than_equal"):
        bounds = "0 or more"
        return [text.mistake(place, f"expected a number of {bounds}, found {found!r}")]
    return [text.mistake(place, f"expected {_KINDS.get(kind, item['msg'])}, found {found!r}")]


# --- references ---------------------------------------------------------------------------------------------


def mistakes_of(text: SpecText) -> list[Mistake]:
    """What names something that is not there, by the raw data: told even where something else is wrong
    too."""
    data = text.data if isinstance(text.data, dict) else {}
    models = {str(name) for name in _mapping(data.get("models"))}
    sets = {str(name): entry for name, entry in _mapping(data.get("dictionaries")).items()}
    mistakes: list[Mistake] = []
    aliases: dict[tuple[Any, Any], str] = {}
    for name, entry in sets.items():
        entry = _mapping(entry)
        place: Place = ("dictionaries", name)
        model = entry.get("model")
        if isinstance(model, str) and model not in models:
            mistakes.append(
                text.mistake((*place, "model"), f"no model {model!r} in this spec{near(model, models)}")
            )
        own = entry.get("format") == "neurons"
        if own and entry.get("path") is not None:
            mistakes.append(
                text.mistake((*place, "path"), "format neurons reads the model itself; leave path out")
            )
        for key in ("reads", "writes", "layer"):
            if own and entry.get(key) is not None:
                mistakes.append(
                    text.mistake((*place, key), f"neurons have their own {key}; expected to be left out")
                )
        if entry and not own and entry.get("path") is None:
            mistakes.append(
                text.mistake(place, "expected path, or format: neurons for the model's own neurons")
            )
        alias = str(entry.get("alias"))
        if entry.get("alias") is not None and (first := aliases.setdefault((model, alias), name)) != name:
            why = f"{alias!r} is already the alias of {first}; expected another"
            mistakes.append(text.mistake((*place, "alias"), why))
    edges = data.get("edges")
    said: dict[tuple[str, str], int] = {}
    for index, entry in enumerate(edges if isinstance(edges, list) else []):
        if isinstance(entry, dict):
            mistakes += _edge_mistakes(text, index, entry, sets, said)
    return mistakes


def _edge_mistakes(
    text: SpecText, index: int, entry: dict[str, Any], sets: dict[str, Any], said: dict[tuple[str, str], int]
) -> list[Mistake]:
    place: Place = ("edges", index)
    mistakes: list[Mistake] = []
    ends: dict[str, list[str]] = {}
    for side in ("from", "to"):
        named = _one_or_more(entry.get(side))
        ends[side] = (
            [name for name in named if isinstance(name, str)] if isinstance(named, tuple) else list(sets)
        )
        for name in ends[side]:
            if name not in sets:
                mistakes.append(
                    text.mistake((*place, side), f"no dictionary set {name!r} in this spec{near(name, sets)}")
                )
    types = _one_or_more(entry.get("types"))
    types = [type for type in types if isinstance(type, str)] if isinstance(types, tuple) else []
    tokens = [type for type in types if type in TOKEN_TYPES]
    features = [type for type in types if type in FEATURE_TYPES]
    if tokens and features:
        why = f"{' and '.join(tokens)} keep {{top: n}} of each sign; expected an entry of their own for them"
        return [*mistakes, text.mistake((*place, "types"), why)]
    if features and not mistakes:
        owners = {side: {_mapping(sets[name]).get("model") for name in names} for side, names in ends.items()}
        if not owners["from"] & owners["to"]:
            mistakes.append(text.mistake(place, "from and to share no model; expected sets of one model"))
        if _is_token_top(entry.get("keep")):
            mistakes.append(
                text.mistake((*place, "keep", "top"), "expected a whole number of 1 or more, found 0")
            )
    if tokens:
        mistakes += _token_mistakes(text, place, entry, tokens, ends, said)
    return mistakes


def _token_mistakes(
    text: SpecText,
    place: Place,
    entry: dict[str, Any],
    types: list[str],
    ends: dict[str, list[str]],
    said: dict[tuple[str, str], int],
) -> list[Mistake]:
    mistakes: list[Mistake] = []
    keep = entry.get("keep")
    top = keep.get("top") if isinstance(keep, dict) and set(keep) == {"top"} else None
    if keep is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 0):
        mistakes.append(
            text.mistake(
                (*place, "keep"), f"expected {{top: n}}, tokens of each sign, for {types[0]}, found {keep!r}"
            )
        )
    for type, side, other in (("EMBEDS", "to", "from"), ("PROMOTES", "from", "to")):
        if type not in types:
            continue
        if types == [type] and entry.get(other) is not None:
            mistakes.append(text.mistake((*place, other), f"{type} has tokens there; expected {side} alone"))
        for name in ends[side]:
            first = said.setdefault((type, name), int(place[1]))
            if first != place[1]:
                mistakes.append(text.mistake(place, f"{type} of {name} is already said by edges[{first}]"))
    return mistakes


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}
