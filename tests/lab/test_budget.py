"""Equal budgets, checked with torch's own FLOP counter and with the parameters of real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertblocks import BertBlocksForMaskedLM
from bertblocks.core.settings import RecipeError
from bertblocks.lab.plan import make_plan
from bertblocks.lab.study import read_study
from bertblocks.training.build import expected_config
from bertblocks.training.recipe import Recipe
from bertblocks.training.training_plan import TrainingPlan

Write = Callable[..., Path]
VARIANTS = {
    "base": {},
    "mlp": {"model.config.mlp_type": "mlp"},
    "deep": {"model.config.num_hidden_layers": 5},
    "wide": {"model.config.hidden_size": 48, "model.config.num_attention_heads": 3},
    "long": {"phases.0.length": 16},
}
LONGER = [{"duration": "300 steps", "length": 32, "batch_tokens": 128}]


def count_addmm(sum_shape: Any, first: Any, second: Any, **_: Any) -> int:
    """The products that the fused cross-entropy adds to a gradient in place, which torch does not count by itself."""
    return 2 * first[0] * first[1] * second[1]


def count_training_flops(recipe: Recipe) -> float:
    """FLOPs of real forward and backward passes over all rows, as torch counts them, with the recipe's mask rate."""
    config = expected_config(recipe)
    config.attention_backend = "eager"
    model = BertBlocksForMaskedLM(config)
    phase = TrainingPlan(recipe).phases[0]
    ids = torch.randint(5, config.vocab_size, (20, phase.length))
    labels = torch.where(torch.arange(ids.numel()).view_as(ids) % 10 < 3, ids, -100)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: count_addmm}) as counter:
        model(input_ids=ids, labels=labels).loss.backward()
    return counter.get_total_flops() / ids.numel() * TrainingPlan(recipe).total_tokens


@pytest.mark.parametrize("by", ["steps", "depth", "width", "feed_forward"])
def test_equal_flops_agree_with_the_counter(write_study: Write, by: str) -> None:
    source = read_study(write_study(variants=VARIANTS, budget={"equal": "flops", "by": by}))
    changes = {**source.study.changes, "phases": LONGER, "model.config.intermediate_size": 256}
    object.__setattr__(source.study, "changes", changes)
    plan = make_plan(source)
    counted = {arm.name: arm.cost.flops for arm in plan.arms}
    assert all(abs(flops / counted["base"] - 1) <= 0.01 for flops in counted.values()), counted
    solved = [arm for arm in plan.arms if arm.solved]
    assert {"mlp", "deep", "wide"} <= {arm.name for arm in solved}
    real = {arm.name: count_training_flops(arm.recipe) for arm in plan.arms}
    assert all(abs(flops / real["base"] - 1) <= 0.01 for flops in real.values()), real
    assert counted == pytest.approx(real, rel=1e-6)


@pytest.mark.parametrize("by", ["depth", "width", "feed_forward"])
def test_equal_parameters_are_those_of_real_models(write_study: Write, by: str) -> None:
    variants = {name: VARIANTS[name] for name in ("base", "mlp")} | {"flat": {"model.config.num_hidden_layers": 1}}
    plan = make_plan(read_study(write_study(variants=variants, budget={"equal": "parameters", "by": by})))
    sizes = [BertBlocksForMaskedLM(expected_config(arm.recipe)).num_parameters() for arm in plan.arms]
    assert all(abs(size / sizes[0] - 1) <= 0.01 for size in sizes), sizes
    assert len({arm.cost.tokens for arm in plan.arms}) == 1
    assert [arm.cost.parameters for arm in plan.arms] == sizes


def test_equal_tokens_and_amounts(write_study: Write) -> None:
    budget = {"equal": "tokens", "amount": "64k tokens"}
    plan = make_plan(read_study(write_study(variants={"base": {}, "long": VARIANTS["long"]}, budget=budget)))
    assert [arm.cost.tokens for arm in plan.arms] == [64_000, 64_000]
    assert plan.arms[0].solved == {"phases.0.duration": "500 steps"}


def test_seconds_limit_the_schedule(write_study: Write) -> None:
    plan = make_plan(read_study(write_study(budget={"equal": "seconds", "amount": "2 minutes"})))
    assert [arm.recipe.schedule.budget for arm in plan.arms] == [120.0, 120.0]


def test_a_warmup_in_steps_keeps_its_share_of_the_seconds(write_study: Write) -> None:
    """Two of ten steps are a fifth of the time."""
    path = write_study(
        variants={"base": {"schedule": {"kind": "constant", "warmup": "2 steps"}}},
        budget={"equal": "seconds", "amount": "50 seconds"},
    )
    plan = TrainingPlan(make_plan(read_study(path)).arms[0].recipe)
    rates = [plan.at(7, seconds).learning_rate for seconds in (5.0, 9.0, 11.0, 49.0)]
    assert rates == pytest.approx([1e-3, 1.8e-3, 2e-3, 2e-3], rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"phases": [{"duration": "9 steps", "length": 32}, {"duration": "9 steps"}]}, "phases.1"),
        ({"phases.0.batch_warmup": {"start": 32, "over": "50%"}}, "phases.0.batch_warmup"),
        ({"phases.0.schedule": {"kind": "constant"}}, "phases.0.schedule"),
        ({"phases.0.curriculum": 2}, "phases.0.curriculum"),
        ({"objective.rate": {"start": 0.3, "end": 0.1}}, "objective.rate"),
        ({"phases.0.mask_rate": {"start": 0.3, "end": 0.1}}, "objective.rate"),
    ],
)
def test_what_depends_on_steps_cannot_have_equal_seconds(write_study: Write, changes: Any, key: str) -> None:
    budget = {"equal": "seconds", "amount": "2 minutes"}
    with pytest.raises(RecipeError, match=f"variants.base: {key} depends on the number of steps"):
        make_plan(read_study(write_study(variants={"base": changes}, budget=budget)))


def test_budgets_out_of_reach_say_so(write_study: Write) -> None:
    variants = {"base": {}, "deep": VARIANTS["deep"]}
    with pytest.raises(RecipeError, match=r"variants.deep: equal flops .* steps within 1%.* more steps"):
        make_plan(read_study(write_study(variants=variants)))


def test_larger_sizes_have_their_own_budget(write_study: Write) -> None:
    sizes = {"small": {}, "large": {"model.config.num_hidden_layers": 4}}
    plan = make_plan(read_study(write_study(sizes=sizes)))
    flops = {(arm.variant.name, arm.size): arm.cost.flops for arm in plan.arms}
    assert flops["none", "large"] == flops["rope", "large"] > flops["rope", "small"]
