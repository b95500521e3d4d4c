"""The command line: `atlas COMMAND`. Each command's module is imported when the command runs."""

from __future__ import annotations

from atlas.cli.program import main

__all__ = ["main"]
