"""What a dictionary's files are, and whether they fit a model: `atlas dictionary inspect`.

Headers tell format, sites, sizes and types. Weights, where they are read, tell what happens to the input, the
norms of encoder and decoder rows, and whether all of it is finite. A model and a text tell whether it was
made for that model: how many features fire, and how well they describe what they were made to describe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.answers import Answer, Table
from ingest.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ingest.dictionaries import Declared, Dictionary, DictionarySet, Layers, Layout
    from ingest.models import Facts

__all__ = ["CONTEXTS", "READ_UP_TO", "inspect"]

CONTEXTS = 32
"""Contexts of 128 tokens on which dictionaries are measured, unless told otherwise."""

READ_UP_TO = 2e9
"""Bytes of weights that are read without being asked to."""

_SPACES = {
    "raw": "the stream itself",
    "normalised": "normalised, before the norm's gain",
    "normalised with gain": "normalised, after the norm's gain",
    "branch output": "a branch's output",
    "z": "the heads' outputs side by side",
}
_SIDES = {"module": "at the module's output", "stream": "where it joins the stream"}


def inspect(
    where: str | Path,
    *,
    format: str | None = None,
    layers: Layers = "all",
    declared: Declared | None = None,
    model: str | Path | None = None,
    weights: bool | None = None,
    text: str | Path | None = None,
    contexts: int = CONTEXTS,
    progress: Callable[[float, float, str], None] | None = None,
) -> Answer:
    """What the dictionaries at a path or hub name are.

    declared: what the files do not say of themselves. model: a model, by whose configuration alone everything
    is checked. weights: whether they are read; None, where they take no more than READ_UP_TO bytes. text: a
    corpus, on so many contexts of which the dictionaries are run in the model; this opens the model, and
    holds all of them in memory. Raises InputError for files that do not hold, and for those that do not fit
    the model.
    """
    from ingest.dictionaries import Declared, describe_set, open_set
    from ingest.models import describe_model

    if text is not None and model is None:
        raise InputError("a text measures dictionaries on a model: say which with --model")
    facts = describe_model(model) if model is not None else None
    layout = describe_set(where, facts, format=format, layers=layers, declared=declared or Declared())
    total = sum(layout.bytes.values())
    reading = total <= READ_UP_TO if weights is None else weights
    notes = list(layout.notes)
    if layout.format == "neurons":
        reading = False
    elif not reading:
        notes.append(f"weights not read ({total / 1e9:.1f} GB): --weights reads them")
    if facts is None:
        notes.append("compared with no model: --model says whether it fits")
    shown: dict[str, Any] = _headers(layout)
    tables = {"by_layer": _layers(layout)}
    if reading:
        shown |= _weights(layout, tables)
    if facts is not None:
        shown["fits"] = _fits(facts)
    if text is not None and model is not None:
        from ingest.models import open_model

        opened = open_set(
            where,
            name="inspected",
            model=open_model(model),
            format=format,
            layers=layers,
            declared=declared or Declared(),
        )
        figures, warnings = _measured(opened, text, contexts, tables, progress)
        shown |= figures
        notes += warnings
    return Answer(str(layout.source or where), shown, tables, tuple(notes))


# --- from headers -------------------------------------------------------------------------------------------


def _headers(layout: Layout) -> dict[str, Any]:
    declared = sorted(set(layout.l0.values()))
    return {
        "format": layout.format,
        "kind": layout.kind,
        "reads": f"{layout.read.site}: {_SPACES[layout.read.space]}",
        "writes": _writes(layout),
        "activation": layout.activation,
        "layers": _ranges(layout.layers),
        "features": sum(layout.sizes.values()),
        "declared_L0": _span(declared) if declared else None,
        "types_on_disk": ", ".join(layout.dtypes) or None,
        "memory_bytes": sum(layout.bytes.values()),
        **({"provenance": dict(layout.provenance)} if layout.provenance else {}),
    }


def _writes(layout: Layout) -> str:
    """`mlp, at the module's output; layers 0 to 5 after`, said once where all layers do alike."""
    alike = dict.fromkeys(
        f"{site}, {_SIDES[at]}" if site in ("mlp", "attn") else site
        for writes in layout.writes.values()
        for _, site, at in writes
    )
    several = any(len(writes) > 1 for writes in layout.writes.values())
    elsewhere = any(writes[0][0] != layer for layer, writes in layout.writes.items())
    return (
        "; ".join(alike)
        + (", in later layers too" if several else "")
        + (", of a later layer" if elsewhere else "")
    )


def _layers(layout: Layout) -> Table:
    rows = [
        (
            layer,
            size,
            *layout.widths.get(layer, (None, None)),
            _ranges([written for written, _, _ in layout.writes[layer]]),
            layout.l0.get(layer),
            layout.bytes.get(layer),
        )
        for layer, size in layout.sizes.items()
    ]
    columns = ("layer", "features", "d_in", "d_out", "written_layers", "declared_L0", "memory_bytes")
    return Table.of("layers", columns, rows)


def _fits(facts: Facts) -> str:
    return f"{facts.architecture}, {facts.n_layers} layers, d_model {facts.d_model}"


# --- from weights -------------------------------------------------------------------------------------------

_NORMS = ("layer", "encoder_norms", "decoder_norms", "silent")


def _weights(layout: Layout, tables: dict[str, Table]) -> dict[str, Any]:
    """Facts of all layers together; adds the table of each layer's norms."""
    rows, inputs, skips = [], Counter[str](), Counter[bool]()
    for layer in layout.layers:
        one = layout.load(layer, None)
        rows.append((layer, *_row(one)))
        inputs[_input(one)] += 1
        skips[one.W_skip is not None] += 1
    tables["norms"] = Table.of(
        "norms of encoder and decoder rows: least, median, largest",
        _NORMS,
        rows,
        notes=("silent: features whose decoder or encoder is all zeros",),
    )
    return {
        "input": " or ".join(inputs),
        "skip": "in some layers" if len(skips) > 1 else "yes" if True in skips else "no",
    }


