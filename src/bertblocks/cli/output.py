"""How commands print: tables on a terminal, the same without colour or wrapping into a pipe, and the log on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from bertblocks.core.console import escape_json, printable
from bertblocks.core.console import make_console as make_console
from bertblocks.core.console import to_json_line as to_json_line
from bertblocks.core.log import logger

#: Wrapped text in a narrower column is hard to read.
TEXT_WIDTH = 20


class _EchoHandler(logging.Handler):
    """Prints messages on stderr; unlike a StreamHandler it follows `sys.stderr` when that is replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        note = "note: " if record.levelno >= logging.WARNING else ""
        typer.echo(printable(f"bertblocks: {note}{record.getMessage()}"), err=True)


def show_log() -> None:
    """Shows the library's log on stderr."""
    if not any(isinstance(handler, _EchoHandler) for handler in logger.handlers):
        logger.addHandler(_EchoHandler())
    logger.setLevel(logging.INFO)


def print_json(value: Any) -> None:
    typer.echo(escape_json(json.dumps(value, indent=2, ensure_ascii=False)))


def print_event(event: dict[str, Any]) -> None:
    """Prints an event of a run as one line of JSON, at once."""
    typer.echo(to_json_line(event))
    sys.stdout.flush()


def echo(message: str, err: bool = False) -> None:
    """Prints a line; control characters are escaped."""
    typer.echo(printable(message), err=err)


def print_table(console: Console, title: str, table: Table) -> None:
    """Prints an empty line, a title and a table. On a narrow terminal, each row becomes a few lines."""
    console.print()
    console.print(title, style="bold")
    if _least_width(table) > console.width:
        table.pad_edge, table.padding = False, (0, 1, 0, 0)
    if _least_width(table) <= console.width:
        console.print(table)
        return
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(name, style="bold")
        grid = Table.grid("", Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
        for column, cell in zip(table.columns[1:], cells, strict=True):
            grid.add_row("", column.header, cell)
        console.print(grid)


def _least_width(table: Table) -> int:
    """The width below which numbers are truncated or text is hard to read."""
    total = 0
    for column in table.columns:
        longest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        total += longest if column.no_wrap else min(longest, TEXT_WIDTH)
    _, right, _, left = table.padding
    return total + (right + left + 1) * len(table.columns) - 1 - (0 if table.pad_edge else right + left)


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
        >>> write_flops(131_072e9), write_flops(3e15), write_flops(2.4e21)
        ('131.07 T', '3.00 P', '2,400.00 E')
    """
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:,.2f} {unit}"
    return f"{flops:,.3g}"
