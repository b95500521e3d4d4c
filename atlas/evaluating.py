"""`atlas evaluate`: a model, sets of dictionaries and a text opened, checked and measured; the figures as
tables.

Documents are divided into a part to train on and a part held out by their hashes alone (ingest.corpora). A
set trained here has a `training.json` beside it that says how large the held-out part was: evaluation takes
no larger one, so it sees no document that the set was trained on, whatever else the corpus holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from atlas.answers import Answer, Table
from ingest.corpora import HELD_OUT
from ingest.errors import InputError
from ingest.spec import Spec

if TYPE_CHECKING:
    from ingest.contexts import Contexts
    from ingest.dictionaries import DictionarySet, Layers
    from ingest.models import ResidualModel
    from workers.evaluation import Evaluation, LayerFigures, SetFigures, Together
    from workers.measures import Estimate

__all__ = ["answer_of", "contexts_of", "evaluate", "held_out_share", "opened_sets"]

CONTEXTS = 128
_MEMORY = 0.7  # of what is free, for the dictionaries

Progress = Callable[[float, float, str], None]


def evaluate(
    spec: Spec,
    text: str | Path,
    *,
    contexts: int = CONTEXTS,
    length: int | None = None,
    layers: Layers = "all",
    part: str = "held-out",
    share: float | None = None,
    seed: int = 0,
    pad: int | None = None,
    field: str | None = None,
    bf16: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """The figures of a spec's dictionaries (all of one model) on contexts of a corpus.

    contexts, length: so many, of so many tokens. layers: default, those that every set has. part: of the
    corpus, "held-out", "train" or "all"; share: of the documents held out, default what the sets' training
    records say, or 0.1. pad: of token matrices. bf16: the model's matrix products in bfloat16.
    Raises InputError.
    """
    from workers.evaluation import evaluate as measured

    model, sets = opened_sets(spec, layers)
    share = held_out_share(sets, part, share)
    chosen = contexts_of(model, text, contexts, length, part, share, seed, pad, field)
    return measured(model, sets, chosen, autocast=bf16, progress=progress)


def opened_sets(spec: Spec, layers: Layers = "all") -> tuple[ResidualModel, list[DictionarySet]]:
    """The spec's one model and its sets, on the layers asked for, or on those that all sets have.

    Raises InputError for sets of several models, and for more than fits into memory.
    """
    from ingest.dictionaries import describe_set, open_set
    from ingest.models import describe_model, open_model

    names = {entry.model for entry in spec.dictionaries.values()}
    if len(names) != 1:
        raise InputError(
            f"{spec.source}: dictionaries of {len(names)} models ({', '.join(sorted(names))}); expected one"
        )
    (name,) = names
    where = spec.models[name]
    facts = describe_model(where.where)
    layouts = {}
    for key, entry in spec.dictionaries.items():
        wanted = cast("Layers", entry.layers if layers == "all" else layers)
        layouts[key] = describe_set(
            entry.where,
            facts,
            format=entry.format,
            layers=wanted,
            declared=entry.declared,
        )
    common = set.intersection(*(set(layout.layers) for layout in layouts.values()))
    if layers == "all" and len(layouts) > 1 and common:
        for key, entry in spec.dictionaries.items():
            layouts[key] = describe_set(
                entry.where, facts, format=entry.format, layers=sorted(common), declared=entry.declared
            )
    _fits_memory(sum(sum(layout.bytes.values()) for layout in layouts.values()))
    model = open_model(where.where, name=name, tokenizer=where.tokenizer)
    sets = [
        open_set(
            entry.where, name=key, model=model, format=entry.format, layers=layouts[key].layers,
            alias=entry.alias, declared=entry.declared,
        )
        for key, entry in spec.dictionaries.items()
    ]  # fmt: skip
    return model, sets


def _fits_memory(needed: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if needed > _MEMORY * free:
        raise InputError(
            f"the dictionaries take {needed / 1e9:.1f} GB together, {free / 1e9:.1f} GB are free; name fewer "
            f"layers with --layers"
        )


def contexts_of(
    model: ResidualModel,
    text: str | Path,
    count: int | None = CONTEXTS,
    length: int | None = None,
    part: str = "held-out",
    share: float = HELD_OUT,
    seed: int = 0,
    pad: int | None = None,
    field: str | None = None,
) -> Contexts:
    """Contexts of a corpus for a model. Raises InputError."""
    from ingest.contexts import make_contexts
    from ingest.corpora import open_corpus
    from ingest.models.tokenizer import open_tokenizer

    corpus = open_corpus(text, field)
    tokenizer = None
    if not corpus.of_tokens:
        tokenizer = open_tokenizer(model)
        tokenizer.check(model.facts.d_vocab)
    return make_contexts(corpus, tokenizer, length, part=part, share=share, limit=count, seed=seed, pad=pad)


def held_out_share(sets: Sequence[DictionarySet], part: str, share: float | None) -> float:
    """The share held out that keeps evaluation off what the sets were trained on.

    Raises InputError where the share asked for would let such documents in. (Parts "all" and "train" do so by
    their names.)
    """
    recorded = {one.name: found for one in sets if (found := _recorded(one)) is not None}
    if not recorded:
        return HELD_OUT if share is None else share
    name, least = min(recorded.items(), key=lambda item: item[1])
    if part == "held-out" and share is not None and share > least:
        raise InputError(
            f"--share {share:g}: {name} was trained on all but {least:g} of the documents; give at most that"
        )
    return least if share is None else share


def _recorded(one: DictionarySet) -> float | None:
    """The held-out share in a set's training record, where there is one."""
    if one.source is None:
        return None
    folder = one.source if one.source.is_dir() else one.source.parent
    for file in (folder / "training.json", folder.parent / "training.json"):
        if not file.is_file():
            continue
        try:
            share = json.loads(file.read_text(encoding="utf-8"))["documents"]["held_out_share"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{file}: no training record ({type(error).__name__}: {error}); expected "
                f"documents.held_out_share"
            ) from None
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise InputError(f"{file}: documents.held_out_share is {share!r}; expected 0 or more, below 1")
        return float(share)
    return None


