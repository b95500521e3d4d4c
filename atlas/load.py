"""Loading: from the artifacts of finished runs to a new generation of the atlas, and the switch to it.

A generation is built from nothing, from the artifacts of all runs loaded, in a folder that no reader sees:

    steps of the runs → node rows (ids, keys) → COPY
                      → edge rows (ends as ids, sorted, distinct, finite), one type after the other
                            → COPY, by another thread      } side by side
                            → csr/<generation>/<TYPE>/     }
    row counts compared → ids.parquet → CURRENT → generations that nobody holds are removed

So a load is idempotent, removing a run is loading the others, and a load that is killed leaves nothing
that a reader or the next load could take for whole. What is loaded is written in
`db/<generation>/generation.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from atlas.errors import AtlasError, DiskFull
from atlas.folder import AtlasFolder, disk_errors
from atlas.loading.artifact_files import ArtifactFile, artifact_files
from atlas.loading.edges import EdgeRows, edge_rows
from atlas.loading.ids import Blocks
from atlas.loading.nodes import NodeRows, head_rows, node_rows
from atlas.loading.runs import RunManifest, UsedStep
from atlas.schema import SCHEMA_VERSION
from atlas.store.arrays import write_arrays
from atlas.store.embedded_writer import EmbeddedWriter

__all__ = [
    "LoadReport",
    "RunManifest",
    "UsedStep",
    "load_all",
    "load_run",
    "loaded_runs",
    "remove_model",
    "remove_run",
    "remove_runs",
]

Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is, and the unit."""

EDGE_TYPES = ("EMBEDS", "PROMOTES", "DIRECT", "VIA_HEAD")  # the short ones first: the database starts sooner


@dataclass(frozen=True)
class LoadReport:
    """What a load did. `rebuilt` is false if the atlas already held just that. `notes` are for the user."""

    generation: str
    rebuilt: bool
    counts: dict[str, int]
    notes: tuple[str, ...] = ()


def load_run(
    atlas: str | Path,
    manifest: RunManifest,
    progress: Progress | None = None,
    *,
    replace: Collection[str] = (),
    memory: int | None = None,
) -> LoadReport:
    """Adds a run to the atlas, which is made if it is not there; a run that is loaded already is replaced.

    `replace` names runs that go in the same switch. `memory` bounds the database's buffers, in bytes.
    Raises `AtlasError`, with the atlas as it was, for artifacts that are missing, contradict each other
    or hold values that are not finite, for a full disk and for a folder that cannot be written.
    """
    folder = AtlasFolder.create(atlas)
    with _only_writer(folder):
        runs = {run.run: run for run in loaded_runs(folder) if run.run not in replace}
        runs[manifest.run] = manifest
        report = _generation(folder, list(runs.values()), progress, memory)
        _keep_manifests(folder, runs.values())
    return report


def load_all(atlas: str | Path, progress: Progress | None = None, *, memory: int | None = None) -> LoadReport:
    """Builds the database again from the artifacts of the runs loaded, whatever state it is in."""
    folder = AtlasFolder.open(atlas)
    with _only_writer(folder):
        return _generation(folder, loaded_runs(folder), progress, memory, again=True)


def remove_run(atlas: str | Path, run: str, progress: Progress | None = None) -> LoadReport:
    """Removes a run and what no other run used. Its artifacts stay. Raises `AtlasError` if it is not
    loaded.
    """
    return remove_runs(atlas, [run], progress)


def remove_runs(atlas: str | Path, names: Collection[str], progress: Progress | None = None) -> LoadReport:
    """The same of several runs, in one switch."""
    folder = AtlasFolder.open(atlas)
    with _only_writer(folder):
        runs = loaded_runs(folder)
        left = [other for other in runs if other.run not in names]
        if missing := set(names) - {run.run for run in runs}:
            raise AtlasError(
                f"{folder.path}: no run {min(missing)}; there are {', '.join(r.run for r in runs) or 'none'}"
            )
        report = _generation(folder, left, progress, None)
        _keep_manifests(folder, left)
    return report


def remove_model(atlas: str | Path, model: str, progress: Progress | None = None) -> LoadReport:
    """Removes all that belongs to a model, by its name, from every run; a run with nothing else left goes.

    Raises `AtlasError` if the atlas has no such model.
    """
    folder = AtlasFolder.open(atlas)
    with _only_writer(folder):
        runs = loaded_runs(folder)
        steps = list(dict.fromkeys(step.name for run in runs for step in run.steps))
        files = artifact_files(folder, steps)
        own = _steps_of_model(files, model)
        if not own:
            raise AtlasError(
                f"{folder.path}: no model {model}; there are {', '.join(_model_names(files)) or 'none'}"
            )
        with_rows = {file.step for tables in files.values() for file in tables if file.rows}
        left = [run.without(own) for run in runs]
        left = [run for run in left if with_rows & {step.name for step in run.steps}]
        report = _generation(folder, left, progress, None)
        _keep_manifests(folder, left)
    return report


