"""Fine-tuning as a training task: labelled examples in a new order every epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine, permute
from bertblocks.tasks.base import Evaluated, FineTuneTask
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.settings import FineTuneSettings, MixtureSettings
from bertblocks.text.tables import DataError
from bertblocks.training.amounts import Amount
from bertblocks.training.data_sets import DataSets, evaluate_sets, metric_of_sets
from bertblocks.training.finetune_defaults import Choices
from bertblocks.training.schedules import Constant, Cosine, Linear, ScheduleSection, lr_factor
from bertblocks.training.task import TrainingTask

#: Many epochs of few examples are not all evaluated: early stopping would end them after a few steps.
MAX_EVALUATIONS = 10


class SupervisedTask(TrainingTask):
    """Trains on the features of a fine-tuning task and evaluates on held-out examples."""

    def __init__(
        self,
        task: FineTuneTask,
        settings: FineTuneSettings,
        sets: DataSets,
        held_out: DataSets,
        tokenizer: PreTrainedTokenizerBase,
        choices: Choices,
        max_length: int,
    ) -> None:
        self.task, self.settings, self.sets, self.held_out = task, settings, sets, held_out
        self.features: list[Any] = sets.items
        self.tokenizer, self.max_length = tokenizer, max_length
        self.peak_learning_rate = choices.learning_rate
        # every batch is full: the texts of an embedding batch are each other's negatives
        self.batch_size = choices.batch_size
        self.temperature = settings.dataset_temperature if isinstance(settings, MixtureSettings) else 1.0
        self.has_unused_weights = task.has_unused_weights
        features = self.features
        steps = choices.epochs * len(features) / self.batch_size
        self.total_steps = max(1, math.floor(steps) if task.compares_examples else math.ceil(steps - 1e-9))
        per_epoch, least = settings.evaluations_per_epoch, 1
        if per_epoch is None:
            per_epoch, least = 1, math.ceil(self.total_steps / MAX_EVALUATIONS)
        self.steps_per_evaluation = max(least, round(len(features) / self.batch_size) // per_epoch)
        self.schedule = _schedule(settings)

    @property
    def metric(self) -> str:
        """The score that selects the best model."""
        return metric_of_sets(self.task, self.held_out)

    def initial_position(self) -> dict[str, Any]:
        return {"example": 0} if len(self.sets.names) == 1 else {"examples": [0] * len(self.sets.names)}

    def next_items(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """All items of a step come from one data set."""
        if len(self.sets.names) == 1:
            chosen, last = self._choose(0, position["example"], "examples")
            return chosen, {"example": last}
        number, examples = self.sets.choose(step, self.settings.seed, self.temperature), list(position["examples"])
        chosen, examples[number] = self._choose(number, examples[number], f"examples {number}")
        return chosen, {"examples": examples}

    def _choose(self, number: int, first: int, purpose: str) -> tuple[list[Any], int]:
        """The items of a data set from its position `first` on, in the order of their epoch, and the position after."""
        start, size = self.sets.starts[number], self.sets.sizes[number]
        last = first + min(self.batch_size, size)
        positions = np.arange(first, last)
        epochs, ranks = np.divmod(positions, size)
        chosen = start + permute(ranks, size, combine(purpose, self.settings.seed, epochs))
        keys = combine("partners", self.settings.seed, positions)
        chosen = self.task.add_partners(chosen, keys)
        return list(self.task.draw([self.features[index] for index in chosen.tolist()], keys)), last

    def collate(self, step: int, items: Sequence[Any]) -> FlatBatch:
        return self.task.collate(step, items)

    def is_side_step(self, step: int) -> bool:
        return self.task.is_side_step(step)

    def before_step(self, model: Any, step: int) -> None:
        self.task.before_step(step, self.total_steps)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return self.task.losses(model, batch)

    def compares(self, batch: FlatBatch) -> bool:
        return self.task.compares(batch)

    def encode(self, model: nn.Module, batch: FlatBatch) -> Tensor:
        return self.task.encode(model, batch)

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[FlatBatch]) -> dict[str, Tensor]:
        return self.task.compare(outputs, batches)

    def learning_rate(self, step: int, seconds: float) -> float:
        def measure(amount: Amount) -> float:
            return self.total_steps * amount.value / 100

        return self.peak_learning_rate * lr_factor(self.schedule, step, step + 1, self.total_steps, measure)

    def micro_batch_size(self, step: int) -> int | None:
        return self.settings.micro_batch_size

    def step_info(self, step: int) -> dict[str, Any]:
        return {"epoch": step * self.batch_size / len(self.features)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.evaluate_fully(model).scores

    def evaluate_fully(self, model: nn.Module) -> Evaluated:
        """Scores and report tables of the current model, computed by the predictor that its users get."""
        if self.task.refits_head:
            self.task.fit_head(unwrap(model), self.features)
        return evaluate_sets(self.task, self.predictor(model), self.held_out)

    def predictor(self, model: nn.Module) -> Predictor:
        predictor = Predictor(unwrap(model), self.tokenizer, pooling=self.task.pooling, max_length=self.max_length)
        predictor.embedding = self.task.embedding
        return predictor


def unwrap(model: nn.Module) -> Any:
    """The model inside the wrappers of DDP and peft."""
    inner: Any = model.module if hasattr(model, "module") else model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _schedule(settings: FineTuneSettings) -> ScheduleSection:
    warmup = Amount(100 * settings.warmup, "%")
    if settings.schedule == "linear":
        return Linear(kind="linear", warmup=warmup)
    return (
        Cosine(kind="cosine", warmup=warmup)
        if settings.schedule == "cosine"
        else Constant(kind="constant", warmup=warmup)
    )


def split_examples(
    examples: Sequence[Any], groups: Sequence[str], strata: Sequence[str | None], eval_share: float, seed: int
) -> tuple[list[Any], list[Any]]:
    """Splits examples into a training and an evaluation part, stratified. The examples of a group stay together."""
    strata_of = dict(zip(groups, strata, strict=True))
    names = list(strata_of)
    order = permute(np.arange(len(names)), len(names), combine("split", seed)).tolist()
    count = max(1, round(eval_share * len(names)))
    if count >= len(names):
        raise DataError(
            f"There are only {len(names)} examples, too few to hold some out for evaluation; "
            "provide an evaluation file (--eval)."
        )
    shuffled = [names[index] for index in order]
    chosen = set(_stratified([strata_of[name] for name in shuffled], shuffled, count))
    pairs = list(zip(examples, groups, strict=True))
    train = [example for example, group in pairs if group not in chosen]
    return train, [example for example, group in pairs if group in chosen]


def _stratified(strata: Sequence[str | None], names: Sequence[str], count: int) -> list[str]:
    """The first names of each stratum, `count` in all, in proportion to the sizes of the strata.

    Example:
        >>> _stratified(["x", "x", "y", "x", "y", "x"], ["a", "b", "c", "d", "e", "f"], 3)
        ['a', 'b', 'c']
    """
    by_stratum: dict[str | None, list[str]] = {}
    for stratum, name in zip(strata, names, strict=True):
        by_stratum.setdefault(stratum, []).append(name)
    quotas = {stratum: count * len(group) / len(names) for stratum, group in by_stratum.items()}
    taken = {stratum: int(quota) for stratum, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda stratum: taken[stratum] - quotas[stratum])
    for stratum in by_remainder[: count - sum(taken.values())]:
        taken[stratum] += 1
    return [name for stratum, group in by_stratum.items() for name in group[: taken[stratum]]]
