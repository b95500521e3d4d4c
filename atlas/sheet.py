"""The blind interpretability sheet (methods: Training and evaluating dictionaries): live features of two
dictionaries, shuffled, shown by their contexts alone, judged by a person, then counted.

`make_sheet` writes a folder:

    sheet.html   each feature's strongest contexts, its tokens shaded by activation
    sheet.csv    a row for each feature, to be filled in: interpretable, maybe or no
    key.json     which dictionary and feature each number is: not to be opened before

Nothing on the sheet tells the dictionaries apart: no number, no layer, no activation, only shades relative to
a feature's own largest. `score_sheet` counts the verdicts by dictionary, with an exact test.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas.answers import Answer, Table
from atlas.errors import AtlasError
from atlas.folder import write_atomically
from atlas.svg import printable
from ingest.errors import InputError

if TYPE_CHECKING:
    from ingest.contexts import Contexts
    from ingest.dictionaries import DictionarySet
    from ingest.models import ResidualModel
    from workers.examples import Example

__all__ = ["VERDICTS", "make_sheet", "score_sheet"]

VERDICTS = ("interpretable", "maybe", "no")
SHOWN, AROUND = 8, 14  # contexts of a feature; tokens on each side of its peak
COLUMNS = ("sheet", "feature", "verdict", "note")
FILES = ("sheet.html", "sheet.csv", "key.json")

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#1f2328}
section{border-top:1px solid #d8dee4;padding:.5em 0}h2{font-size:1em;margin:.4em 0}
p{margin:.25em 0;white-space:pre-wrap;font-family:ui-monospace,Consolas,monospace;font-size:13px}
mark{color:inherit;border-radius:2px}mark.peak{outline:1px solid #d55e00}
"""


def make_sheet(
    model: ResidualModel,
    sets: Sequence[DictionarySet],
    contexts: Contexts,
    out: str | Path,
    *,
    features: int = 50,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[float, float, str], None] | None = None,
) -> Answer:
    """Writes the sheet of `features` live features of each of two sets into the folder `out`.

    All layers of a set are drawn from alike. Raises InputError where a set has too few live features on these
    contexts, and AtlasError where a sheet is there already.
    """
    from workers.examples import examples_of, peaks_of

    if len(sets) != 2:
        raise InputError(f"a sheet compares two sets of dictionaries, {len(sets)} given")
    folder = _folder(Path(out), overwrite)
    random = np.random.default_rng(seed)
    places = [(one, layer) for one in sets for layer in one.layers]
    loaded = [one.load(layer) for one, layer in places]
    centred = [one.layout.folded and model.facts.norm.centred for one, _ in places]
    peaks = peaks_of(model, loaded, contexts, SHOWN, centred, progress)
    drawn: list[tuple[int, int]] = []  # (place, feature)
    for one in sets:
        live = [
            (at, int(feature))
            for at, (owner, _) in enumerate(places)
            if owner is one
            for feature in peaks[at].live
        ]
        if len(live) < features:
            raise InputError(
                f"{one.name}: {len(live)} features fire on these {len(contexts)} contexts, {features} are "
                f"wanted; give more contexts or fewer features"
            )
        drawn.extend(live[at] for at in random.permutation(len(live))[:features])
    drawn = [drawn[at] for at in random.permutation(len(drawn))]
    chosen = [[feature for where, feature in drawn if where == at] for at in range(len(places))]
    examples = examples_of(model, loaded, contexts, peaks, chosen, centred, progress)
    texts = model.token_texts()
    entries = [
        {"set": places[at][0].name, "layer": places[at][1], "feature": feature} for at, feature in drawn
    ]
    key = {"model": model.name, "sets": [one.name for one in sets], "seed": seed, "features": entries}
    sheet = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    sections = [_section(at, examples[place], texts) for at, place in enumerate(drawn, start=1)]
    write_atomically(folder / "sheet.html", _page(sheet, sections))
    rows = ["\t".join(COLUMNS).replace("\t", ",")] + [f"{sheet},{at},," for at in range(1, len(drawn) + 1)]
    write_atomically(folder / "sheet.csv", "\n".join(rows) + "\n")
    write_atomically(folder / "key.json", json.dumps({"sheet": sheet, **key}, indent=1) + "\n")
    facts = {
        "features": len(drawn),
        "contexts": len(contexts),
        **{name: str(folder / name) for name in FILES},
    }
    notes = (f"fill in sheet.csv ({', '.join(VERDICTS)}) without the key, then: atlas sheet score {folder}",)
    return Answer(f"sheet {sheet}", facts, {}, notes)


