"""Progress bars on stderr, and text that is safe to print."""

from __future__ import annotations

import re

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Creates a bar that disappears when it is done and leaves stdout alone.

    By default rich also redirects `sys.stdout` and prints it next to the bar, which loses what a command writes to a
    file or a pipe.
    """
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Escapes control characters other than newlines and tabs, so that data cannot send commands to a terminal.

    Example:
        >>> printable("\x1b[31mred")
        '\\\\x1b[31mred'
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
