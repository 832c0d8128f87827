"""Values in error messages."""

from __future__ import annotations

import itertools
import reprlib
from typing import Any

#: The most characters of a value that a message prints.
MAX_CHARACTERS = 500


class _Printer(reprlib.Repr):
    """A repr with bounded depth and length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 40
        self.maxstring = self.maxother = self.maxlong = MAX_CHARACTERS

    def repr_dict(self, x: dict, level: int) -> str:
        """Keep the order of the keys, which reprlib sorts."""
        if level <= 0:
            return "{...}"
        items = itertools.islice(x.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return "{" + ", ".join(parts + ["..."] * (len(x) > self.maxdict)) + "}"


_printer = _Printer()


def short_repr(value: Any) -> str:
    """Return the repr of a value, cut to at most 500 characters; the work is bounded too.

    Example:
        >>> short_repr("rms"), len(short_repr(["x" * 10_000] * 10_000))
        ("'rms'", 500)
    """
    if isinstance(value, int) and value.bit_length() > 4 * MAX_CHARACTERS:  # Python refuses to print very long integers
        return f"an integer of {value.bit_length()} bits"
    text = _printer.repr(value)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."
