"""Names that people write, as nodes of the atlas: features, heads, tokens.

A feature: its key (`smol/neurons/L08.mlp/355`), the end of it (`L08.mlp/355`), or a short form: `n8[355]`
(alias or name of the set, layer, number) and `L2A474` (layer; alias, or A for attention, M for an MLP, R for
the residual stream, E for the embedding; number). `model/` or `model/set/` may stand before any short form.
What fits several features is an error that lists them; what fits none is one that says the nearest.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from atlas.answers import visible
from atlas.errors import AtlasError
from atlas.store import Store

__all__ = ["DictionaryName", "TokenName", "UnknownFeature", "dictionaries", "find_head", "find_tokens",
           "looks_like_feature", "resolve_feature", "short_form"]  # fmt: skip

_BRACKETS = re.compile(r"(?P<name>[A-Za-z](?:[\w.-]*[A-Za-z_])?)(?P<layer>\d+)\[(?P<number>\d+)\]")
_LAYER_FIRST = re.compile(r"L(?P<layer>\d+)(?P<name>[A-Za-z](?:\w*[A-Za-z_])?)(?P<number>\d+)")
_PATH = re.compile(r"L(?P<layer>\d+)\.(?P<site>\w+(?:\.\w+)?)/(?P<number>\d+)")
_HEAD = re.compile(r"L?(?P<layer>\d+)\.?H?(?P<head>\d+)", re.IGNORECASE)
_SITES = {"A": "attn", "M": "mlp", "R": "resid", "E": "embed"}
_FORMS = "expected model/set/L08.mlp/355, n8[355] or L8M355"


class UnknownFeature(AtlasError):
    """A key of the right form that no feature has."""


@dataclass(frozen=True)
class DictionaryName:
    """What a dictionary is called, and how many features it has."""

    key: str
    model: str
    set: str
    layer: int
    site: str
    size: int
    alias: str | None


@dataclass(frozen=True)
class TokenName:
    """An entry of a model's vocabulary."""

    id: int
    key: str
    model: str
    number: int
    text: str


def dictionaries(store: Store) -> list[DictionaryName]:
    """All dictionaries, by key."""
    aliases = {
        (model, name): alias
        for model, name, alias in store.query("MATCH (s:DictionarySet) RETURN s.model, s.name, s.alias").rows
    }
    found = store.query(
        "MATCH (d:Dictionary) RETURN d.key, d.model, d.`set`, d.layer, d.site, d.size ORDER BY d.key"
    )
    return [
        DictionaryName(key, model, name, layer, site, size, aliases.get((model, name)))
        for key, model, name, layer, site, size in found.rows
    ]


def short_form(dictionary: DictionaryName, number: int) -> str | None:
    """`n8[355]`, where the set has an alias."""
    return f"{dictionary.alias}{dictionary.layer}[{number}]" if dictionary.alias else None


def looks_like_feature(text: str) -> bool:
    """Whether a text has the form of a feature's key, short or whole."""
    last = text.strip().rsplit("/", 1)[-1]
    return bool(
        _BRACKETS.fullmatch(last)
        or _LAYER_FIRST.fullmatch(last)
        or re.search(rf"{_PATH.pattern}$", text.strip())
    )


def resolve_feature(text: str, known: Sequence[DictionaryName]) -> tuple[DictionaryName, int]:
    """The one dictionary and number that a key means. Raises AtlasError with candidates or suggestions."""
    text = text.strip()
    if match := re.fullmatch(rf"(?:(?P<before>.+)/)?{_PATH.pattern}", text):
        site = match["site"]
        fits = [d for d in known if d.site == site and d.layer == int(match["layer"])]
        near_layer = [d for d in known if d.site == site]
    elif match := re.fullmatch(rf"(?:(?P<before>.+)/)?{_BRACKETS.pattern}", text):
        named = [d for d in known if match["name"] in (d.alias, d.set)]
        fits, near_layer = [d for d in named if d.layer == int(match["layer"])], named
    elif match := re.fullmatch(rf"(?:(?P<before>.+)/)?{_LAYER_FIRST.pattern}", text):
        name = match["name"]
        named = [d for d in known if name in (d.alias, d.set)] or [
            d for d in known if name in _SITES and d.site.startswith(_SITES[name])
        ]
        fits, near_layer = [d for d in named if d.layer == int(match["layer"])], named
    else:
        raise AtlasError(f"{_printed(text)}: no feature key; {_FORMS}{_examples(known)}")
    if before := match["before"]:
        fits, near_layer = ([d for d in group if _under(d, before)] for group in (fits, near_layer))
    number = int(match["number"])
    inside = [dictionary for dictionary in fits if number < dictionary.size]
    if len(inside) == 1:
        return inside[0], number
    if inside:
        candidates = ", ".join(f"{d.key}/{number}" for d in inside[:8]) + (", …" if len(inside) > 8 else "")
        raise AtlasError(f"{_printed(text)}: {len(inside)} features fit: {candidates}")
    raise UnknownFeature(f"{_printed(text)}: no such feature; {_nearest(text, fits, near_layer, known)}")