def loaded_runs(folder: AtlasFolder) -> list[RunManifest]:
    """The runs in the current generation, in the order in which they were first loaded."""
    current = folder.current()
    if current is None:
        return []
    try:
        contents = folder.contents(current)
    except FileNotFoundError as error:
        raise AtlasError(f"{folder.path}: generation {current} is missing; build again") from error
    return [RunManifest.from_json(run) for run in contents["runs"]]


def _keep_manifests(folder: AtlasFolder, runs: Iterable[RunManifest]) -> None:
    """Makes `runs/` what is loaded, also where a load was killed between its switch and this."""
    manifests = {f"{run.run}.json": run for run in runs}
    for run in manifests.values():
        run.write(folder)
    for path in folder.runs.glob("*.json"):
        if path.name not in manifests:
            path.unlink(missing_ok=True)


@contextmanager
def _only_writer(folder: AtlasFolder) -> Iterator[None]:
    lock = FileLock(folder.path / ".load.lock")
    with disk_errors(folder.path):
        try:
            lock.acquire(timeout=1)
        except Timeout as error:
            raise AtlasError(
                f"{folder.path}: another process is loading into this atlas; wait for it"
            ) from error
    try:
        folder.remove_old_generations()  # those of a load that was killed, and those no longer held
        yield
        folder.remove_old_generations()
    finally:
        lock.release()


def _generation(
    folder: AtlasFolder,
    runs: Sequence[RunManifest],
    progress: Progress | None,
    memory: int | None,
    *,
    again: bool = False,
) -> LoadReport:
    """Builds a generation of these runs and switches to it, unless the current one is just that."""
    wanted = {"schema": SCHEMA_VERSION, "runs": json.loads(json.dumps([asdict(run) for run in runs]))}
    current = folder.current()
    if current is not None and not again:
        contents = folder.contents(current)
        if {key: contents[key] for key in wanted} == wanted:
            return LoadReport(current, False, contents["counts"])
    name = folder.new_generation()
    try:
        with disk_errors(folder.path):
            counts, notes = _Build(folder, name, runs, progress, memory or _memory()).run()
            contents = {**wanted, "counts": counts}
            (folder.generation(name) / "generation.json").write_text(json.dumps(contents, ensure_ascii=False))
            _flush(folder.database(name))
        folder.switch(name)
    except BaseException:
        folder.remove_generation(name)
        raise
    return LoadReport(name, True, counts, notes)


