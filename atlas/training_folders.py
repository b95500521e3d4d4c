"""Where a training run puts its sets: each is there whole, with its record, or not at all, and a run that was
killed between two of them goes on.

    out/checkpoint.pt    from which it goes on; gone when all sets are there
    out/.unfinished/     sets that are not ready
    out/NAME/            a set; `run` in its training.json says of which run
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ingest.errors import InputError
from ingest.training_spec import SetSection

__all__ = ["check_room", "is_of", "make_room", "unfinished"]


def check_room(out: Path, names: Iterable[str], *, resuming: bool) -> None:
    """InputError where the sets have no place; of a run that goes on some may be there (see `is_of`)."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; expected a folder for the sets: give another with --out")
    for name in names:
        if (out / name).exists() and not resuming:
            raise InputError(f"{out / name}: is there already; give another folder with --out, or remove it")


def make_room(out: Path) -> None:
    """The folder for the sets, before any work. Raises InputError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out}: cannot be made ({error.strerror}); give another folder with --out"
        ) from None


def is_of(folder: Path, of: str, entry: SetSection) -> bool:
    """Whether this run has put the set there and was then stopped before the others. Raises InputError for
    what is there of something else."""
    if not folder.exists():
        return False
    try:
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        mine = record["run"] == of and record["set"] == json.loads(json.dumps(entry.model_dump()))
    except (OSError, ValueError, KeyError, TypeError):
        mine = False
    if not mine:
        raise InputError(f"{folder}: is there already; give another folder with --out, or remove it")
    return True


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """A folder within `out` for what is not ready; gone afterwards, as is what a killed run left in it."""
    beside = out / ".unfinished"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
    except OSError as error:
        raise InputError(
            f"{out}: cannot be written ({error.strerror or error}); the same command writes what was trained"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
