"""Dictionaries fetched from a hub: `owner/name`, or one folder of it, `owner/name/sub/folder`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingest.errors import InputError
from ingest.places import hub_place

__all__ = ["fetch"]

_MOST = 64 << 30  # bytes; some hub repositories hold every dictionary of a model, in every size


def fetch(place: str, patterns: Sequence[str]) -> Path:
    """The local folder of a hub name, with the files there and below whose names match one of the patterns.

    What is cached is not fetched again. Raises InputError where the hub does not answer or has no such files,
    and before anything is fetched where they are more than 64 GiB.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError

    name, folder = hub_place(place) or (place, "")
    inside = f"{folder}/" if folder else ""
    # A `*` of these patterns matches slashes too.
    wanted = [part for pattern in patterns for part in (f"{inside}{pattern}", f"{inside}*/{pattern}")]
    try:
        try:
            files = snapshot_download(name, allow_patterns=wanted, dry_run=True)
        except DryRunError:  # the hub cannot be asked: what is cached may do
            pass
        else:
            _check_size(place, [(file.filename, file.file_size or 0) for file in files])
        found = Path(snapshot_download(name, allow_patterns=wanted)) / folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{place}: no such directory, and not to be had from the hub ({reason})") from error
    if not found.is_dir():
        raise InputError(f"{place}: {name} on the hub has no folder {folder} with dictionaries")
    return found


def _check_size(place: str, files: Sequence[tuple[str, int]]) -> None:
    if not files:
        raise InputError(f"{place}: has no files of a known dictionary format on the hub")
    size = sum(bytes for _, bytes in files)
    if size > _MOST:
        folders = sorted({name.rpartition("/")[0] for name, _ in files})
        raise InputError(
            f"{place}: its dictionaries are {size / 1e9:.0f} GB in {len(folders)} folders; give one of them,"
            f" such as {'/'.join([*place.split('/')[:2], folders[-1]])}"
        )
