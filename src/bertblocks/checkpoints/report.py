"""A report on how a checkpoint was read."""

from __future__ import annotations

from dataclasses import dataclass

from bertblocks.core.log import logger


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

    def log(self, with_unread: bool) -> None:
        """Logs a warning for every difference; `with_unread` includes the parts that the model does not use."""
        if self.task != self.named_task:
            logger.warning(
                f"{self.source} names a {self.named_task} model but has no {self.named_task} head; "
                f"it was read as {self.task}."
            )
        if self.fresh:
            logger.warning(
                f"{self.source} has no {', '.join(self.fresh)}: newly initialized, must be trained before use."
            )
        if self.unread and with_unread:
            logger.warning(f"{self.source} also has {', '.join(self.unread)}, which this model does not use.")
