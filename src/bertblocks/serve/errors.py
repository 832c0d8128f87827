"""What can go wrong with a request apart from its content, which raises ValueError or TypeError."""

from __future__ import annotations


class ServeError(Exception):
    """A request that cannot be answered. The message is one sentence for the client."""


class ModelNotFound(ServeError):
    """No model has this name."""


class TaskNotServed(ServeError):
    """The model cannot do this task, or no model can."""


class TooLarge(ServeError):
    """A request or a text is larger than this server ever accepts."""


class Overloaded(ServeError):
    """The queue is full. `retry_after` is the time, in seconds, until there should be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(ServeError):
    """The time that the request was given is over."""


class WorkerLost(ServeError):
    """The process that ran the model has died; another takes its place."""


class ShuttingDown(ServeError):
    """The server finishes what it has accepted and takes nothing new."""
