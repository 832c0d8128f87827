"""The gradients of one step, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine
from bertblocks.training.distributed import World, gradient_sync
from bertblocks.training.precision import autocast
from bertblocks.training.task import TrainingTask


@dataclass(frozen=True)
class BackwardPass:
    """Adds the gradients of the losses of a step to the weights.

    The loss of a step is the sum of its micro-batches' losses, or it compares all of their examples. Comparisons use a
    gradient cache (GradCache; Gao et al., 2021): the micro-batches are encoded without a graph, the loss gives the
    gradient at every representation, and each micro-batch is encoded once more, with the same dropout, to take its part
    back to the weights. So a batch of any size needs the memory of one micro-batch, and the gradients are the same.
    """

    task: TrainingTask
    #: The model as DDP or FSDP wrap it.
    model: nn.Module
    world: World
    precision: str
    scaler: torch.amp.GradScaler
    #: Seed and number of the step, which determine dropout.
    seed: int
    step: int
    #: By the name of each loss: the examples or tokens of the step, over all processes, that the sum is divided by.
    counts: dict[str, int]
    #: Called after each micro-batch, with its share of the step.
    after: Callable[[float], None] = lambda share: None

    def run(self, batches: Sequence[FlatBatch]) -> Tensor:
        """Returns this process's part of the mean losses, in the order of `counts`, on its device."""
        batches = [batch.to(self.world.device) for batch in batches]
        if len(batches) > 1 and self.task.compares(batches[0]):
            return self._run_cached(batches)
        sums = torch.zeros(len(self.counts), device=self.world.device)
        for number, batch in enumerate(batches):
            with gradient_sync(self.model, is_last=number == len(batches) - 1):
                self._set_seed(number)
                with autocast(self.precision, self.world.device):
                    losses = self.task.losses(self.model, batch)
                sums += self._backward(losses)
            self.after(1 / len(batches) / self.world.size)
        return sums

    def _run_cached(self, batches: Sequence[FlatBatch]) -> Tensor:
        with torch.no_grad():
            outputs = [self._encode(number, batch).detach() for number, batch in enumerate(batches)]
        for output in outputs:
            output.requires_grad_()
        with autocast(self.precision, self.world.device):
            losses = self.task.compare(outputs, batches)
        sums = self._backward(losses)
        for number, batch in enumerate(batches):
            gradient, outputs[number].grad = outputs[number].grad, None
            with gradient_sync(self.model, is_last=number == len(batches) - 1):
                torch.autograd.backward(self._encode(number, batch), gradient)
            self.after(1 / len(batches) / self.world.size)
        return sums

    def _encode(self, number: int, batch: FlatBatch) -> Tensor:
        self._set_seed(number)
        with autocast(self.precision, self.world.device):
            return self.task.encode(self.model, batch)

    def _set_seed(self, number: int) -> None:
        torch.manual_seed(int(combine("dropout", self.seed, self.step, self.world.rank, number)[0] >> 1))

    def _backward(self, losses: dict[str, Tensor]) -> Tensor:
        """Computes the gradients of the mean losses, and returns these."""
        means = torch.stack([losses[term] / max(count, 1) for term, count in self.counts.items()])
        # processes average their gradients, but the loss needs their sum
        self.scaler.scale(means.sum() * self.world.size).backward()
        return means.detach()