# --- for people ---------------------------------------------------------------------------------------------


def answer_of(found: Evaluation) -> Answer:
    """Tables of the figures with their standard errors over contexts."""
    tables = {one.name: _table(one) for one in found.sets}
    if found.differences:
        first = found.sets[0].name
        rows = [
            (
                one.second,
                "all" if one.layer is None else one.layer,
                _WORDS[one.quantity],
                _with_error(one.estimate, signed=True),
                _ratio(one.estimate),
            )
            for one in found.differences
        ]
        tables["differences"] = Table.of(
            f"difference to {first}, paired by context",
            ("set", "layer", "figure", "difference", "in standard errors"),
            rows,
        )
    facts = {
        "contexts": f"{found.contexts} of {found.length} tokens, {_PARTS[found.part]}",
        "tokens": found.tokens,
        "CE of the model": f"{_with_error(found.ce)} nats a token",
    }
    if found.bf16:
        facts["precision"] = "bfloat16 matrix products"
    notes = (
        "FVU: share of the variance left unexplained. CE: nats a token with the dictionary in place; added:"
        " to the model's. recovered: (CE zero - CE) / (CE zero - the model's CE). ±: standard error over"
        " contexts.",
        f"dead: fired on none of {found.tokens:,} tokens.",
    )
    return Answer(f"evaluation on {found.model}", facts, tables, notes)


_WORDS = {"fvu": "FVU", "l0": "L0", "ce": "CE", "recovered": "recovered"}
_PARTS = {
    "held-out": "documents held out by hash",
    "train": "documents of the training part",
    "all": "all documents",
}


def _table(one: SetFigures) -> Table:
    columns = ("layer", "L0", "FVU", "CE", "added", "recovered", "CE zero", "CE mean", "dead", "features")
    rows: list[tuple[Any, ...]] = [(figures.layer, *_row(figures)) for figures in one.layers]
    if len(one.layers) > 1:
        rows.append(("all", *_row(one.together)))
    sites = sorted({figures.site for figures in one.layers})
    return Table.of(f"{one.name}: {one.kind} in place of {', '.join(sites)}", columns, rows)


def _row(figures: LayerFigures | Together) -> tuple[Any, ...]:
    return (
        None if figures.l0 is None else figures.l0.value,
        _with_error(getattr(figures, "fvu", None)),
        figures.ce.value,
        _with_error(figures.added),
        _with_error(figures.recovered),
        figures.ce_zero.value,
        figures.ce_mean.value,
        getattr(figures, "dead", None),
        getattr(figures, "size", None),
    )


def _with_error(one: Estimate | None, signed: bool = False) -> str | None:
    """`0.481 ± 0.004`: the error in two digits, the figure to the same place."""
    import math

    if one is None or one.value is None:
        return None
    sign = "+" if signed else ""
    if not one.se:
        return f"{one.value:{sign}.4f}"
    places = min(max(1 - math.floor(math.log10(one.se)), 0), 6)
    return f"{one.value:{sign}.{places}f} ± {one.se:.{places}f}"


def _ratio(one: Estimate) -> float | None:
    return None if one.value is None or not one.se else one.value / one.se
