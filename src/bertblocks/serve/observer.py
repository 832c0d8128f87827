"""What the scheduler tells about its work."""

from __future__ import annotations

from typing import Any


class Observer:
    """Gets what happens in the scheduler, for metrics. Methods are called from several threads."""

    def queued(self, tokens: int) -> None:
        """The number of tokens that wait or run has changed."""

    def batch(self, model: str, method: str, lane: str, tokens: int, segments: int, seconds: float) -> None:
        """A batch has run."""

    def finished(self, model: str, method: str, outcome: Any) -> None:
        """A request has been answered."""

    def rejected(self, reason: str) -> None:
        """A request was not accepted, or not answered in time."""

    def cancelled(self, tokens: int) -> None:
        """Nobody waits for a request any more; this many of its tokens were not run."""
