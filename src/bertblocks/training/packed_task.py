"""Pretraining as a task: packed rows of texts, an objective, and phases that change both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.stream import Documents, PackedStream, Position, Row, StreamSource
from bertblocks.nn.position import RotaryPosition, get_block_position
from bertblocks.objectives import Objective
from bertblocks.training.held_out import HeldOut
from bertblocks.training.recipe import Recipe
from bertblocks.training.task import Task
from bertblocks.training.training_plan import TrainingPlan


class PackedTask(Task):
    """Trains on a recipe's sources, phase by phase."""

    def __init__(
        self,
        recipe: Recipe,
        sources: Mapping[str, Documents],
        objectives: Sequence[Objective],
        held_out: HeldOut | None = None,
    ) -> None:
        self.seed, self.micro_batch_tokens = recipe.run.seed, recipe.run.micro_batch_tokens
        self.plan = TrainingPlan(recipe)
        self.total_steps = self.plan.total_steps
        self.objectives = objectives  # one for each phase
        self.held_out = held_out
        least = {source.name: source.min_tokens for source in recipe.corpus.sources}
        self.streams = [
            PackedStream(
                [StreamSource(sources[name], weight, least[name]) for name, weight in phase.mixture.items() if weight],
                phase.length,
                objective.overhead,
                self.seed,
                phase.index,
            )
            for phase, objective in zip(self.plan.phases, objectives, strict=True)
        ]

    def start(self) -> dict[str, Any]:
        return {"phase": 0, **asdict(Position())}

    def take(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Row], dict[str, Any]]:
        moment = self.plan.at(step)
        phase = moment.phase.index
        # a new phase begins its own stream
        place = Position(position["pool"], position["row"]) if position["phase"] == phase else Position()
        rows, following = self.streams[phase].take(place, moment.rows)
        return rows, {"phase": phase, **asdict(following)}

    def batch(self, step: int, items: Sequence[Row]) -> FlatBatch:
        moment = self.plan.at(step)
        return self.objectives[moment.phase.index].batch(items, self.seed, moment.progress)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return self.objectives[0].losses(model, batch)

    def learning_rate(self, step: int) -> float:
        return self.plan.at(step).learning_rate

    def micro_batch(self, step: int) -> int | None:
        if self.micro_batch_tokens is None:
            return None
        return max(self.micro_batch_tokens // self.plan.at(step).phase.length, 1)

    def prepare(self, model: Any, step: int) -> None:
        theta = self.plan.at(step).phase.rope_theta
        if theta is not None and model.config.rope_theta != theta:
            set_rope_theta(model, theta)

    def describe(self, step: int) -> dict[str, Any]:
        moment = self.plan.at(step)
        slots = {"slots": moment.rows * moment.phase.length}
        return slots | ({"phase": moment.phase.name} if len(self.plan.phases) > 1 else {})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.held_out is None else self.held_out.evaluate(model)


def set_rope_theta(model: Any, theta: float) -> None:
    """Gives the global layers of a live model another theta; local layers keep theirs."""
    config, encoder = model.config, model.base_model.encoder
    local_theta = config.local_rope_theta
    config.rope_theta = theta
    config.local_rope_theta = local_theta  # it follows the global one otherwise
    has_changed = False
    for group, layer in enumerate(encoder.layers):
        index, attention = encoder.order.index(group), layer.attention
        if isinstance(attention.position, RotaryPosition) and config.layer_types[index] == "global":
            attention.position = get_block_position(config.for_layer(index), is_local=False)
            attention.pattern = replace(attention.pattern, position=attention.position)
            has_changed = True
    if not has_changed:
        raise ValueError(f"A phase has rope_theta {theta:g}, and the model has no global layer with RoPE.")
