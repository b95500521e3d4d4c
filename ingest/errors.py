"""The one error for what a user gave us and can mend."""

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "near", "printable"]


class InputError(Exception):
    """Bad input. The message is one line: the file, the key, what was expected, what was found, what to do.

    The command line prints it without a traceback and exits with code 2. Names from a stranger's file stand
    in it: whatever is in them, a line stays one, and a terminal finds nothing to act on.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(printable, lines)))


def printable(text: str) -> str:
    """A text with its controls, bidirectional marks and lone surrogates written out.

    >>> print(printable("a" + chr(10) + chr(27) + "[31m"))
    a\\n\\x1b[31m
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def near(word: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them where none is near.

    >>> near("modle", ["model", "path"])
    "; did you mean 'model'?"
    >>> near("xyz", ["model", "path"])
    '; expected model or path'
    """
    choices = list(known)
    close = difflib.get_close_matches(str(word), choices, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; expected {' or '.join(choices)}" if choices else ""
