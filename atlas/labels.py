"""Labels of features: explanations from files, imported with their source, listed, taken out again.

    files → rows → features of this atlas → an artifact for each model (dictionary hash, number, text, scores)
          → a run that names it → a new generation, by the switch of every load

An import is a run of its own, so every later load and build applies it. The artifact names features by the
hash of their dictionary: labels outlive a rebuild, and a dictionary that is gone and comes back. Of several
explanations of one feature all are kept; the one with the best score is shown, without scores the first, and
of several imports the last one's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.answers import Answer, Table
from atlas.errors import AtlasError
from atlas.folder import AtlasFolder
from atlas.label_files import LabelFile, label_files, plain_name
from atlas.label_places import Places
from atlas.loading.runs import RunManifest, UsedStep

if TYPE_CHECKING:
    import pyarrow as pa

    from atlas.api import Atlas
    from workers.steps import Step

__all__ = ["Imported", "import_labels", "imports", "labels_of_feature", "remove_labels"]

MOST_LABELS = 20_000_000
VERSION = 1  # of the artifact's content

Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Imported:
    """What an import came to. `notes` are for the user."""

    atlas: str
    source: str
    run: str
    labels: int
    features: int
    score: str | None
    """The score by which labels of one feature are ranked."""
    notes: tuple[str, ...] = ()

    def answer(self) -> Answer:
        """The same, to be printed."""
        facts = {
            name: getattr(self, name) for name in ("atlas", "source", "run", "labels", "features", "score")
        }
        title = f"{self.labels:,} labels of {self.features:,} features from {self.source}"
        return Answer(title, facts, notes=self.notes)


@dataclass
class _Labels:
    """The labels of one feature, in the order of the files: text → (scores, author)."""

    texts: dict[str, tuple[Mapping[str, float], str | None]] = field(default_factory=dict)

    def ranked(self, score: str | None) -> list[tuple[str, Mapping[str, float], str | None]]:
        """The best first: by that score where there is one, then as they came."""
        found = [(text, *rest) for text, rest in self.texts.items()]
        lowest = float("-inf")
        return sorted(found, key=lambda one: -(one[1].get(score, lowest) if score else lowest))


def import_labels(
    atlas: str | Path,
    files: Sequence[str | Path],
    source: str,
    *,
    set: str | None = None,
    score: str | None = None,
    add: bool = False,
    replace: bool = False,
    skip_unknown: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Reads labels from files (or folders of files) and loads them into the atlas.

    source: who made them, shown with each. set: the dictionary set that they are of (its name, model/name or
    alias), where the files do not say. score: the column by which the labels of a feature are ranked, by
    default the first score found. add, replace: what to do with earlier imports of this source.
    skip_unknown: leave out, and count, what names no feature of this atlas. Raises AtlasError naming file
    and line, with the atlas as it was.
    """
    from atlas.api import open as open_atlas
    from atlas.load import load_run

    source = _checked_source(source)
    if add and replace:
        raise AtlasError("add to the earlier labels or replace them: expected one of them")
    paths = label_files([Path(file) for file in files])
    folder = AtlasFolder.open(atlas)
    earlier = [run for run in _label_runs(folder) if _about(run)["source"] == source]
    with open_atlas(atlas) as opened:
        places = Places(opened.dictionaries, set, skip_unknown)
        hashes = dict(opened.store.query("MATCH (d:Dictionary) RETURN d.key, d.hash").rows)
        found_sets = opened.store.query("MATCH (s:DictionarySet) RETURN s.model, s.name, s.kind").rows
        kinds = {f"{model}/{name}": kind for model, name, kind in found_sets}
    read = [LabelFile(path, score) for path in paths]
    found, score, counted = _collected(read, places, score, progress)
    notes = [*_notes(read, found, places, counted, score), *places.origin_notes(kinds)]
    begun = _now()
    steps = _steps(folder, found, hashes, source, score)
    about = {
        "source": source,
        "sets": sorted({f"{d.model}/{d.set}" for d in places.seen}),
        "files": [{"name": file.path.name, "sha256": file.sha256} for file in read],
        "score": score,
    }
    run = _run_of(about, steps, begun)
    same = next((known for known in earlier if known.run == run.run), None)
    if earlier and same is None and not (add or replace):
        raise AtlasError(
            f"{folder.path}: labels of {source} are there already (imports: {len(earlier)}); say --replace to"
            " put these in their place, --add to keep both, or give another --source"
        )
    gone = [known.run for known in earlier if replace and known is not same]
    if same is not None and not gone:
        notes.append("the atlas had these labels already: nothing was changed")
    loaded = load_run(atlas, same or run, progress=progress, replace=gone)
    notes += [f"earlier imports of {source}, replaced: {len(gone)}"] if gone else []
    labels, features = counted["labels"], len(found)
    return Imported(str(atlas), source, run.run, labels, features, score, (*notes, *loaded.notes))


