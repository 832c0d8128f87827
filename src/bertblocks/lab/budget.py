"""Equal budgets: changes the steps, depth or width of a variant until it costs what the baseline costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from bertblocks.analysis import build, count_flops
from bertblocks.core.settings import RecipeError, Section
from bertblocks.lab.study import Budget
from bertblocks.models import BertBlocksPreTrainedModel, GeneratorAndDiscriminator, TrainingModel
from bertblocks.training.amounts import Amount
from bertblocks.training.build import check_model, expected_config
from bertblocks.training.recipe import Recipe
from bertblocks.training.training_plan import PhasePlan, TrainingPlan

#: The largest relative distance from the budget, and the one up to which a size may be rounded.
TOLERANCE, ROUNDING = 0.01, 0.005
#: A run that is limited by seconds has this many times the recipe's steps, so that its time ends it.
MANY = 1000


@dataclass(frozen=True)
class Cost:
    """What a training run takes, counted from its recipe. FLOPs are those of matrix products."""

    parameters: int
    flops: float
    tokens: int
    steps: int


@dataclass(frozen=True)
class Solved:
    """A recipe within the budget, the keys that were solved, and the cost."""

    recipe: Recipe
    changes: dict[str, Any]
    cost: Cost


def count_cost(recipe: Recipe) -> Cost:
    """Counts as the library computes: tokens without a label leave the last layer after its attention."""
    plan = TrainingPlan(recipe)
    short = [phase.model_copy(update={"duration": Amount(1, "steps")}) for phase in recipe.phases]
    parameters, per_token = _count_model(recipe.model_copy(update={"phases": short}).model_dump_json())
    flops = sum(each * phase.batches.total for each, phase in zip(per_token, plan.phases, strict=True))
    return Cost(parameters, flops, plan.total_tokens, plan.total_steps)


@lru_cache(maxsize=4096)
def _count_model(recipe_json: str) -> tuple[int, list[float]]:
    """The parameters of a recipe's model, and the FLOPs of a token in each phase."""
    recipe = Recipe.model_validate_json(recipe_json)
    with torch.device("meta"):
        model = recipe.objective.prepare_model(build(expected_config(recipe), recipe.objective.model_task))
    return model.num_parameters(), [_count_flops(model, phase) for phase in TrainingPlan(recipe).phases]


def _count_flops(model: BertBlocksPreTrainedModel, phase: PhasePlan) -> float:
    """A forward and a backward pass, which takes twice the FLOPs; NaN for models that add parts of their own."""
    labelled = phase.objective.labelled_share
    if isinstance(model, GeneratorAndDiscriminator):
        forward = _count_forward(model.generator, phase.length, labelled)
        forward += _count_forward(model.discriminator, phase.length, 1.0)
    elif isinstance(model, TrainingModel):
        return math.nan
    else:
        forward = _count_forward(model, phase.length, labelled)
    return 3 * forward / phase.length


def _count_forward(model: BertBlocksPreTrainedModel, length: int, labelled: float) -> float:
    """FLOPs of a sequence of which a share has labels. They are linear in the number of labels."""
    none, every = (count_flops(model, length, scored)["total"] for scored in (0, length))
    return none + labelled * (every - none)


def solve(recipe: Recipe, budget: Budget, baseline: Recipe) -> Solved:
    """The recipe with the budget's amount or, without one, with as much as the baseline takes."""
    if budget.equal == "seconds":
        assert budget.value is not None
        changes = {"schedule.budget": f"{budget.value:g} seconds"}
        return Solved(_limit_time(recipe, budget.value), changes, count_cost(recipe))
    target = budget.value if budget.value is not None else getattr(count_cost(baseline), budget.equal)
    if math.isnan(target):
        raise RecipeError(f"the FLOPs of objective {baseline.objective.kind} are not known; set another budget.equal.")
    solved = _SOLVERS[budget.solver](recipe, budget.equal, target)
    if budget.equal == "parameters":
        solved = _solve_steps(solved, "tokens", count_cost(baseline).tokens)
    found = getattr(count_cost(solved), budget.equal)
    if abs(found / target - 1) > TOLERANCE:
        raise RecipeError(
            f"equal {budget.equal} of {target:.4g} cannot be reached by {budget.solver} within {TOLERANCE:.0%}: the "
            f"nearest is {found:.4g}; solve by another of the sizes, or train for more steps."
        )
    return Solved(solved, _differences(recipe, solved), count_cost(solved))


def _limit_time(recipe: Recipe, seconds: float) -> Recipe:
    """The recipe with so many steps that its time ends it, and with a schedule that follows its time."""
    phase, objective = recipe.phases[0], TrainingPlan(recipe).phases[0].objective
    by_step = {
        "phases.1": len(recipe.phases) > 1,
        "phases.0.schedule": phase.schedule,
        "phases.0.batch_warmup": phase.batch_warmup,
        "phases.0.curriculum": phase.curriculum,
        "phases.0.rope_theta": isinstance(phase.rope_theta, Section),
        "objective.rate": isinstance(getattr(objective, "rate", None), Section),
    }
    if (key := next((key for key, is_set in by_step.items() if is_set), None)) is not None:
        raise RecipeError(
            f"{key} depends on the number of steps, which equal seconds leave open; remove it, or set another "
            "budget.equal."
        )
    spans = {
        key: Amount(value.value * MANY, value.unit)
        for key, value in recipe.schedule
        if isinstance(value, Amount) and value.unit != "%"
    }
    schedule = recipe.schedule.model_copy(update={**spans, "budget": seconds})
    return scale_steps(recipe, MANY).model_copy(update={"schedule": schedule})


