"""Pretraining as a training task: packed rows of texts, an objective, and phases that change both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bertblocks.data.chunks import ChunkIndex, ChunkSizes
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.parts import TokenParts
from bertblocks.data.stream import Cursor, Documents, PackedStream, Position, Row, StreamSource
from bertblocks.objectives import Objective
from bertblocks.training.held_out import HeldOutEvaluator
from bertblocks.training.sections import Corpus
from bertblocks.training.task import TrainingTask
from bertblocks.training.training_plan import TrainingPlan


class PretrainingTask(TrainingTask):
    """Trains on a recipe's sources, phase by phase."""

    def __init__(
        self,
        plan: TrainingPlan,
        sources: Mapping[str, Documents | TokenParts],
        objectives: Sequence[Objective],
        held_out: HeldOutEvaluator | None = None,
    ) -> None:
        recipe = plan.recipe
        self.seed, self.micro_batch_tokens = recipe.run.seed, recipe.run.micro_batch_tokens
        self.plan = plan
        self.total_steps, self.budget = plan.total_steps, recipe.schedule.budget
        self.objectives = objectives  # one per phase
        self.objective = objectives[0]  # of the current step
        self.held_out = held_out
        min_tokens = {source.name: source.min_tokens for source in recipe.corpus.sources}
        factors = {name: _size_factor(sources[name], least, recipe.corpus) for name, least in min_tokens.items()}
        self.streams = [
            PackedStream(
                [
                    StreamSource(sources[name], weight * factors[name], min_tokens[name])
                    for name, weight in phase.mixture.items()
                    if weight
                ],
                phase.length,
                objective.overhead,
                self.seed,
                phase.index,
                min_length=phase.min_length,
                grades=phase.curriculum or 1,
                total_rows=phase.batches.total // phase.length,
            )
            for phase, objective in zip(plan.phases, objectives, strict=True)
        ]
        self.streamed = {name: source for name, source in sources.items() if isinstance(source, TokenParts)}
        self._cursors: dict[int, Mapping[str, Cursor]] = {}  # where the streamed sources are before each step

    def initial_position(self) -> dict[str, Any]:
        return _record(0, Position())

    def next_items(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Row], dict[str, Any]]:
        planned = self.plan.at(step)
        phase = planned.phase.index
        cursors = {name: tuple(cursor) for name, cursor in position.get("cursors", {}).items()}
        start = Position(position["pool"], position["row"], cursors)
        if position["phase"] != phase:  # every phase starts its own stream, and streamed sources with their next part
            start = Position(cursors={name: (part + 1, 0) for name, (part, _) in cursors.items()})
        rows, following = self.streams[phase].take(start, planned.rows)
        self._cursors[step] = start.cursors
        return rows, _record(phase, following)

    def collate(self, step: int, items: Sequence[Row]) -> FlatBatch:
        planned = self.plan.at(step)
        return self.objectives[planned.phase.index].batch(items, self.seed, planned.progress)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return self.objective.losses(model, batch)

    def learning_rate(self, step: int, seconds: float) -> float:
        return self.plan.at(step, seconds).learning_rate

    def micro_batch_size(self, step: int) -> int | None:
        if self.micro_batch_tokens is None:
            return None
        return max(self.micro_batch_tokens // self.plan.at(step).phase.length, 1)

    def before_step(self, model: Any, step: int) -> None:
        # another process may still be in the step before this one
        for name, (part, _) in self._cursors.pop(step - 1, {}).items():
            self.streamed[name].delete_before(part)
        planned = self.plan.at(step)
        phase, theta = planned.phase, planned.rope_theta
        self.objective = self.objectives[phase.index]
        if model.config.causal != self.objective.is_causal:
            model.set_causal(self.objective.is_causal)
        if theta is not None and model.config.rope_theta != theta:
            model.set_rope_theta(theta)
        if phase.causal is not None and model.config.causal != phase.causal:
            model.set_causal(phase.causal)

    def step_info(self, step: int) -> dict[str, Any]:
        planned = self.plan.at(step)
        slots = {"slots": planned.rows * planned.phase.length}
        return slots | ({"phase": planned.phase.name} if len(self.plan.phases) > 1 else {})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.held_out is None else self.held_out.evaluate(model)


def _record(phase: int, position: Position) -> dict[str, Any]:
    """A position as JSON values."""
    values = {"phase": phase, "pool": position.pool, "row": position.row}
    return values | ({"cursors": dict(position.cursors)} if position.cursors else {})


def _size_factor(documents: Documents | TokenParts, min_tokens: int, corpus: Corpus) -> float:
    """The factor on a weight that follows from the size (Conneau et al., 2020, with alpha = 1 / temperature)."""
    if corpus.temperature is None or isinstance(documents, TokenParts):
        return 1.0
    tokens = ChunkIndex(documents, min_tokens, ChunkSizes(1, 1, ()), "A source").tokens
    return float(tokens) ** (1 / corpus.temperature)
