"""Files of labels, row by row: CSV, TSV, JSON and JSON Lines, and the explanations that Neuronpedia exports.

A row names a feature and says a text. The feature is a key (`key`, or `feature`), or a place: `layer` with
`index` (`number`, `feature`, `latent`). The text is `label`, `text`, `description`, `explanation` or
`explanationText`. Names of columns are read without regard to case, spaces, `_` and `-`. Scores (`score`,
`f1`, `auc` …, or one that the caller names) and who wrote it (`author`, `explanationModelName`, `typeName`)
are kept.

Neuronpedia's exports (`<model>/<source>/explanations/batch-0.jsonl.gz`) are rows of `modelId`, `layer` (the
source's id, as `8-res-jb`), `index`, `description`, `typeName`, `explanationModelName` and more; those of
`explanation-scores/` and of its API hold a list `explanations` with a list `scores` in each.

Nothing in a file is believed beyond its bytes: a line and a text have a largest size, and files are read in
a stream (a `.json` file, one value, whole, up to a size).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, cast

from atlas.answers import visible
from atlas.errors import AtlasError
from atlas.folder import disk_errors

__all__ = ["MOST_TEXT", "LabelFile", "LabelRow", "label_files", "plain_name"]

MOST_TEXT = 2000
"""Characters of a label."""

MOST_LINE = 4 << 20
"""Bytes of a line; Neuronpedia's, with an embedding of 3,072 numbers, have 70 kB."""

MOST_JSON = 256 << 20
"""Bytes of a file that is one JSON value."""

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
KEYS = ("key", "featurekey")
PLACES = ("index", "number", "feature", "featureid", "featureindex", "latent", "neuron")
TEXTS = ("label", "text", "description", "explanation", "explanationtext")
SCORES = (
    "score", "f1", "f1score", "auc", "accuracy", "balancedaccuracy", "correlation", "precision", "recall",
    "scorev1", "scorev2",
)  # fmt: skip
AUTHORS = ("author", "explanationmodelname", "typename")
EXPECTED = "expected key, or layer and index, and label (or text, description, explanation)"

_SOURCE = re.compile(r"([0-9]{1,9})(?:-(.*))?")


@dataclass(frozen=True)
class LabelRow:
    """One label. The feature is named by `key`, or by `layer` and `number`."""

    where: str
    """File and line, for errors."""
    key: str | None
    set: str | None
    layer: int | None
    number: int | None
    origin: tuple[str, str] | None
    """Neuronpedia's model, and its source without the layer: ("gpt2-small", "res-jb")."""
    text: str
    scores: Mapping[str, float]
    author: str | None


