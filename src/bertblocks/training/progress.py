"""The progress of a run: a live line on a terminal, or a plain line from time to time in a log."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

#: Seconds between plain lines, for logs.
PLAIN_SECONDS = 15.0
#: Seconds between updates of the live line.
LIVE_SECONDS = 0.25
BAR_WIDTH = 20


class Progress:
    """Shows finished steps. Prints nothing unless `is_shown`."""

    def __init__(self, console: Console, is_shown: bool = True) -> None:
        self.console = console
        self.is_shown = is_shown
        self._live = (
            Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            if console.is_terminal
            else None
        )
        self._next_update = 0.0

    def __enter__(self) -> Progress:
        if self.is_shown and self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_shown and self._live:
            self._live.stop()

    def update(self, step: int, total: int, values: dict[str, Any]) -> None:
        """Shows a step. `values` may hold loss, tokens_per_second, packing, seconds_left and phase."""
        now = time.monotonic()
        if not self.is_shown or (now < self._next_update and step < total):
            return
        self._next_update = now + (LIVE_SECONDS if self._live else PLAIN_SECONDS)
        line = format_step(step, total, values)
        if self._live:
            done = round(BAR_WIDTH * step / max(total, 1))
            bar = Text("━" * done, style="green") + Text("━" * (BAR_WIDTH - done), style="dim")
            self._live.update(Text.assemble(bar, " ", line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self.console.print(line)

    def print(self, message: str) -> None:
        """Prints a permanent line."""
        if self.is_shown:
            self.console.print(message)


def format_step(step: int, total: int, values: dict[str, Any]) -> str:
    """One line of progress.

    Example:
        >>> format_step(5, 10, {"loss": 2.5, "tokens_per_second": 12345.6, "packing": 0.991, "seconds_left": 75})
        'step 5/10 | loss 2.500 | 12,346 tokens/s | 99.1 % packed | 1:15 left'
    """
    parts = [f"step {step:,}/{total:,}"]
    if values.get("phase"):
        parts.append(str(values["phase"]))
    parts.append(f"loss {values['loss']:.3f}")
    parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if values.get("packing"):
        parts.append(f"{100 * values['packing']:.1f} % packed")
    if values.get("seconds_left") is not None:
        minutes, seconds = divmod(round(values["seconds_left"]), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{seconds:02d} left")
    return " | ".join(parts)
