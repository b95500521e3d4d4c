"""The artifact folder: results named by the hash of what made them, whole or absent.

    <root>/<2 hex>/<hash>/      the step's files, figures.json, manifest.json (size and sha256 of each),
                                expansion.json where the step answered with further steps
    <root>/tmp/<hash>-<random>  being written; a lock beside it is held by the process that writes it

A folder appears under its own name by one rename, after its files reached the disk. Nothing in it tells who
made it or when, so it is the same bytes whenever and wherever it is built.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ingest.errors import InputError
from workers.steps import Done, Expand, Step, canonical_json

__all__ = ["Artifacts", "disk_errors", "sole_builder"]

FIGURES, MANIFEST, EXPANSION = "figures.json", "manifest.json", "expansion.json"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full disk, and a folder that may not be read or written, into one line for the user.

    Raises InputError for those; every other error passes.
    """
    try:
        yield
    except OSError as error:
        inside = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(folder)
        if error.errno in _FULL:
            raise InputError(
                f"{folder}: the disk is full ({error.strerror}); free some space and run again, "
                "finished steps are kept"
            ) from error
        if error.errno in _FORBIDDEN and (inside or error.errno == errno.EROFS):
            raise InputError(
                f"{folder}: cannot be used ({error.strerror}); make it writable or choose another folder"
            ) from error
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{folder}: expected a folder, found a file there or on the way") from error


