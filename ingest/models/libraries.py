"""Where the libraries below meet a configuration that makes no sense, they raise whatever comes to them: one
line for the user instead, with the cause kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ingest.errors import InputError

__all__ = ["library_errors", "one_line"]

_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raises InputError '{what}: {the library's message}' from an error inside. Only around calls into
    libraries, or around reading values that a user's file may have left out."""
    try:
        yield
    except _ERRORS as error:
        raise InputError(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's message on one line, cut where it is long; its class where it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
