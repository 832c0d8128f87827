"""Distillation as a training task: texts in a new order every epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine, permute
from bertblocks.training.amounts import Amount
from bertblocks.training.distillation.method import Item, Method
from bertblocks.training.schedules import Linear, lr_factor
from bertblocks.training.task import TrainingTask

#: Examples per forward pass of an evaluation.
EVALUATION_BATCH = 32


class DistillationTask(TrainingTask):
    """Trains on the examples `train` of a method, by index, and evaluates its loss on those `held_out`."""

    def __init__(self, method: Method, train: np.ndarray, held_out: np.ndarray) -> None:
        self.method, self.settings = method, method.settings
        self.train, self.held_out = train, held_out
        self.batch_size = min(self.settings.batch_size, len(train))
        self.total_steps = max(1, math.ceil(self.settings.epochs * len(train) / self.batch_size - 1e-9))
        self.steps_per_evaluation = max(1, math.ceil(self.total_steps / self.settings.evaluations))
        self.schedule = Linear(kind="linear", warmup=Amount(100 * self.settings.warmup, "%"))

    def initial_position(self) -> dict[str, Any]:
        return {"example": 0}

    def next_items(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Item], dict[str, Any]]:
        positions = np.arange(position["example"], position["example"] + self.batch_size)
        epochs, ranks = np.divmod(positions, len(self.train))
        chosen = self.train[permute(ranks, len(self.train), combine("examples", self.settings.seed, epochs))]
        items = list(zip(chosen.tolist(), positions.tolist(), strict=True))
        return items, {"example": position["example"] + self.batch_size}

    def collate(self, step: int, items: Sequence[Item]) -> FlatBatch:
        return self.method.batch(items)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return self.method.losses(model, batch)

    def learning_rate(self, step: int, seconds: float) -> float:
        def measure(amount: Amount) -> float:
            return self.total_steps * amount.value / 100

        return self.settings.learning_rate * lr_factor(self.schedule, step, step + 1, self.total_steps, measure)

    def micro_batch_size(self, step: int) -> int | None:
        return self.settings.micro_batch_size

    def step_info(self, step: int) -> dict[str, Any]:
        return {"epoch": step * self.batch_size / len(self.train)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The mean loss on held-out examples, its parts, and what the method makes of them."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for start in range(0, len(self.held_out), EVALUATION_BATCH):
            # position 0 stands for all evaluations, so that they mask the same tokens
            items = [(index, 0) for index in self.held_out[start : start + EVALUATION_BATCH].tolist()]
            batch = self.method.batch(items).to(self.method.device)
            for term, loss in self.method.losses(model, batch).items():
                sums[term] = sums.get(term, 0.0) + float(loss)
                counts[term] = counts.get(term, 0) + batch.counts[term]
        means = {term: total / max(counts[term], 1) for term, total in sums.items()}
        parts = {f"held_out_{term}": mean for term, mean in means.items()} if len(means) > 1 else {}
        return {"held_out_loss": sum(means.values()), **parts, **self.method.measures(means)}