def _memory() -> int:
    """Half of what the machine has free, at most 8 GB: a bound, taken only as far as a table needs it."""
    return int(min(8 << 30, max(512 << 20, psutil.virtual_memory().available // 2)))


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass
class _Build:
    """One generation being filled: this thread maps rows and writes arrays, another one copies."""

    folder: AtlasFolder
    name: str
    runs: Sequence[RunManifest]
    progress: Progress | None
    memory: int
    _counts: dict[str, int] = field(default_factory=dict)
    _total: int = 0
    _done: int = 0

    def run(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """Row counts, and notes for the user."""
        steps = list(dict.fromkeys(step.name for run in self.runs for step in run.steps))
        files = artifact_files(self.folder, steps)
        self._total = sum(file.rows for tables in files.values() for file in tables)
        blocks = Blocks.read(self.folder.blocks)
        (self.folder.generation(self.name) / "mapped").mkdir()
        writer = EmbeddedWriter(self.folder.database(self.name), self.memory)
        with ThreadPoolExecutor(1) as thread:
            copies: list[Future[None]] = []
            try:
                nodes = node_rows(self.folder, self.runs, files, blocks)
                for label, table in nodes.tables.items():
                    if label != "Head":
                        copies.append(thread.submit(self._copy_nodes, writer, label, table))
                copies.append(thread.submit(self._copy_nodes, writer, "USED", nodes.used))
                totals = self._edges(writer, thread, copies, files, nodes, blocks.end)
                heads = head_rows(nodes.tables["Head"], *totals)
                copies.append(thread.submit(self._copy_nodes, writer, "Head", heads))
                for copy in copies:
                    copy.result()
                writer.finish(self._counts)
            except BaseException as error:
                for copy in copies:
                    copy.cancel()
                writer.interrupt()
                thread.shutdown(wait=True)
                ended = (copy.exception() for copy in copies if not copy.cancelled())
                full = any(isinstance(failure, OSError | DiskFull) for failure in (error, *ended))
                with suppress(RuntimeError):
                    writer.give_up(disk_full=full)
                raise
        shutil.rmtree(self.folder.generation(self.name) / "mapped")
        blocks.save()
        return self._counts, nodes.notes

    def _edges(
        self,
        writer: EmbeddedWriter,
        thread: ThreadPoolExecutor,
        copies: list[Future[None]],
        files: dict[str, list[ArtifactFile]],
        nodes: NodeRows,
        n_ids: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Maps every type of edge; returns the totals of the heads (edges, Σ|weight|)."""
        n_heads = len(nodes.tables["Head"])
        totals = np.zeros(n_heads, np.int64), np.zeros(n_heads)
        for type in EDGE_TYPES:
            for copy in copies:
                if copy.done():
                    copy.result()  # a failure there ends the load here
            edges = edge_rows(type, files[type], nodes)
            if len(edges):
                paths = self._write_mapped(edges, writer.rows_at_once)
                copies.append(thread.submit(self._copy, writer, type, paths, len(edges)))
            if type == "VIA_HEAD":
                totals = _head_totals(edges, nodes)
            kept = ("reading", "layer", "head", "z", "rank", "rank_in", "rank_out")
            write_arrays(
                self.folder.arrays(self.name) / type,
                edges.columns["source"],
                edges.columns["target"],
                edges.columns["weight"],
                {name: edges.columns[name] for name in kept if name in edges.columns},
                edges.readings,
                n_ids,
            )
            del edges
        return totals

    def _write_mapped(self, edges: EdgeRows, rows_at_once: int) -> list[Path]:
        paths: list[Path] = []
        for start in range(0, len(edges), rows_at_once):
            path = self.folder.generation(self.name) / "mapped" / f"{edges.type}-{len(paths)}.parquet"
            edges.write(path, slice(start, min(start + rows_at_once, len(edges))))
            paths.append(path)
        return paths

    def _copy(self, writer: EmbeddedWriter, name: str, paths: list[Path], rows: int) -> None:
        with disk_errors(self.folder.path):
            writer.copy(name, paths)
        for path in paths:
            path.unlink()
        self._counts[name] = rows
        self._done += rows
        if self.progress is not None:
            self.progress(min(self._done, self._total), self._total, "rows")

    def _copy_nodes(self, writer: EmbeddedWriter, name: str, table: pa.Table) -> None:
        if len(table) == 0:
            return
        path = self.folder.generation(self.name) / "mapped" / f"{name}.parquet"
        with disk_errors(self.folder.path):
            pq.write_table(table, path, compression="none")
        self._copy(writer, name, [path], len(table))


def _head_totals(edges: EdgeRows, nodes: NodeRows) -> tuple[np.ndarray, np.ndarray]:
    """Number and Σ|weight| of the edges through each head, in the order of the rows of the heads' table."""
    ids = nodes.tables["Head"]["id"].to_numpy()
    if len(ids) == 0:
        return np.zeros(0, np.int64), np.zeros(0)
    models = sorted(nodes.features.values(), key=lambda block: block.base)
    starts = np.array([block.base for block in models])
    bases = np.array([nodes.heads[block.model][0].base for block in models])
    per_layer = np.array([nodes.heads[block.model][1] for block in models])
    own = np.searchsorted(starts, edges.columns["source"], side="right") - 1
    head = bases[own] + edges.columns["layer"].astype(np.int64) * per_layer[own] + edges.columns["head"]
    place = head - ids.min()
    span = int(ids.max() - ids.min()) + 1
    counts = np.bincount(place, minlength=span)
    sums = np.bincount(place, np.abs(edges.columns["weight"]), minlength=span)
    return counts[ids - ids.min()], sums[ids - ids.min()]


def _model_names(files: dict[str, list[ArtifactFile]]) -> list[str]:
    return sorted(set().union(*(file.names("name") for file in files["models"])))


def _steps_of_model(files: dict[str, list[ArtifactFile]], model: str) -> set[str]:
    """The steps whose tables hold something of the model of this name."""
    hashes = set()
    for file in files["models"]:
        hashes |= {row["hash"] for row in file.read().to_pylist() if row["name"] == model}
    for file in files["dictionaries"]:
        hashes |= {row["hash"] for row in file.read().to_pylist() if row["model"] in hashes}
    naming = ("model", "hash", "dictionary", "source_dictionary", "target_dictionary")
    found = set()
    for tables in files.values():
        for file in tables:
            own = [column for column in naming if column in file.parquet.schema_arrow.names]
            if any(file.names(column) & hashes for column in own):
                found.add(file.step)
    return found
