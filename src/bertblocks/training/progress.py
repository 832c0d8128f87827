"""The progress of a run: a live line on a terminal, or a plain line from time to time in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.table import Column

from bertblocks.core.console import progress_bar

#: Seconds between plain lines, for logs.
PLAIN_SECONDS = 15.0
#: Seconds between updates of the live line.
LIVE_SECONDS = 0.25
BAR_WIDTH = 12


class Progress:
    """Shows finished steps. Prints nothing unless `is_shown`."""

    def __init__(self, console: Console, is_shown: bool = True) -> None:
        self.console = console
        self.is_shown = is_shown
        self._bar = None
        if is_shown and console.is_terminal:
            fitting = Column(no_wrap=True, overflow="ellipsis")
            line = TextColumn("{task.description}", markup=False, table_column=fitting)
            self._bar = progress_bar(BarColumn(BAR_WIDTH), line, console=console)
            self._task = self._bar.add_task("", total=None, visible=False)
        self._next_update = 0.0
        self._evaluation = ""

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, total: int, values: dict[str, Any]) -> None:
        """Shows a step. `values` may hold loss, tokens_per_second, packing, seconds_left and phase."""
        now = time.monotonic()
        if not self.is_shown or (now < self._next_update and step < total):
            return
        self._next_update = now + (LIVE_SECONDS if self._bar else PLAIN_SECONDS)
        line = format_step(step, total, {**values, "evaluation": self._evaluation})
        if self._bar:
            self._bar.update(self._task, completed=step, total=total, description=line, visible=True)
        else:
            self.console.print(line)

    def show_evaluation(self, step: int, scores: Mapping[str, float], metric: str | None = None) -> None:
        """Prints all scores of an evaluation; the line of progress repeats `metric`, or else the first of them."""
        written = {key: f"{key.replace('_', ' ')} {value:.4g}" for key, value in scores.items()}
        self._evaluation = written[metric or next(iter(scores))]
        self.print(f"step {step:,} | {'  '.join(written.values())}")

    def print(self, message: str) -> None:
        """Prints a permanent line."""
        if self.is_shown:
            self.console.print(message)


def format_step(step: int, total: int, values: Mapping[str, Any]) -> str:
    """One line of progress.

    Example:
        >>> format_step(5, 10, {"loss": 2.5, "tokens_per_second": 12345.6, "packing": 0.991, "seconds_left": 75})
        'step 5/10 | loss 2.500 | 12,346 tokens/s | 99.1 % packed | 1:15 left'
    """
    parts = [f"step {step:,}/{total:,}"]
    if values.get("phase"):
        parts.append(str(values["phase"]))
    if "loss" in values:
        parts.append(f"loss {values['loss']:.3f}")
    parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if values.get("packing"):
        parts.append(f"{100 * values['packing']:.1f} % packed")
    if values.get("seconds_left") is not None:
        minutes, seconds = divmod(round(values["seconds_left"]), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{seconds:02d} left")
    if values.get("evaluation"):
        parts.append(values["evaluation"])
    return " | ".join(parts)
