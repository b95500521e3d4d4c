"""The manifest of a run: what the loader needs to know of a build, kept in `runs/<hash>.json`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError
from atlas.folder import AtlasFolder, write_atomically

__all__ = ["RunManifest", "UsedStep"]


@dataclass(frozen=True)
class UsedStep:
    """A step of a run: its name (the hash), its kind, its title for people."""

    name: str
    kind: str
    title: str = ""


@dataclass(frozen=True)
class RunManifest:
    """One build. `spec` is canonical JSON; times are ISO 8601 in UTC; `status` is done, failed or
    cancelled.
    """

    run: str
    spec: str
    code_version: str
    started: str
    ended: str | None
    status: str
    steps: tuple[UsedStep, ...]

    @classmethod
    def from_json(cls, content: dict[str, Any], where: str = "run manifest") -> RunManifest:
        """Raises `AtlasError` naming the field that is missing or unknown."""
        try:
            steps = tuple(UsedStep(**step) for step in content["steps"])
            spec = content["spec"]
            if not isinstance(spec, str):
                spec = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            return cls(**{**content, "steps": steps, "spec": spec})
        except (KeyError, TypeError) as error:
            raise AtlasError(f"{where}: not a manifest of a run ({error})") from error

    @classmethod
    def read(cls, path: Path) -> RunManifest:
        try:
            return cls.from_json(json.loads(path.read_text()), str(path))
        except ValueError as error:
            raise AtlasError(f"{path}: damaged ({error}); run the build again") from error

    def write(self, folder: AtlasFolder) -> None:
        write_atomically(
            folder.runs / f"{self.run}.json", json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"
        )

    def without(self, steps: Collection[str]) -> RunManifest:
        """The same run, less some of its steps."""
        return replace(self, steps=tuple(step for step in self.steps if step.name not in steps))
