"""Error messages of bounded length, and values and other libraries' errors in them."""

from __future__ import annotations

import itertools
import re
import reprlib
from typing import Any

#: The most characters of a message, and of a value in it.
MAX_MESSAGE, MAX_VALUE = 500, 200


class InputError(ValueError):
    """What a user gave cannot be used. Files can hold values of any length, so the message is cut to 500 characters."""

    def __init__(self, message: str) -> None:
        super().__init__(shorten(message))


class _Printer(reprlib.Repr):
    """A repr with bounded depth and length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 40
        self.maxstring = self.maxother = self.maxlong = MAX_VALUE

    def repr_dict(self, x: dict, level: int) -> str:
        """Keep the order of the keys, which reprlib sorts."""
        if level <= 0:
            return "{...}"
        items = itertools.islice(x.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return "{" + ", ".join(parts + ["..."] * (len(x) > self.maxdict)) + "}"


_printer = _Printer()
_CLASS = re.compile(r"<class '([\w.]+)'>")


def shorten(text: str, most: int = MAX_MESSAGE) -> str:
    """Cut a text to at most `most` characters.

    Example:
        >>> shorten("abc"), len(shorten("a" * 1000))
        ('abc', 500)
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return what another library says went wrong, without its further lines, or the kind of its error.

    Example:
        >>> first_line(ValueError("no header.\\nbacktrace")), first_line(KeyError())
        ('no header', 'KeyError')
    """
    line = next(iter(str(error).strip().splitlines()), "").rstrip(".") or type(error).__name__
    return _CLASS.sub(lambda match: match[1], line)[:300]


def short_repr(value: Any) -> str:
    """Return the repr of a value, cut to at most 200 characters; the work is bounded too.

    Example:
        >>> short_repr("rms"), len(short_repr(["x" * 10_000] * 10_000))
        ("'rms'", 200)
    """
    if isinstance(value, int) and value.bit_length() > 4 * MAX_VALUE:  # Python refuses to print very long integers
        return f"an integer of {value.bit_length()} bits"
    return shorten(_printer.repr(value), MAX_VALUE)