def label_files(paths: Sequence[Path]) -> list[Path]:
    """The files given, and those of folders given, in the order of the numbers in their names.

    Raises AtlasError for what is no file of a known kind, and for a folder without one.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            with disk_errors(path):
                inside = [file for file in path.iterdir() if file.is_file() and _kind(file)]
            if not inside:
                raise AtlasError(f"{path}: no file in it ends in {', '.join(SUFFIXES)} (or .gz after that)")
            found += sorted(inside, key=lambda file: [int(part) if part.isdecimal() else part for part in
                                                      re.split(r"([0-9]+)", file.name)])  # fmt: skip
        elif not path.exists():
            raise AtlasError(f"{path}: no such file")
        elif not path.is_file():
            raise AtlasError(f"{path}: expected a file of labels, or a folder of such files")
        elif not _kind(path):
            raise AtlasError(
                f"{path}: expected a name that ends in {', '.join(SUFFIXES)} (or .gz after that)"
            )
        else:
            found.append(path)
    return found


def _kind(path: Path) -> str:
    """The suffix that says how it is read, without .gz; "" where none does."""
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES else ""


class LabelFile:
    """One file. What was left out of it is known when its rows have been read."""

    def __init__(self, path: Path, score: str | None = None) -> None:
        """score: a column of scores, beside those that are known as such."""
        self.path = path
        self.empty = 0
        """Rows without a text."""
        self.columns: dict[str, None] = {}
        """Columns that were not kept."""
        self._scores = (*([plain_name(score)] if score else []), *SCORES)

    @cached_property
    def sha256(self) -> str:
        """Hash of its bytes."""
        with self._open(unpacked=False) as file:
            return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()

    def rows(self) -> Iterator[LabelRow]:
        """Its labels, in their order.

        Raises AtlasError naming the line for bytes that are no UTF-8, a line, a text or a file that is too
        long, what is no CSV or JSON, and a row without feature, or whose score is no number.
        """
        try:
            for where, record in self._records():
                for explanation in _explanations(record, where):
                    yield from self._row(where, explanation)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise AtlasError(f"{self.path}: not a whole gzip file ({error})") from error
        except RecursionError as error:
            raise AtlasError(f"{self.path}: JSON nested too deep for a file of labels") from error

    def _open(self, *, unpacked: bool = True) -> IO[bytes]:
        try:
            if unpacked and self.path.name.lower().endswith(".gz"):
                return cast(IO[bytes], gzip.open(self.path, "rb"))
            return self.path.open("rb")
        except OSError as error:
            raise AtlasError(f"{self.path}: cannot be read ({error.strerror})") from error

    def _records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        kind = _kind(self.path)
        if kind == ".json":
            yield from self._json()
        elif kind in (".jsonl", ".ndjson"):
            for number, line in self._lines():
                if line.strip():
                    where = f"{self.path}, line {number}"
                    yield where, _record(_parsed(line, where), where)
        else:
            yield from self._table("\t" if kind == ".tsv" else ",")

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self._open() as file:
            number = 0
            while line := file.readline(MOST_LINE + 1):
                number += 1
                if len(line) > MOST_LINE:
                    raise AtlasError(f"{self.path}, line {number}: longer than {MOST_LINE >> 20} MiB")
                yield number, _decoded(line, f"{self.path}, line {number}", first=number == 1)

    def _table(self, delimiter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        reader = csv.reader((line for _, line in self._lines()), delimiter=delimiter, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            where = f"{self.path}, line 1"
            list(self._row(where, dict.fromkeys(names, "")))  # says what is missing
            self.empty = 0
            for name in names:
                if name and names.count(name) > 1:
                    raise AtlasError(f"{where}: two columns are called {name}")
            for cells in reader:
                where = f"{self.path}, line {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise AtlasError(f"{where}: {len(cells)} cells, but the first line names {len(names)}")
                yield where, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise AtlasError(f"{self.path}, line {reader.line_num}: not CSV ({error})") from error

    def _json(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with self._open() as file:
            content = file.read(MOST_JSON + 1)
        if len(content) > MOST_JSON:
            raise AtlasError(
                f"{self.path}: more than {MOST_JSON >> 20} MiB of JSON in one value; write an object a line,"
                " as .jsonl"
            )
        value = _parsed(_decoded(content, str(self.path), first=True), str(self.path))
        del content
        if isinstance(value, list):
            for number, item in enumerate(value, 1):
                yield f"{self.path}, entry {number}", _record(item, f"{self.path}, entry {number}")
            return
        record = _record(value, str(self.path))
        if isinstance(record.get("explanations"), list) or _columns(tuple(record), ()).text is not None:
            yield str(self.path), record
            return
        for key, said in record.items():  # an object of keys
            where = f"{self.path}, {visible(key)}"
            if not isinstance(said, str | dict | None):
                raise AtlasError(f"{where}: expected a text, or an object with one")
            yield where, {"label": said, "key": key} if not isinstance(said, dict) else {**said, "key": key}

    def _row(self, where: str, record: Mapping[str, Any]) -> Iterator[LabelRow]:
        columns = _columns(tuple(record), self._scores)
        named = columns.key or (columns.layer is not None and columns.number)
        if columns.text is None or not named:
            names = ", ".join(visible(name) for name in list(record)[:12])
            raise AtlasError(f"{where}: {EXPECTED}; found the columns {names or 'none'}")
        text = _text(record[columns.text], where, columns.text)
        if not text:
            self.empty += 1
            return
        self.columns.update(dict.fromkeys(columns.others))
        key = layer = number = origin = None
        if columns.key is not None:
            key = _text(record[columns.key], where, columns.key)
        elif columns.layer is not None and columns.number is not None:
            layer, source = _layer(record[columns.layer], where)
            number = _whole(record[columns.number], where, columns.number)
            if source or columns.model is not None:
                origin = (str(record[columns.model]) if columns.model is not None else "", source)
        chosen = _text(record[columns.set], where, columns.set) if columns.set is not None else ""
        said = dict.fromkeys(str(record[name]) for name in columns.authors if record[name])
        scores = self._all_scores(record, columns.scores, where)
        yield LabelRow(
            where, key, chosen or None, layer, number, origin, text, scores, ", ".join(said) or None
        )

    def _all_scores(self, record: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, float]:
        found = {name: _number(record[name], where, name) for name in names if record[name] not in (None, "")}
        scores = record.get("scores")
        for one in scores if isinstance(scores, list) else ():
            if isinstance(one, dict) and one.get("value") is not None:
                name = str(one.get("explanationScoreTypeName") or "score")
                if name in found:
                    name = f"{name} by {one.get('explanationScoreModelName')}"
                found.setdefault(name, _number(one["value"], where, name))
        return found


@dataclass(frozen=True)
class _Columns:
    """What the columns of a record are, by their names."""

    key: str | None
    layer: str | None
    number: str | None
    set: str | None
    model: str | None
    text: str | None
    authors: tuple[str, ...]
    scores: tuple[str, ...]
    others: tuple[str, ...]


@lru_cache(256)
def _columns(names: tuple[str, ...], score_names: tuple[str, ...]) -> _Columns:
    plain = {plain_name(name): name for name in reversed(names) if name}

    def first(*roles: str) -> str | None:
        return next((plain[role] for role in roles if role in plain), None)

    key, layer, number = first(*KEYS), first("layer"), first(*PLACES)
    if key is None and layer is None:
        key = first("feature")
    own, model, text = first("set"), first("modelid"), first(*TEXTS)
    authors = tuple(plain[role] for role in AUTHORS if role in plain)
    scores = tuple(plain[role] for role in dict.fromkeys(score_names) if role in plain)
    place = (key, own) if key is not None else (layer, number, own, model)
    used = {*place, text, *authors, *scores, "scores", "explanations", ""}
    others = tuple(name for name in names if name not in used)
    return _Columns(key, layer, number, own, model, text, authors, scores, others)


def plain_name(name: str) -> str:
    """A column's name as it is compared."""
    return re.sub(r"[\s_-]", "", name).lower()


