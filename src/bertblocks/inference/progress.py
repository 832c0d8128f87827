"""Counts and speed of a run, with a progress bar."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bertblocks.core.console import progress_bar


@dataclass
class RunStats:
    """Counts inputs, tokens and seconds.

    With `is_shown` they appear in a progress bar on stderr, with the time left if `total` is known.
    """

    total: int | None = None
    is_shown: bool = False
    items: int = 0
    tokens: int = 0
    seconds: float = 0.0
    _started: float = field(default=0.0, repr=False)
    _progress: Progress | None = field(default=None, repr=False)
    _task: TaskID = field(default=TaskID(0), repr=False)

    def __enter__(self) -> RunStats:
        self._started = time.perf_counter()
        if self.is_shown:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]:,} tokens, {task.fields[speed]:,.0f} tokens/s"),
                TimeRemainingColumn(),
            )
            self._progress = progress_bar(*columns)
            self._progress.start()
            self._task = self._progress.add_task("", total=self.total, tokens=0, speed=0.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._update()
        if self._progress is not None:
            self._progress.stop()

    def add_tokens(self, count: int) -> None:
        self.tokens += count
        self._update()

    def add_items(self, count: int) -> None:
        self.items += count
        self._update()

    def _update(self) -> None:
        self.seconds = time.perf_counter() - self._started
        if self._progress is not None:
            self._progress.update(self._task, completed=self.items, tokens=self.tokens, speed=self.tokens_per_second)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return (
            f"{self.items:,} texts, {self.tokens:,} tokens in {self.seconds:.1f} s "
            f"({self.tokens_per_second:,.0f} tokens/s)"
        )
