"""How commands print: tables on a terminal, the same without colour or wrapping into a pipe, and the log on stderr."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bertblocks.core.console import printable
from bertblocks.core.log import logger

#: Wide enough that nothing is truncated or wrapped when a program reads the output.
PIPE_WIDTH = 100_000


class _EchoHandler(logging.Handler):
    """Prints messages on stderr; unlike a StreamHandler it follows `sys.stderr` when that is replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        note = "note: " if record.levelno >= logging.WARNING else ""
        typer.echo(printable(f"bertblocks: {note}{record.getMessage()}"), err=True)


#: Control characters that JSON does not escape by itself.
_C1_CONTROL = re.compile(r"[\x7f-\x9f]")


def show_log() -> None:
    """Shows the library's log on stderr."""
    if not any(isinstance(handler, _EchoHandler) for handler in logger.handlers):
        logger.addHandler(_EchoHandler())
    logger.setLevel(logging.INFO)


def make_console() -> Console:
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=PIPE_WIDTH)
    return console


def to_json_line(value: Any, digits: int | None = None) -> str:
    """Writes a value as one line of JSON; `digits` rounds arrays. Control characters are escaped."""

    def convert(other: Any) -> Any:
        if not hasattr(other, "tolist"):
            return str(other)
        numbers = other.tolist()
        return numbers if digits is None else [round(number, digits) for number in numbers]

    line = json.dumps(value, ensure_ascii=False, default=convert)
    return _C1_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(console: Console, title: str, table: Table) -> None:
    """Prints an empty line, a title and a table."""
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def make_table(columns: Sequence[str], text_columns: int = 1) -> Table:
    """Creates a table with `text_columns` columns of text, then numbers; names and numbers are never truncated."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(columns):
        is_text = index < text_columns
        table.add_column(
            column, justify="left" if is_text else "right", no_wrap=index == 0 or not is_text, overflow="fold"
        )
    return table


def write_flops(flops: float) -> str:
    """Formats a number of operations with a unit.

    Example:
        >>> write_flops(1_500_000), write_flops(2.5e9), write_flops(0)
        ('1.50 M', '2.50 G', '0')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:,.2f} {unit}"
    return f"{flops:,.3g}"


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
