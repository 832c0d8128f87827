"""Progress bars on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Creates a bar that disappears when it is done and leaves stdout alone.

    By default rich also redirects `sys.stdout` and prints it next to the bar, which loses what a command writes to a
    file or a pipe.
    """
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
