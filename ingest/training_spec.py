"""The spec of a training run: which dictionaries, of which model, on which text. YAML, checked before any of
it runs.

    train: 1
    model: models/smol
    corpus: text/train.jsonl
    tokens: 1000000
    dictionaries:
      tc: {reads: mlp.in, writes: mlp.out, layers: [5, 8, 12], latents: 2304, gate: {topk: 32}}
      sae: {reads: mlp.out, layers: all, latents: 2304, gate: {jumprelu: 32}}

A set with `writes` is a transcoder (with `skip: true` beside a linear path), one without an autoencoder of
what it reads. Sites are ours (mlp.in, mlp.out, attn.out, attn.z, resid_post, embed, …) or hook names. gate:
topk or batchtopk with k, jumprelu with the L0 wanted, relu with the weight of its L1. `loss: {gradients: a}`,
0 ≤ a < 1, weights the directions of the error by what the model's cross-entropy feels of them (a share a of
that, the rest all directions alike); it takes one backward pass over `gradient_tokens`. `start: PLACE` goes
on from a trained set of the same sites, layers, latents and gate. Paths are seen from the spec's folder.
Neither torch nor transformers is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ingest.errors import InputError, near
from ingest.places import resolve_place
from ingest.spec_file import Name, layers_of
from ingest.spec_text import Mistake, SpecError, SpecText, parse_text, read_text

__all__ = ["GATES", "LossSection", "SetSection", "TrainingSpec", "load_training_spec", "parse_training_spec"]

GATES = ("topk", "batchtopk", "jumprelu", "relu")
LAYOUTS = ("circuit-tracer", "saelens")


def _gate(value: Any) -> Any:
    """{topk: 32} as ("topk", 32.0)."""
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(
            f"expected one of {', '.join(GATES)} with its number, as {{topk: 32}}, found {value!r}"
        )
    name, number = next(iter(value.items()))
    number = _number(number)
    if name not in GATES:
        raise ValueError(f"unknown gate {name!r}{near(name, GATES)}")
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a number above 0, found {number!r}")
    if name in ("topk", "batchtopk") and int(number) != number:
        raise ValueError(f"{name}: expected a whole number of latents, found {number!r}")
    return name, float(number)


def _number(value: Any) -> Any:
    """1e-3, which YAML takes for text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LossSection(_Section):
    """How an error is measured."""

    # Share of E[g gᵀ], g the gradient of the model's cross-entropy, in the metric; the rest is the identity.
    gradients: Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)] = 0.0


class SetSection(_Section):
    """One set to be trained: a dictionary for each of its layers."""

    reads: str
    writes: str | None = None
    layers: Annotated[Any, BeforeValidator(layers_of)] = "all"
    latents: Annotated[int, Field(ge=1)]
    gate: Annotated[Any, BeforeValidator(_gate)]
    skip: bool = False
    loss: LossSection = LossSection()
    start: str | None = None  # a trained set to go on from
    rate: Annotated[float, BeforeValidator(_number), Field(gt=0)] = 1e-3
    optimiser: Literal["adam", "muon"] = "adam"
    revive_after: Annotated[int, Field(ge=1)] | None = None  # rows; default: the file's
    layout: Literal["circuit-tracer", "saelens"] | None = None  # default: by the site
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    write_as: Literal["jumprelu"] | None = None  # a TopK by one threshold, for programs that know no TopK


class _File(_Section):
    train: Literal[1]
    model: str
    tokenizer: str | None = None
    corpus: str
    dictionaries: Annotated[dict[Name, SetSection], Field(min_length=1)]
    tokens: Annotated[int, Field(ge=1)] = 1_000_000
    reuse: Annotated[float, BeforeValidator(_number), Field(gt=0, le=10_000)] = 3.0
    held_out: Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)] = 0.1
    context: Annotated[int, Field(ge=2)] | None = None
    pad: Annotated[int, Field(ge=0)] | None = None
    buffer: Annotated[int, Field(ge=2)] = 131_072
    batch: Annotated[int, Field(ge=1)] = 4096
    revive_after: Annotated[int, Field(ge=1)] = 200_000
    gradient_tokens: Annotated[int, Field(ge=1)] = 50_000
    seed: Annotated[int, Field(ge=0, le=2_000_000)] = 0  # each layer has one of its own, of 32 bits