def _explanations(record: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """The record, or each of its `explanations` with what the record says of all."""
    inside = record.get("explanations")
    if not isinstance(inside, list):
        yield record
        return
    shared = {name: value for name, value in record.items()
              if plain_name(name) in ("modelid", "layer", "set", *KEYS, *PLACES)}  # fmt: skip
    for one in inside:
        yield {**shared, **_record(one, where)}


def _record(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise AtlasError(f"{where}: expected an object with a key and a text, found {type(value).__name__}")
    return value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_distinct)
    except ValueError as error:
        raise AtlasError(f"{where}: not JSON ({error})") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{visible(twice)} is there twice")
    return found


def _decoded(content: bytes, where: str, *, first: bool) -> str:
    if first and content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise AtlasError(f"{where}: UTF-16; save the file as UTF-8")
    try:
        return content.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        bad = content[error.start]
        raise AtlasError(f"{where}: byte {error.start + 1} ({bad:#04x}) is no UTF-8") from error


def _text(value: Any, where: str, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AtlasError(f"{where}: {name}: expected a text, found {type(value).__name__}")
    text = value.strip()
    if len(text) > MOST_TEXT:
        raise AtlasError(f"{where}: {name} of {len(text):,} characters; expected at most {MOST_TEXT:,}")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise AtlasError(f"{where}: {name}: half a surrogate pair is no character")
    return text


def _whole(value: Any, where: str, name: str) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch("[0-9]{1,9}", text):
        raise AtlasError(f"{where}: {name} {visible(text[:80])}: expected the number of a feature")
    return int(text)


def _layer(value: Any, where: str) -> tuple[int, str]:
    """A layer, and of a source's id (`8-res-jb`) the rest."""
    text = str(value).strip()
    match = None if isinstance(value, bool) else _SOURCE.fullmatch(text)
    if match is None:
        raise AtlasError(
            f"{where}: layer {visible(text[:80])}: expected a number, or a source's id that begins with it"
        )
    return int(match[1]), match[2] or ""


def _number(value: Any, where: str, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AtlasError(f"{where}: {name} {visible(str(value)[:80])}: expected a finite number")
    return number