def remove_labels(atlas: str | Path, source: str, progress: Progress | None = None) -> Answer:
    """Takes all imports of a source out of the atlas. Raises AtlasError naming the sources that there are."""
    from atlas.load import remove_runs

    folder = AtlasFolder.open(atlas)
    runs = _label_runs(folder)
    own = [run.run for run in runs if _about(run)["source"] == source]
    if not own:
        sources = dict.fromkeys(_about(run)["source"] for run in runs)
        raise AtlasError(f"{folder.path}: no labels of {source}; there are {', '.join(sources) or 'none'}")
    report = remove_runs(atlas, own, progress)
    facts = {"atlas": str(atlas), "source": source, "imports": len(own)}
    return Answer(f"removed the labels of {source}", facts, notes=report.notes)


def imports(atlas: Atlas) -> Table:
    """The imports of labels, in their order: how many labels, how many features they are of, how many of
    those this atlas holds, and how many show them.
    """
    folder = AtlasFolder.open(atlas.uri)
    held = {hash for (hash,) in atlas.store.query("MATCH (d:Dictionary) RETURN d.hash").rows}
    shown = dict(
        atlas.store.query(
            "MATCH (f:Feature) WHERE f.label_source IS NOT NULL RETURN f.label_source AS source, count(*)"
        ).rows
    )
    rows, absent = [], []
    for run in _label_runs(folder):
        about = _about(run)
        counts = [entry for step in run.steps for entry in _figures(folder, step.name)["dictionaries"]]
        missing = [entry for entry in counts if entry["hash"] not in held]
        labels, features = (sum(entry[name] for entry in counts) for name in ("labels", "features"))
        here = features - sum(entry["features"] for entry in missing)
        files = ", ".join(file["name"] for file in about["files"])
        rows.append((about["source"], about["sets"], labels, features, here, files, run.ended, run.run))
        absent += [
            f"{about['source']}: the atlas does not hold {entry['key']} as it was when {entry['features']:,}"
            " of its features were labelled"
            for entry in missing
        ]
    notes = [f"features that show a label of {source}: {count:,}" for source, count in sorted(shown.items())]
    columns = ("source", "sets", "labels", "features", "held", "files", "imported", "run")
    return Table.of("imports of labels", columns, rows, notes=[*notes, *absent])


def labels_of_feature(atlas: Atlas, key: str) -> Table:
    """Every label of a feature, the one that is shown first. Raises AtlasError for no such feature."""
    import pyarrow.parquet as pq

    feature = atlas.feature(key)
    folder = AtlasFolder.open(atlas.uri)
    place = feature.key.rpartition("/")[0]
    ((hash,),) = atlas.store.query(
        "MATCH (d:Dictionary) WHERE d.key = $key RETURN d.hash", {"key": place}
    ).rows
    rows: list[tuple[Any, ...]] = []
    for run in reversed(_label_runs(folder)):
        for step in run.steps:
            path = folder.artifact(step.name) / "labels.parquet"
            if not path.exists():
                raise AtlasError(f"{path}: missing; import the labels again, with --replace")
            wanted = [("dictionary", "==", hash), ("number", "==", feature.number)]
            own = pq.read_table(path, filters=wanted).to_pylist()
            for row in sorted(own, key=lambda row: row["rank"]):
                scores = json.loads(row["scores"] or "{}")
                rows.append((row["label"], row["label_source"], row["label_score"], scores, row["author"]))
    columns = ("label", "source", "score", "scores", "author")
    return Table.of(f"labels of {feature.key}, the one shown first", columns, rows)


def _checked_source(source: str) -> str:
    source = source.strip()
    if not source or len(source) > 100 or not source.isprintable():
        raise AtlasError("source: expected a name of 1 to 100 printable characters: who made the labels")
    return source


def _label_runs(folder: AtlasFolder) -> list[RunManifest]:
    from atlas.load import loaded_runs

    return [run for run in loaded_runs(folder) if "labels" in json.loads(run.spec)]


def _about(run: RunManifest) -> dict[str, Any]:
    return json.loads(run.spec)["labels"]


def _figures(folder: AtlasFolder, step: str) -> dict[str, Any]:
    return json.loads((folder.artifact(step) / "figures.json").read_text(encoding="utf-8"))


Found = dict[tuple[str, int], _Labels]
"""By the dictionary's key and the feature's number."""


