"""Consoles and progress bars, text that is safe to print, and numbers for people."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.text import Text

#: Wide enough that nothing is truncated or wrapped when a program reads the output.
PIPE_WIDTH = 100_000
#: Escape sequences and other control characters; newlines and tabs are harmless. Halves of surrogate pairs cannot be
#: printed at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
#: Control characters that JSON does not escape by itself, and halves of surrogate pairs, which have no bytes.
_ESCAPED = re.compile(r"[\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes control characters other than newlines and tabs, so that data cannot send commands to a terminal.

    Halves of surrogate pairs are escaped too, because they cannot be printed.

    Example:
        >>> printable("\x1b[31mred")
        '\\\\x1b[31mred'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def to_json_line(value: Any, digits: int | None = None) -> str:
    """Writes a value as one line of JSON; `digits` rounds arrays. Control characters are escaped."""

    def convert(other: Any) -> Any:
        if not hasattr(other, "tolist"):
            return str(other)
        numbers = other.tolist()
        return numbers if digits is None else [round(number, digits) for number in numbers]

    return escape_json(json.dumps(value, ensure_ascii=False, default=convert))


def escape_json(text: str) -> str:
    """Escapes what JSON leaves as it is but a terminal or a file cannot take."""
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class SafeConsole(Console):
    """Prints strings, also those in the cells of a table, as they are: without markup and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def make_console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console as wide as the terminal, or one that never wraps if a program reads the output."""
    console = SafeConsole(stderr=stderr, quiet=quiet)
    return console if console.is_terminal else SafeConsole(stderr=stderr, quiet=quiet, width=PIPE_WIDTH)


def progress_bar(*columns: ProgressColumn, console: Console | None = None) -> Progress:
    """Creates a bar, on stderr by default, that disappears when it is done and leaves stdout alone.

    By default rich also redirects `sys.stdout` and prints it next to the bar, which loses what a command writes to a
    file or a pipe.
    """
    return Progress(*columns, console=console or Console(stderr=True), transient=True, redirect_stdout=False)


def write_bytes(count: float) -> str:
    """Formats a number of bytes with a unit.

    Example:
        >>> write_bytes(3 * 2**20), write_bytes(1536)
        ('3.0 MiB', '1.5 KiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB"


def write_seconds(seconds: float) -> str:
    """A duration in its two largest units.

    Example:
        >>> write_seconds(4.21), write_seconds(75), write_seconds(7384)
        ('4.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def write_number(value: float) -> str:
    """Formats a number briefly, for an axis or a table.

    Example:
        >>> write_number(1500000), write_number(0.00012), write_number(3.0), write_number(float("nan"))
        ('1.5M', '0.00012', '3', 'nan')
    """
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"
