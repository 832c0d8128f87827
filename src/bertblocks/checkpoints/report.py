"""A report on how a checkpoint was read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """The family and task that a checkpoint was read as, and the parts in which checkpoint and model differ."""

    source: str
    family: str
    task: str
    #: The task that the config names. It differs from `task` if the checkpoint lacks that task's head.
    named_task: str
    #: Parts of the model that the checkpoint lacks; they start from random weights.
    fresh: tuple[str, ...] = ()
    #: Parts of the checkpoint that the model does not use.
    unread: tuple[str, ...] = ()

    def warn(self, with_unread: bool, stacklevel: int) -> None:
        """Issues a warning for every difference; `with_unread` includes the parts that the model does not use."""
        if self.task != self.named_task:
            warnings.warn(
                f"{self.source} names a {self.named_task} model but has no {self.named_task} head; "
                f"it was read as {self.task}.",
                stacklevel=stacklevel + 1,
            )
        if self.fresh:
            warnings.warn(
                f"{self.source} has no {', '.join(self.fresh)}: newly initialized, must be trained before use.",
                stacklevel=stacklevel + 1,
            )
        if self.unread and with_unread:
            warnings.warn(
                f"{self.source} also has {', '.join(self.unread)}, which this model does not use.",
                stacklevel=stacklevel + 1,
            )
