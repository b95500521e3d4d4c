"""The one error for what a user gave us and can mend."""

__all__ = ["InputError"]


class InputError(Exception):
    """Bad input. The message is one line: the file, the key, what was expected, what was found, what to do.

    The command line prints it without a traceback and exits with code 2.
    """