class Artifacts:
    """The finished results under one folder. Safe to use from many threads and processes at once."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        """Where the step's folder is, or will be."""
        return self.root / name[:2] / name

    def has(self, name: str) -> bool:
        """Whether the step's result is there with every file at its full size (cheap; see `verify`)."""
        return not self._damage(self.path(name), hashes=False)

    def verify(self, name: str) -> list[str]:
        """What is wrong with a result, one line a file; empty when it is whole. Reads and hashes it all."""
        return self._damage(self.path(name), hashes=True)

    def names(self) -> list[str]:
        """The steps that have a folder here, sorted."""
        return sorted(folder.name for folder in self.root.glob("[0-9a-f][0-9a-f]/*") if folder.is_dir())

    def figures(self, name: str) -> dict[str, Any]:
        """The figures that the step answered with."""
        return json.loads((self.path(name) / FIGURES).read_text(encoding="utf-8"))

    def expansion(self, name: str) -> tuple[Step, ...] | None:
        """The steps that the step answered with; None where it answered Done."""
        return _expansion(self.path(name))

    @staticmethod
    def expanded(folder: Path) -> tuple[Path, ...]:
        """The folders of all that a step expanded into, in its order, expansions of expansions in place.

        folder: what a merging step was given for that input. A folder of a step that did not expand is
        returned as it is, so a merge need not know.
        """
        steps = _expansion(folder)
        if steps is None:
            return (folder,)
        here = Artifacts(folder.parent.parent)
        return tuple(path for step in steps for path in Artifacts.expanded(here.path(step.name)))

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A temporary folder on the same filesystem, for the step to write into; gone when the block ends.

        Raises InputError where the folder cannot be written or the disk is full.
        """
        with disk_errors(self.root):
            tmp = self.root / "tmp"
            _make(tmp)
            folder = tmp / f"{name}-{uuid.uuid4().hex[:12]}"
            lock = _lock_of(folder)
            with lock:
                try:
                    folder.mkdir()
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                    Path(lock.lock_file).unlink(missing_ok=True)

    def publish(self, step: Step, folder: Path, answer: Done | Expand) -> None:
        """Gives the written folder the step's name. Where a whole result is there already, that one stays.

        Raises ValueError for a file that is not the step's to write and for figures that JSON cannot hold.
        """
        figures = answer.figures if isinstance(answer, Done) else {}
        for reserved in (FIGURES, MANIFEST, EXPANSION):
            if (folder / reserved).exists():
                raise ValueError(f"step '{step}' wrote {reserved}, which is written for it")
        _write(folder / FIGURES, canonical_json(dict(figures)))
        if isinstance(answer, Expand):
            _write(folder / EXPANSION, canonical_json([child.as_json() for child in answer.steps]))
        files = {path.relative_to(folder).as_posix(): _sealed(path) for path in _files(folder)}
        _write(folder / MANIFEST, canonical_json({"files": files}))
        _sealed(folder / MANIFEST)
        for directory in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
            _sync(directory)

        target = self.path(step.name)
        _make(target.parent)
        while not self.has(step.name):
            try:
                folder.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Another writer was first, or the folder there is damaged: only the latter makes way.
                if not self.has(step.name):
                    self.discard(step.name)
            else:
                _sync(target.parent)
                _sync(self.root)

    def discard(self, name: str) -> None:
        """Removes a step's folder: it leaves its name by a rename first, so nobody sees half of it."""
        with disk_errors(self.root):
            if not self.path(name).exists():
                return
            with self.writing(name) as folder:
                try:
                    self.path(name).rename(folder / "discarded")
                except FileNotFoundError:
                    return  # another process discarded it

    def sweep(self) -> None:
        """Removes what processes that died left half-written; what living ones are writing stays."""
        with disk_errors(self.root):
            tmp = self.root / "tmp"
            entries = list(tmp.iterdir()) if tmp.is_dir() else []
            for folder in {entry.with_name(entry.name.removesuffix(".lock")) for entry in entries}:
                lock = _lock_of(folder)
                try:
                    with lock.acquire(timeout=0):
                        shutil.rmtree(folder, ignore_errors=True)
                        Path(lock.lock_file).unlink(missing_ok=True)
                except Timeout:
                    continue

    def _damage(self, folder: Path, *, hashes: bool) -> list[str]:
        try:
            listed: Mapping[str, Mapping[str, Any]] = json.loads((folder / MANIFEST).read_bytes())["files"]
        except (FileNotFoundError, NotADirectoryError):
            return [f"{folder / MANIFEST}: missing"]
        except (ValueError, KeyError, TypeError):
            return [f"{folder / MANIFEST}: damaged"]
        found = []
        for relative, expected in listed.items():
            path = folder / relative
            if not path.is_file():
                found.append(f"{path}: missing")
            elif path.stat().st_size != expected["bytes"]:
                found.append(f"{path}: expected {expected['bytes']} bytes, found {path.stat().st_size}")
            elif hashes and _sha256(path) != expected["sha256"]:
                found.append(f"{path}: its content is not what was written (sha256 differs)")
        if hashes:
            strangers = {p.relative_to(folder).as_posix() for p in _files(folder)} - {*listed, MANIFEST}
            found += [f"{folder / stranger}: not part of the result" for stranger in sorted(strangers)]
        return found


@contextmanager
def sole_builder(atlas: Path) -> Iterator[None]:
    """Holds an atlas for one building process.

    Raises InputError, naming the holder's process, when another one builds it.
    """
    with disk_errors(atlas):
        _make(atlas)
        holder = atlas / "builder.pid"
        lock = FileLock(atlas / "builder.lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            pid = holder.read_text().strip() if holder.exists() else ""
            who = f"process {pid}" if pid else "another process"
            raise InputError(
                f"{atlas}: {who} is building this atlas; wait for it, or stop it and run again"
            ) from None
        try:
            holder.write_text(f"{os.getpid()}\n")
            yield
        finally:
            holder.unlink(missing_ok=True)
            lock.release()


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"), thread_local=False)


def _expansion(folder: Path) -> tuple[Step, ...] | None:
    try:
        listed = json.loads((folder / EXPANSION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return tuple(Step.from_json(value) for value in listed)


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def _files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: a step's result holds plain files only")
    return paths


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(path: Path) -> dict[str, Any]:
    """Sees the file's bytes to the disk; its size and hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
