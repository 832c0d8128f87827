"""The exponential moving average of the weights, which often performs better than the weights themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bertblocks.training.distributed import to_local


class WeightAverage:
    """The exponential moving average of a model's trainable parameters.

    The decay of the first steps is (1 + step) / (10 + step), which soon forgets the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = self._pairs()
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averaged weights within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        averages, weights = self._pairs()
        saved = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, averages)
        torch._foreach_copy_(averages, saved)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        averages = [to_local(average) for average in self.averages.values()]
        return averages, [to_local(parameter) for parameter in self._parameters.values()]
