"""Progress bars on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar that disappears when it is done and leaves stdout alone.

    By default rich takes over `sys.stdout` too and prints it where the bar is, which loses what a command writes to
    a file or a pipe.
    """
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
