"""A running mean of the weights, which is often better than the weights themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bertblocks.training.distributed import local


class RunningMean:
    """The exponential mean of a model's trainable parameters.

    The decay of the first steps is (1 + step) / (10 + step), so that the start is soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.means = {name: one.detach().clone() for name, one in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        means, weights = self._pairs()
        torch._foreach_lerp_(means, weights, 1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the means for its weights meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        means, weights = self._pairs()
        kept = [one.clone() for one in weights]
        torch._foreach_copy_(weights, means)
        torch._foreach_copy_(means, kept)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        return [local(one) for one in self.means.values()], [local(one) for one in self._parameters.values()]