def _folder(folder: Path, overwrite: bool) -> Path:
    there = [name for name in FILES if (folder / name).exists()]
    if there and not overwrite:
        raise AtlasError(f"{folder}: holds {', '.join(there)}; a sheet is not written over without --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AtlasError(f"{folder}: cannot be made ({error.strerror})") from None
    return folder


def _page(sheet: str, sections: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>sheet {sheet}</title>'
        f"<style>{_STYLE}</style><h1>Sheet {sheet}</h1>"
        f"<p>{len(sections)} features. Write into sheet.csv for each of them: {', '.join(VERDICTS)}. "
        f"Tokens are shaded by the feature's activation, relative to its largest; the outlined one is a "
        f"context's peak.</p>" + "".join(sections) + "</html>\n"
    )


def _section(number: int, examples: Sequence[Example], texts: Sequence[str]) -> str:
    largest = max(float(np.abs(one.activations).max()) for one in examples)
    lines = "".join(f"<p>{_line(one, texts, largest)}</p>" for one in examples)
    return f"<section><h2>Feature {number}</h2>{lines}</section>\n"


def _line(one: Example, texts: Sequence[str], largest: float) -> str:
    pieces = []
    for at in range(max(0, one.peak - AROUND), min(len(one.tokens), one.peak + AROUND + 1)):
        text = escape(printable(texts[int(one.tokens[at])].replace("\n", "↵")))
        share = abs(float(one.activations[at])) / largest
        if share <= 0 and at != one.peak:
            pieces.append(text)
            continue
        peak = ' class="peak"' if at == one.peak else ""
        pieces.append(f'<mark{peak} style="background:rgba(230,159,0,{max(share, 0.05):.2f})">{text}</mark>')
    return "".join(pieces)


# --- scoring ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Verdict:
    line: int
    number: int
    verdict: str | None


def score_sheet(
    folder: str | Path, filled: str | Path | None = None, key: str | Path | None = None
) -> Answer:
    """Counts of verdicts by dictionary, and the exact chance of a division as uneven.

    filled: the CSV, if it is not the folder's sheet.csv; key likewise. Raises InputError for a key of another
    sheet, a verdict that is none, a feature twice, and a sheet that nobody has filled in.
    """
    from workers.measures import exact_p

    table, known = Path(filled or Path(folder) / "sheet.csv"), Path(key or Path(folder) / "key.json")
    stored = _key(known)
    entries: list[dict[str, Any]] = stored["features"]
    counts = {name: dict.fromkeys(VERDICTS, 0) for name in stored["sets"]}
    open_ = 0
    for one in _verdicts(table, stored["sheet"], len(entries)):
        if one.verdict is None:
            open_ += 1
        else:
            counts[entries[one.number - 1]["set"]][one.verdict] += 1
    first, second = ([counts[name][verdict] for verdict in VERDICTS] for name in stored["sets"])
    if not sum(first) or not sum(second):
        raise InputError(f"{table}: no verdict for one of the dictionaries; fill in {', '.join(VERDICTS)}")
    rows = [
        (name, *(counts[name][verdict] for verdict in VERDICTS), sum(counts[name].values()))
        for name in stored["sets"]
    ]
    yes = [(row[0], sum(row[1:])) for row in (first, second)]
    facts = {
        "p_all_verdicts": exact_p(first, second),
        "p_interpretable": exact_p(yes[0], yes[1]),
    }
    notes = [
        "p: Fisher's exact test, two-sided; interpretable against the rest, and all verdicts (Freeman-Halton)"
    ]
    if open_:
        notes.append(f"{open_} features have no verdict yet: they are not counted")
    verdicts = Table.of("verdicts", ("dictionary", *VERDICTS, "judged"), rows)
    return Answer(f"sheet {stored['sheet']}", facts, {"verdicts": verdicts}, tuple(notes))


def _key(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if (
            len(set(stored["sets"])) != 2
            or len(stored["sets"]) != 2
            or not all(one["set"] in stored["sets"] for one in stored["features"])
        ):
            raise ValueError("features of other sets than its two")
        str(stored["sheet"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: is no key of a sheet ({type(error).__name__}: {error})") from None
    return stored


def _verdicts(file: Path, sheet: str, count: int) -> list[_Verdict]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    delimiter = ";" if text.partition("\n")[0].count(";") > text.partition("\n")[0].count(",") else ","
    # Lines as CSV has them: a note may hold other breaks.
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        if missing := [name for name in COLUMNS[:3] if name not in (reader.fieldnames or ())]:
            raise InputError(f"{file}: column {missing[0]} is missing; expected {', '.join(COLUMNS)}")
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"{file}:{reader.line_num}: is not CSV ({error})") from None
    found: dict[int, _Verdict] = {}
    for line, row in rows:
        if row["sheet"] != sheet:
            raise InputError(f"{file}:{line}: of sheet {row['sheet']!r}, the key is of {sheet!r}")
        given = row["feature"] or ""
        number = int(given) if given.isdecimal() and len(given) < 10 else 0
        if not 1 <= number <= count or number in found:
            what = "stands there twice" if number in found else f"is none of 1 to {count}"
            raise InputError(f"{file}:{line}: feature {given[:20]!r} {what}")
        found[number] = _Verdict(line, number, _verdict(file, line, row["verdict"] or ""))
    if len(found) < count:
        absent = next(number for number in range(1, count + 1) if number not in found)
        raise InputError(f"{file}: feature {absent} is missing; leave its verdict empty where there is none")
    return [found[number] for number in sorted(found)]


def _verdict(file: Path, line: int, text: str) -> str | None:
    """A verdict by its word or the beginning of it."""
    given = text.strip().lower()
    if not given:
        return None
    matching = [verdict for verdict in VERDICTS if verdict.startswith(given)]
    if len(matching) != 1:
        raise InputError(f"{file}:{line}: verdict {text!r}: expected {', '.join(VERDICTS)}")
    return matching[0]
