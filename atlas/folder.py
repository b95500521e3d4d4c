"""An atlas on disk: where things lie, which generation is current, who holds it.

    NAME.atlas/
      atlas.json              schema version, address of the artifacts
      specs/                  the specs used
      runs/<hash>.json        a manifest for each loaded run
      artifacts/<2 hex>/<hash>/   Parquet: the truth
      ids.parquet             blocks of ids, never reused
      db/<generation>/        the database, generation.json (what is in it), `held` (locked by readers)
      csr/<generation>/       adjacency arrays
      CURRENT                 the generation that readers open; replaced atomically

A reader takes a shared lock on `db/<generation>/held` for as long as it has the generation open. Whoever
removes old generations takes the exclusive lock first, and renames the folder before deleting it. Locks
belong to the process, so one that was killed holds nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atlas.errors import AtlasError, DiskFull
from atlas.schema import SCHEMA_VERSION

__all__ = ["AtlasFolder", "HeldGeneration", "disk_errors", "write_atomically"]

MARKER = "atlas.json"
DATABASE = "atlas.db"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk refuses (full, read-only, not allowed) into one line that says what to do."""
    try:
        yield
    except OSError as error:
        # numpy says how much of an array it could write, and gives no number
        short = error.errno is None and "requested and" in str(error)
        if short or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(
                f"{path}: the disk is full; nothing was changed. Free space and try again"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise AtlasError(f"{path}: the folder is not writable ({error.strerror})") from error
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a small file at once: a reader sees the old content or the new."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path.parent):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _remove_dead_writes(folder: Path) -> None:
    """Removes what `write_atomically` left in a folder when its process was killed."""
    for path in folder.glob(".*.*"):
        pid = path.suffix[1:]
        if not pid.isdecimal() or not path.is_file():
            continue
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (PermissionError, OverflowError):
            continue  # another user's process, which lives; no process's number


class HeldGeneration:
    """A generation kept from removal while this object is open."""

    def __init__(self, folder: AtlasFolder, name: str, descriptor: int) -> None:
        self.name = name
        self.database = folder.database(name)
        self.arrays = folder.arrays(name)
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class AtlasFolder:
    """Paths inside one atlas, and the operations on its generations."""

    path: Path

    @classmethod
    def create(cls, path: str | Path) -> AtlasFolder:
        """Makes the folder if it is not there, and checks it if it is."""
        folder = cls(Path(path))
        if folder.marker.exists():
            cls.open(path)
        else:
            with disk_errors(folder.path):
                try:
                    folder.path.mkdir(parents=True, exist_ok=True)
                except (FileExistsError, NotADirectoryError) as error:
                    raise AtlasError(f"{folder.path}: exists and is not a folder") from error
            # First of all: what is killed from here on has left an atlas, which the next call goes on with.
            marker = {"schema": SCHEMA_VERSION, "artifacts": "artifacts"}
            write_atomically(folder.marker, json.dumps(marker) + "\n")
        with disk_errors(folder.path):
            for part in ("specs", "runs", "artifacts", "db", "csr"):
                (folder.path / part).mkdir(exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> AtlasFolder:
        """An existing atlas. Raises `AtlasError` if it is none, damaged, or made by a newer schema."""
        folder = cls(Path(path))
        try:
            made = json.loads(folder.marker.read_text())
            version = made["schema"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AtlasError(f"{folder.path}: no atlas here ({MARKER} is missing)") from error
        except (ValueError, KeyError, TypeError) as error:
            raise AtlasError(f"{folder.marker}: damaged; expected JSON with a schema version") from error
        except PermissionError as error:
            raise AtlasError(f"{folder.marker}: not readable ({error.strerror})") from error
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise AtlasError(
                f"{folder.path}: made by a newer circuit-atlas (schema {version}; this one reads up to "
                f"{SCHEMA_VERSION}); upgrade circuit-atlas"
            )
        if version < SCHEMA_VERSION:
            raise AtlasError(
                f"{folder.path}: made with schema {version}, this circuit-atlas has {SCHEMA_VERSION}; "
                "build it again from its spec, into a new folder or with this one removed"
            )
        return folder

    @property
    def marker(self) -> Path:
        return self.path / MARKER

    @property
    def artifacts(self) -> Path:
        """Where the artifacts are; atlas.json may name a folder shared with other atlases."""
        return self.path / json.loads(self.marker.read_text()).get("artifacts", "artifacts")

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def blocks(self) -> Path:
        return self.path / "ids.parquet"

    def artifact(self, step: str) -> Path:
        return self.artifacts / step[:2] / step

    def generation(self, name: str) -> Path:
        return self.path / "db" / name

    def database(self, name: str) -> Path:
        return self.generation(name) / DATABASE

    def arrays(self, name: str) -> Path:
        return self.path / "csr" / name

    def current(self) -> str | None:
        """Name of the current generation, or None if nothing was ever loaded."""
        try:
            return (self.path / "CURRENT").read_text().strip() or None
        except FileNotFoundError:
            return None

    def switch(self, name: str) -> None:
        """Makes `name` the generation that readers open from now on."""
        write_atomically(self.path / "CURRENT", name + "\n")

    def contents(self, name: str) -> dict:
        """What was loaded into a generation (`generation.json`)."""
        return json.loads((self.generation(name) / "generation.json").read_text())

    def hold(self) -> HeldGeneration:
        """Resolves CURRENT and keeps its generation from removal. Raises `AtlasError` if nothing is
        loaded.
        """
        for _ in range(100):  # a load may switch and remove between our reading CURRENT and our lock
            name = self.current()
            if name is None:
                raise AtlasError(f"{self.path}: nothing is loaded yet; finish `atlas build` first")
            path = self.generation(name) / "held"
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if self.current() == name:
                    raise AtlasError(
                        f"{self.path}: generation {name} is missing; load the atlas again"
                    ) from None
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return HeldGeneration(self, name, descriptor)
            except (BlockingIOError, FileNotFoundError):
                pass
            os.close(descriptor)
        raise AtlasError(f"{self.path}: the current generation keeps changing; try again")

    def new_generation(self) -> str:
        """Makes the folders of a generation after all others. The caller holds the writer's lock."""
        taken = [int(p.name) for p in (self.path / "db").glob("*") if p.name.isdigit()]
        name = f"{max([*taken, int(self.current() or 0)]) + 1:06d}"
        with disk_errors(self.path):
            self.generation(name).mkdir(parents=True)
            self.arrays(name).mkdir(parents=True)
            (self.generation(name) / "held").touch()
        return name

    def remove_generation(self, name: str) -> bool:
        """Removes a generation unless a reader holds it; says whether it is gone."""
        held = self.generation(name) / "held"
        try:
            descriptor = os.open(held, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = -1  # killed before its lock file was made, or while being removed
        try:
            if descriptor >= 0:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                held.unlink(missing_ok=True)
            shutil.rmtree(self.generation(name), ignore_errors=True)
            shutil.rmtree(self.arrays(name), ignore_errors=True)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return True

    def remove_old_generations(self) -> None:
        """Removes every generation but the current one that nobody holds, and what killed processes left.

        The caller holds the writer's lock.
        """
        current = self.current()
        names = {p.name for part in ("db", "csr") for p in (self.path / part).glob("*") if p.name.isdigit()}
        for name in sorted(names - {current}):
            self.remove_generation(name)
        for place in (self.path, self.path / "specs", self.runs):
            _remove_dead_writes(place)
