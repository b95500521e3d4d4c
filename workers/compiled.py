"""Compiled functions, kept on disk between runs where there is a place for them."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[F], F]:
    """numba's `njit` without the interpreter's lock, cached beside the source or in the user's cache.

    Where neither can be written (a read-only installation, a user without a home), every process compiles
    anew: half a minute, and no reason to fail.
    """

    def decorate(function: F) -> F:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return njit(nogil=True, **options)(function)

    return decorate