def _row(one: Dictionary) -> tuple[Any, ...]:
    import torch

    encoder = torch.linalg.vector_norm(torch.stack([_norms(e.W_enc) for e in one.encoders]), dim=0)
    decoder = torch.linalg.vector_norm(torch.stack([_norms(w.W_dec) for w in one.writes]), dim=0)
    silent = int(((encoder == 0) | (decoder == 0)).sum())
    return _spread(encoder), _spread(decoder), silent


def _norms(rows: Tensor) -> Tensor:
    import torch

    return torch.linalg.vector_norm(rows, dim=1)


def _spread(norms: Tensor) -> list[float]:
    return [float(norms.min()), float(norms.median()), float(norms.max())]


def _input(one: Dictionary) -> str:
    """What happens to the input before it is read."""
    from ingest.dictionaries import LayerNormInput, RescaledInput

    done = []
    match one.input_norm:
        case LayerNormInput():
            done.append("centred and scaled to unit deviation")
        case RescaledInput(norm=norm):
            done.append(f"scaled to the norm {norm:g}")
    if one.b_in is not None:
        done.append("a bias is subtracted")
    return ", then ".join(done) or "as it is"


# --- on a text ----------------------------------------------------------------------------------------------

_MEASURES = ("layer", "site", "L0", "declared_L0", "FVU", "CE_recovered", "dead_share")


def _measured(
    opened: DictionarySet,
    text: str | Path,
    limit: int,
    tables: dict[str, Table],
    progress: Callable[[float, float, str], None] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Facts and warnings; adds the table of each layer's figures."""
    from ingest.contexts import make_contexts
    from ingest.corpora import open_corpus
    from ingest.models.tokenizer import open_tokenizer
    from workers.evaluation import evaluate

    corpus = open_corpus(text)
    tokenizer = None if corpus.of_tokens else open_tokenizer(opened.residual_model)
    found = evaluate(
        opened.residual_model, [opened], make_contexts(corpus, tokenizer, limit=limit), progress=progress
    )
    [figures] = found.sets
    l0 = opened.layout.l0
    rows = [
        (
            one.layer,
            one.site,
            None if one.l0 is None else one.l0.value,
            l0.get(one.layer),
            one.fvu.value,
            one.recovered.value,
            one.dead_share,
        )
        for one in figures.layers
    ]
    tables["measured"] = Table.of(
        "measured on the text, each layer in place by itself",
        _MEASURES,
        rows,
        notes=(
            f"{found.contexts} contexts, {found.tokens:,} tokens; of rare features more are dead than on more"
            " text",
        ),
    )
    warnings = [
        told for layer, _, fires, says, fvu, *_ in rows for told in _warnings(layer, fires, says, fvu)
    ]
    shown = {
        "CE_of_the_model": found.ce.value,
        "CE_all_in_place": figures.together.ce.value,
        "CE_recovered_all_in_place": figures.together.recovered.value,
    }
    return shown, warnings


def _warnings(layer: int, l0: float | None, declared: float | None, fvu: float | None) -> Iterator[str]:
    """What does not look as if the dictionary had been made for this model and site."""
    if l0 is not None and declared and not declared / 2 <= l0 <= 2 * declared:
        yield (
            f"warning: layer {layer}: {l0:.3g} features fire on a token, the files declare {declared:g}: made"
            " for another model, site or scale?"
        )
    if fvu is not None and fvu >= 1:
        yield (
            f"warning: layer {layer}: {100 * fvu:.0f} % of the variance is unexplained, so the mean alone"
            " would describe it better: made for another model, site or scale?"
        )


# --- words --------------------------------------------------------------------------------------------------


def _ranges(layers: Iterable[int]) -> str:
    """`0 to 3, 7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _span(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
