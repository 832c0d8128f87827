"""What the training loop has to be told: where batches come from and what their losses are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class TaskBatch(Protocol):
    """Flat sequences on their way into the model; `counts` says by what the sum of each loss is divided."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def counts(self) -> dict[str, int]: ...

    def to(self, device: torch.device) -> TaskBatch: ...


class Task(ABC):
    """Something to train a model for.

    A global batch is a list of items (rows of packed texts, examples), the same whatever the number of processes; each
    process makes batches of its own items. All methods but `losses` and `evaluate` must be pure functions of what they
    are given: then a run that is resumed, or goes on with more processes, is the same run.
    """

    total_steps: int

    @abstractmethod
    def start(self) -> dict[str, Any]:
        """The position in the data of the first step, as JSON can hold it."""

    @abstractmethod
    def take(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The items of a step's global batch, and the position of the next step."""

    @abstractmethod
    def batch(self, step: int, items: Sequence[Any]) -> TaskBatch:
        """Some of a step's items as tensors."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The sum of each loss over a batch, with the names of `batch.counts`."""

    @abstractmethod
    def learning_rate(self, step: int) -> float: ...

    def micro_batch(self, step: int) -> int | None:
        """The most items that a process takes at once; None: all of its own."""
        return None

    def prepare(self, model: Any, step: int) -> None:
        """Changes the model as this step asks for, such as RoPE's theta in a new phase."""
        return

    def describe(self, step: int) -> dict[str, Any]:
        """What metrics and progress say of a step, such as its phase; `slots` is its room for tokens."""
        return {}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model as it is now."""
        return {}
