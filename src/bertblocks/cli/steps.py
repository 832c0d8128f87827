"""Progress of commands that consist of several long steps."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from bertblocks.core.console import progress_bar


class StepBars:
    """A bar on stderr for each step, with its rate and the time left. Without a terminal nothing is shown."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._progress = progress_bar(*columns)
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> StepBars:
        if sys.stderr.isatty():
            self._progress.start()
        return self

    def update(self, name: str, done: int, total: int | None) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total, rate="")
        bar = self._bars[name]
        speed = self._progress.tasks[bar].speed
        self._progress.update(bar, completed=done, total=total, rate="" if speed is None else f"{speed:,.0f}/s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