def _under(dictionary: DictionaryName, before: str) -> bool:
    return before in (
        dictionary.model,
        dictionary.set,
        f"{dictionary.model}/{dictionary.set}",
        dictionary.alias,
    )


def _nearest(
    text: str,
    fits: Sequence[DictionaryName],
    near_layer: Sequence[DictionaryName],
    known: Sequence[DictionaryName],
) -> str:
    if fits:
        return "; ".join(f"{d.key} has the features 0 to {d.size - 1}" for d in fits[:4])
    if near_layer:
        sets = dict.fromkeys(f"{d.model}/{d.set}" for d in near_layer)
        return "; ".join(
            f"{name} has the layers {_ranges(d.layer for d in near_layer if f'{d.model}/{d.set}' == name)}"
            for name in sets
        )
    names = [form for d in known for form in (d.key, f"{d.alias}{d.layer}" if d.alias else "") if form]
    stem = re.sub(r"(/\d+|\[\d+\]|\d+)$", "", text)
    near = get_close_matches(stem, names, n=3, cutoff=0.4)
    said = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{said}{_FORMS}{_examples(known)}"


def _examples(known: Sequence[DictionaryName]) -> str:
    sets = dict.fromkeys(f"{d.model}/{d.set}" + (f" (alias {d.alias})" if d.alias else "") for d in known)
    listed = ", ".join(list(sets)[:6]) + (", …" if len(sets) > 6 else "")
    return f"; this atlas has {listed}" if sets else "; this atlas has no features"


def _ranges(layers: Iterable[int]) -> str:
    """0–29, or 0–3, 7."""
    parts: list[list[int]] = []
    for layer in sorted(set(layers)):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(f"{a}–{b}" if a != b else str(a) for a, b in parts)


def find_head(text: str, store: Store) -> dict[str, Any]:
    """The properties of the head that `L.H`, `L5H3`, `L05.H03` or `model/…` means. Raises AtlasError."""
    before, _, last = text.strip().rpartition("/")
    match = _HEAD.fullmatch(last)
    if match is None or ("." not in last and "H" not in last.upper()):
        raise AtlasError(f"{_printed(text)}: no head; expected layer.head, for instance 5.3 or L05.H03")
    layer, number = int(match["layer"]), int(match["head"])
    heads = store.query(
        "MATCH (h:Head) WHERE h.layer = $layer AND h.number = $number RETURN h ORDER BY h.id",
        {"layer": layer, "number": number},
    ).column("h")
    fits = [head for head in heads if not before or head["model"] == before]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise AtlasError(
            f"{_printed(text)}: {len(fits)} heads fit: {', '.join(head['key'] for head in fits)}"
        )
    shapes = store.query("MATCH (m:Model) RETURN m.name, m.n_layers, m.n_heads ORDER BY m.name").rows
    said = "; ".join(
        f"{name} has layers 0–{layers - 1} of heads 0–{heads - 1}" for name, layers, heads in shapes
    )
    raise AtlasError(f"{_printed(text)}: no such head; {said or 'this atlas has no model'}")


def find_tokens(text: str, store: Store, *, most: int = 8) -> list[TokenName]:
    """The tokens that a text means, the exact one first, then the one with a space before it.

    `#123` is the token with that id; a text in quotes is read as Python reads it (so what a table shows can
    be pasted). Raises AtlasError with the nearest tokens where there is none.
    """
    if match := re.fullmatch(r"#(\d+)", text):
        found = _tokens(store, "t.number = $number", {"number": int(match[1])})
        if not found:
            raise AtlasError(f"{text}: no token has this id")
        return found
    for wanted in dict.fromkeys((text, _unquoted(text))):
        forms = [wanted] if wanted.startswith(" ") else [wanted, f" {wanted}"]
        found = _tokens(store, "t.text IN $texts", {"texts": forms})
        if found:
            return sorted(found, key=lambda token: (forms.index(token.text), token.id))[:most]
    raise AtlasError(f"{visible(text)}: no such token{_near_tokens(text, store)}")


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        try:
            return str(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return text
    return text


def _tokens(store: Store, condition: str, parameters: dict[str, Any]) -> list[TokenName]:
    rows = store.query(
        f"MATCH (t:Token) WHERE {condition} RETURN t.id, t.key, t.model, t.number, t.text ORDER BY t.id",
        parameters,
    ).rows
    return [TokenName(*row) for row in rows]


def _near_tokens(text: str, store: Store) -> str:
    bare = text.strip()
    if not bare:
        return ""
    near = store.query(
        "MATCH (t:Token) WHERE lower(t.text) CONTAINS $text"
        " RETURN DISTINCT t.text AS text ORDER BY size(text), text LIMIT 6",
        {"text": bare.lower()},
    ).column("text")
    if not near:  # the longest beginning of it that is a token: how a tokenizer would take it apart
        near = store.query(
            "MATCH (t:Token) WHERE $text STARTS WITH trim(t.text) AND size(trim(t.text)) > 1 "
            "RETURN DISTINCT t.text AS text ORDER BY size(text) DESC, text LIMIT 4",
            {"text": bare},
        ).column("text")
    return f"; near it are {', '.join(map(visible, near))}" if near else ""


def _printed(text: str) -> str:
    return text if text.isprintable() else visible(text)