def _collected(
    files: Iterable[LabelFile], places: Places, score: str | None, progress: Progress | None
) -> tuple[Found, str | None, dict[str, int]]:
    """The labels by feature, the name of the score that ranks them, and counts: labels, twice, unknown."""
    found: Found = {}
    scores: dict[str, None] = {}
    counted = {"labels": 0, "twice": 0, "unknown": 0}
    for file in files:
        for row in file.rows():
            place = places.of(row)
            if place is None:
                counted["unknown"] += 1
                continue
            labels = found.setdefault((place[0].key, place[1]), _Labels())
            if row.text in labels.texts:
                counted["twice"] += 1
                continue
            labels.texts[row.text] = (row.scores, row.author)
            scores.update(dict.fromkeys(row.scores))
            counted["labels"] += 1
            if counted["labels"] > MOST_LABELS:
                raise AtlasError(f"{row.where}: more than {MOST_LABELS:,} labels in one import")
            if progress is not None and counted["labels"] % 1000 == 0:
                progress(counted["labels"], 0, "labels")
    if not found:
        raise AtlasError(f"{', '.join(str(file.path) for file in files)}: no labels in it")
    if score is not None:
        named = next((name for name in scores if plain_name(name) == plain_name(score)), None)
        if named is None:
            raise AtlasError(f"score {score}: no row has one; there are {', '.join(scores) or 'no scores'}")
        return found, named, counted
    return found, next(iter(scores), None), counted


def _notes(
    files: Sequence[LabelFile], found: Found, places: Places, counted: Mapping[str, int], score: str | None
) -> list[str]:
    notes = []
    if several := sum(len(labels.texts) > 1 for labels in found.values()):
        which = f"the one with the highest {score}" if score else "the first"
        notes.append(f"features with several labels: {several:,}; {which} is shown, all are kept")
    if counted["twice"]:
        notes.append(f"rows that say again what another says, left out: {counted['twice']:,}")
    if empty := sum(file.empty for file in files):
        notes.append(f"rows without a text, left out: {empty:,}")
    if counted["unknown"]:
        notes.append(
            f"rows that name no feature of this atlas, left out: {counted['unknown']:,}"
            f" (the first: {places.first_unknown})"
        )
    columns = dict.fromkeys(name for file in files for name in file.columns)
    if columns:
        shown = ", ".join(list(columns)[:12]) + (", …" if len(columns) > 12 else "")
        notes.append(f"columns not kept: {shown}")
    return notes


def _steps(
    folder: AtlasFolder, found: Found, hashes: Mapping[str, str], source: str, score: str | None
) -> list[Step]:
    """The artifacts, one for each model, written unless they are there; as the steps that they are of."""
    by_model: dict[str, Found] = {}
    for (key, number), labels in found.items():
        by_model.setdefault(key.partition("/")[0], {})[key, number] = labels
    return [_artifact(folder, own, hashes, source, score) for _, own in sorted(by_model.items())]


def _artifact(
    folder: AtlasFolder, found: Found, hashes: Mapping[str, str], source: str, score: str | None
) -> Step:
    import pyarrow.parquet as pq

    from workers.artifacts import Artifacts
    from workers.steps import Done, Step, canonical_json

    rows = _rows(found, hashes, source, score)
    digest = hashlib.sha256()
    for batch in rows.to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            digest.update(canonical_json(row).encode())
    counts: dict[str, dict[str, Any]] = {}
    for (key, _), labels in sorted(found.items()):
        entry = counts.setdefault(key, {"hash": hashes[key], "key": key, "labels": 0, "features": 0})
        entry["labels"] += len(labels.texts)
        entry["features"] += 1
    step = Step(
        "labels", VERSION, {"source": source}, {"labels": f"sha256:{digest.hexdigest()}"},
        title=f"labels from {source}",
    )  # fmt: skip
    artifacts = Artifacts(folder.artifacts)
    artifacts.sweep()
    if not artifacts.has(step.name):
        with artifacts.writing(step.name) as out:
            pq.write_table(rows, out / "labels.parquet", compression="zstd", row_group_size=100_000)
            artifacts.publish(step, out, Done({"dictionaries": list(counts.values())}))
    return step


def _rows(found: Found, hashes: Mapping[str, str], source: str, score: str | None) -> pa.Table:
    import pyarrow as pa

    from atlas.schema import artifact_schema

    columns: dict[str, list[Any]] = {name: [] for name in artifact_schema("labels").names}
    for (key, number), labels in sorted(found.items(), key=lambda item: (hashes[item[0][0]], item[0][1])):
        for rank, (text, scores, author) in enumerate(labels.ranked(score), 1):
            best = scores.get(score) if score else None
            said = json.dumps(dict(scores), sort_keys=True, ensure_ascii=False) if scores else None
            values = (hashes[key], number, rank, text, source, best, said, author)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    arrays = [
        pa.array(values, pa.string()).cast(field.type) if pa.types.is_dictionary(field.type)
        else pa.array(values, field.type)
        for values, field in zip(columns.values(), artifact_schema("labels"), strict=True)
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=artifact_schema("labels"))


def _run_of(about: Mapping[str, Any], steps: Sequence[Step], begun: str) -> RunManifest:
    from atlas.building import code_version
    from workers.steps import canonical_json

    spec = canonical_json({"labels": about})
    names = sorted(step.name for step in steps)
    run = hashlib.sha256(canonical_json({"labels": about, "steps": names}).encode()).hexdigest()
    used = tuple(UsedStep(step.name, step.kind, step.title) for step in steps)
    return RunManifest(run, spec, code_version(), begun, _now(), "done", used)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