@dataclass(frozen=True)
class TrainingSpec:
    """A checked training spec; places are resolved."""

    model: str
    tokenizer: str | None
    corpus: str
    dictionaries: Mapping[str, SetSection]
    tokens: int  # harvested
    reuse: float  # how often each is met
    held_out: float  # share of the documents
    context: int | None  # tokens; None: 128, or a token matrix's own width
    pad: int | None  # of a token matrix
    buffer: int  # rows
    batch: int  # rows
    revive_after: int  # rows
    gradient_tokens: int  # run forward and back, where a loss asks for gradients
    seed: int
    source: str
    lines: Mapping[tuple[str | int, ...], int] = field(default_factory=dict, repr=False)

    def place(self, *keys: str | int) -> str:
        """`spec.yaml: line 9: dictionaries.tc.reads`, as an error begins; without a file no line."""
        known = next((keys[:n] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        line = f"line {self.lines[known]}: " if known else ""
        return f"{self.source}: {line}{'.'.join(map(str, keys))}"


def load_training_spec(path: str | Path) -> TrainingSpec:
    """The training spec of a file. Raises SpecError with every mistake, InputError for no YAML."""
    path = Path(path)
    return parse_training_spec(read_text(path), source=str(path), base=path.resolve().parent)


def parse_training_spec(text: str, *, source: str = "spec", base: Path | None = None) -> TrainingSpec:
    """The training spec of a text; `base` is the folder from which its paths are seen."""
    parsed = parse_text(text, source)
    mistakes = list(parsed.twice)
    if not isinstance(parsed.data, dict):
        raise SpecError(source, [parsed.mistake((), "expected a spec that begins with train: 1")])
    if "atlas" in parsed.data and "train" not in parsed.data:
        raise SpecError(source, [parsed.mistake(("atlas",), "is a build's spec; atlas build reads it")])
    file = None
    try:
        file = _File.model_validate(parsed.data)
    except ValidationError as error:
        mistakes += [_told(parsed, item) for item in error.errors(include_url=False)]
    places: dict[str, str] = {}
    for key in ("model", "tokenizer", "corpus"):
        place = parsed.data.get(key)
        if isinstance(place, str):
            try:
                places[place] = resolve_place(place, base or Path.cwd())
            except InputError as error:
                mistakes.append(parsed.mistake((key,), str(error)))
    sets: dict[str, SetSection] = {}
    for name, entry in file.dictionaries.items() if file is not None else ():
        sets[name] = entry
        if entry.start is not None:
            try:
                place = resolve_place(entry.start, base or Path.cwd())
                sets[name] = entry.model_copy(update={"start": place})
            except InputError as error:
                mistakes.append(parsed.mistake(("dictionaries", name, "start"), str(error)))
    if file is not None:
        mistakes += _set_mistakes(parsed, file)
    if file is None or mistakes:
        raise SpecError(source, mistakes)
    return TrainingSpec(
        model=places[file.model],
        tokenizer=places[file.tokenizer] if file.tokenizer else None,
        corpus=places[file.corpus],
        dictionaries=sets,
        source=source,
        lines=parsed.lines,
        **{key: getattr(file, key) for key in (
            "tokens", "reuse", "held_out", "context", "pad", "buffer", "batch", "revive_after",
            "gradient_tokens", "seed",
        )},
    )  # fmt: skip


def _set_mistakes(text: SpecText, file: _File) -> list[Mistake]:
    mistakes: list[Mistake] = []
    for name, entry in file.dictionaries.items():
        if name.startswith("checkpoint.pt"):
            why = "a run's own files have such names; expected another"
            mistakes.append(text.mistake(("dictionaries", name), why))
        kind, number = entry.gate
        if kind != "relu" and number > entry.latents:
            why = f"expected at most the {entry.latents} latents, found {number:g}"
            mistakes.append(text.mistake(("dictionaries", name, "gate", kind), why))
        if entry.write_as and kind != "topk":
            why = f"turns a topk into a jumprelu; expected to be left out of a {kind}"
            mistakes.append(text.mistake(("dictionaries", name, "write_as"), why))
        if entry.skip and entry.writes is None:
            why = "an autoencoder's skip would copy its input; expected writes beside it, or no skip"
            mistakes.append(text.mistake(("dictionaries", name, "skip"), why))
    if file.batch > file.buffer:
        mistakes.append(text.mistake(("batch",), f"expected at most the buffer's {file.buffer} rows"))
    return mistakes


def _told(text: SpecText, item: Any) -> Mistake:
    place = tuple(part for part in item["loc"] if part != "[key]")
    kind, found, last = item["type"], item.get("input"), str(item["loc"][-1])
    if kind == "value_error":
        return text.mistake(place, str(item["ctx"]["error"]))
    if kind == "missing":
        return text.mistake(place, "is missing; expected a value")
    if kind == "extra_forbidden":
        section: type[_Section] = SetSection if len(place) > 1 else _File
        section = LossSection if place[2:3] == ("loss",) and len(place) > 3 else section
        fields = section.model_fields
        return text.mistake(place, f"unknown key{near(last, list(fields))}")
    if kind == "literal_error":
        return text.mistake(place, f"expected {item['ctx']['expected']}, found {found!r}")
    if kind.endswith("_type") or kind == "int_from_float":
        kinds = {"string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number",
                 "float_type": "a number", "bool_type": "true or false"}  # fmt: skip
        return text.mistake(place, f"expected {kinds.get(kind, 'keys with values')}, found {found!r}")
    return text.mistake(place, f"{item['msg'][:1].lower()}{item['msg'][1:]}, found {found!r}")