def scale_steps(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with a multiple of the steps in each phase, at least one."""
    steps = [phase.batches.steps for phase in TrainingPlan(recipe).phases]
    phases = [
        phase.model_copy(update={"duration": Amount(max(round(count * factor), 1), "steps")})
        for phase, count in zip(recipe.phases, steps, strict=True)
    ]
    return recipe.model_copy(update={"phases": phases})


def _solve_steps(recipe: Recipe, quantity: str, target: float) -> Recipe:
    """Scales all phases, twice, because batches that grow at first make the cost of steps uneven."""
    for _ in range(2):
        found = getattr(count_cost(recipe), quantity)
        if found == target:
            break
        recipe = scale_steps(recipe, target / found)
    return recipe


def with_sizes(recipe: Recipe, **sizes: Any) -> Recipe:
    """The recipe with other values for keys of its config."""
    model = recipe.model.model_copy(update={"config": {**recipe.model.config, **sizes}})
    recipe = recipe.model_copy(update={"model": model})
    check_model(TrainingPlan(recipe))
    return recipe


def _solve_feed_forward(recipe: Recipe, quantity: str, target: float) -> Recipe:
    """The roundest intermediate size that is close enough to the target. Costs are linear in it."""

    def cost(size: int) -> float:
        return getattr(count_cost(with_sizes(recipe, intermediate_size=size)), quantity)

    low, high = 64, 128
    slope = (cost(high) - cost(low)) / (high - low)
    wanted = low + (target - cost(low)) / slope
    if wanted < 1:
        raise RecipeError(f"{quantity} of {target:.4g} leave no room for a feed-forward network.")
    for multiple in (64, 32, 16, 8, 4, 2):
        size = round(wanted / multiple) * multiple
        if size and abs(cost(size) / target - 1) <= ROUNDING:
            return with_sizes(recipe, intermediate_size=size)
    return with_sizes(recipe, intermediate_size=max(round(wanted), 1))


def _solve_depth(recipe: Recipe, quantity: str, target: float) -> Recipe:
    """The number of layers nearest to the target; the feed-forward networks take up the rest."""
    layers = expected_config(recipe).num_hidden_layers

    def at(count: int) -> Recipe:
        return with_sizes(recipe, num_hidden_layers=count)

    def cost(count: int) -> float:
        return getattr(count_cost(at(count)), quantity)

    per_layer = (cost(2 * layers) - cost(layers)) / layers
    wanted = layers + (target - cost(layers)) / per_layer
    best = min({max(math.floor(wanted), 1), max(math.ceil(wanted), 1)}, key=lambda count: abs(cost(count) - target))
    return _fill(at(best), quantity, target)


def _solve_width(recipe: Recipe, quantity: str, target: float) -> Recipe:
    """The hidden size nearest to the target, in heads of the same size; the feed-forward networks take up the rest."""
    config = expected_config(recipe)
    per_kv_head = config.num_attention_heads // config.num_kv_heads

    def at(kv_heads: int) -> Recipe:
        heads = kv_heads * per_kv_head
        hidden = heads * config.hidden_size // config.num_attention_heads
        inner = max(round(config.intermediate_size * hidden / config.hidden_size), 1)
        grouped = {"num_kv_heads": kv_heads} if per_kv_head > 1 else {}
        return with_sizes(recipe, hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner, **grouped)

    def cost(kv_heads: int) -> float:
        return getattr(count_cost(at(kv_heads)), quantity)

    low, high = 1, 1
    while cost(high) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < target else (low, middle)
    best = min({low, high}, key=lambda heads: abs(cost(heads) - target))
    return _fill(at(best), quantity, target)


def _fill(recipe: Recipe, quantity: str, target: float) -> Recipe:
    is_close = abs(getattr(count_cost(recipe), quantity) / target - 1) <= ROUNDING
    return recipe if is_close else _solve_feed_forward(recipe, quantity, target)


_SOLVERS = {
    "steps": _solve_steps,
    "depth": _solve_depth,
    "width": _solve_width,
    "feed_forward": _solve_feed_forward,
}


def _differences(before: Recipe, after: Recipe) -> dict[str, Any]:
    """The keys that solving changed."""
    changes: dict[str, Any] = {}
    old, new = before.model.config, after.model.config
    for key in new:
        if new[key] != old.get(key):
            changes[f"model.config.{key}"] = new[key]
    for index, (first, second) in enumerate(zip(before.phases, after.phases, strict=True)):
        if first.duration != second.duration:
            changes[f"phases.{index}.duration"] = str(second.duration)
    return changes
