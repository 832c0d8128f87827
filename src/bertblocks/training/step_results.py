"""Losses and gradient norms of steps, which leave a GPU while it computes the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bertblocks.training.prefetch import PreparedStep


@dataclass
class StepResult:
    """What a step was, and its values on the host as soon as `StepResults` has waited for them."""

    prepared: PreparedStep
    terms: Sequence[str]
    tokens: int
    learning_rate: float
    values: Tensor  # the mean of each loss, the signals that processes received, the gradient norm
    arrival: torch.cuda.Event | None = None
    seconds: float = 0.0
    #: Whether the weights were left as they were.
    is_skipped: bool = False

    @property
    def means(self) -> dict[str, float]:
        return dict(zip(self.terms, self.values.tolist(), strict=False))

    @property
    def loss(self) -> float:
        return sum(self.means.values())

    @property
    def received_signal(self) -> bool:
        return bool(self.values[-2] > 0)

    @property
    def norm(self) -> float:
        return float(self.values[-1])


class StepResults:
    """The results that have not been read yet, in order.

    If `is_late`, they are read after the next step has been launched, so that the GPU never waits for the host.
    Otherwise every result is read in its own step, before weights change.
    """

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self._pending: deque[StepResult] = deque()

    def add(self, result: StepResult) -> None:
        """Starts to copy the values of a step to the host."""
        if result.values.is_cuda:
            host = torch.empty(result.values.shape, dtype=result.values.dtype, pin_memory=True)
            host.copy_(result.values, non_blocking=True)
            result.values, result.arrival = host, torch.cuda.Event()
            result.arrival.record()
        self._pending.append(result)

    def read(self, before: StepResult | None = None) -> Iterator[StepResult]:
        """Waits for all results, or for those before one, and removes them."""
        while self._pending and self._pending[0] is not before:
            result = self._pending.popleft()
            if result.arrival is not None:
                result.arrival.synchronize()
            yield result


def sum_over_processes(values: Tensor) -> Tensor:
    """Sums in double precision, without waiting for the device."""
    values = values.double()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
