"""What the training loop needs to know about a task: its batches, its losses and its learning rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch


class TrainingTask(ABC):
    """Something to train a model on.

    A global batch is a list of items (rows of packed texts, or examples) that does not depend on the number of
    processes; each process collates its own items. All methods except `losses` and `evaluate` must be pure functions of
    their arguments, so that a resumed run, or one on another number of processes, computes the same.
    """

    total_steps: int
    #: The run ends after this many seconds in steps, if that is before its last step.
    budget: float | None = None
    #: Whether some steps leave some weights without a gradient.
    has_unused_weights: bool = False

    @abstractmethod
    def initial_position(self) -> dict[str, Any]:
        """The position in the data before the first step, as JSON values."""

    @abstractmethod
    def next_items(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The items of a step's global batch, and the position of the next step."""

    @abstractmethod
    def collate(self, step: int, items: Sequence[Any]) -> FlatBatch:
        """Turns some of a step's items into tensors."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        """The sum of each loss over a batch, under the keys of `batch.counts`."""

    def compares(self, batch: FlatBatch) -> bool:
        """Whether the loss compares all items of a step with each other.

        Such a loss is computed by `encode` and `compare` if the step has several micro-batches.
        """
        return False

    def encode(self, model: nn.Module, batch: FlatBatch) -> Tensor:
        """What a micro-batch contributes to the comparison, such as the vectors of its texts."""
        raise NotImplementedError

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[FlatBatch]) -> dict[str, Tensor]:
        """The sum of each loss over the micro-batches of this process, given what `encode` returned for each."""
        raise NotImplementedError

    @abstractmethod
    def learning_rate(self, step: int, seconds: float) -> float:
        """The learning rate of a step that starts after `seconds` in earlier steps."""

    def micro_batch_size(self, step: int) -> int | None:
        """The most items per forward pass of a process. None means all of its items."""
        return None

    def is_side_step(self, step: int) -> bool:
        """Whether a step trains on another loss than the task's own, which is logged apart."""
        return False

    def before_step(self, model: Any, step: int) -> None:
        """Changes the model where a step asks for it, such as RoPE's theta in a new phase."""
        return

    def step_info(self, step: int) -> dict[str, Any]:
        """Values that metrics and progress show for a step, such as its phase. `slots` is its capacity in tokens."""
        return {}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the current model."""
        return {}
