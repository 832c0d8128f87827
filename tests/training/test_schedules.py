"""Learning rates, tested against their formulas, and the steps of a run, tested by counting."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertblocks.core.settings import RecipeError
from bertblocks.training.amounts import Amount
from bertblocks.training.recipe import read_recipe
from bertblocks.training.sections import BatchWarmup
from bertblocks.training.training_plan import BatchPlan, TrainingPlan


def rates(*overrides: str) -> list[float]:
    table = TrainingPlan(read_recipe(None, ["optimizer.lr=1", "phases.0.duration=100", *overrides]))
    return [table.at(step).learning_rate for step in range(table.total_steps)]


def test_the_constant_schedule_equals_its_formula() -> None:
    assert rates("schedule={kind: constant, warmup: 4}") == [0.25, 0.5, 0.75] + [1.0] * 97


def test_the_linear_schedule_ends_at_its_share() -> None:
    expected = [min((step + 1) / 10, 1 - 0.8 * max(step - 10, 0) / 90) for step in range(100)]
    assert rates("schedule={kind: linear, warmup: 10%, final: 0.2}") == pytest.approx(expected)


def test_the_cosine_schedule_can_end_early() -> None:
    """NeoBERT's schedule: it reaches a tenth of the peak after nine tenths of the run."""
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * min(step, 90) / 90)) / 2 for step in range(100)]
    assert rates("schedule={kind: cosine, final: 0.1, until: 90%}") == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_the_wsd_schedule_equals_its_formula(shape: Any) -> None:
    def fall(done: float) -> float:
        return 1 - (math.sqrt(done) if shape == "sqrt" else done)

    expected = [min((step + 1) / 5, fall(max(step - 80, 0) / 20)) for step in range(100)]
    assert rates(f"schedule={{kind: wsd, warmup: 5, decay: 20 steps, shape: {shape}}}") == pytest.approx(expected)


def test_warmup_in_tokens_equals_warmup_in_steps_for_equal_batches() -> None:
    by_steps = rates("schedule={kind: linear, warmup: 10}")
    assert rates("schedule={kind: linear, warmup: 20480 tokens}") == pytest.approx(by_steps)


def test_warmup_in_tokens_follows_a_growing_batch() -> None:
    found = rates(
        "schedule={kind: constant, warmup: 2560 tokens}",
        "phases=[{duration: 20, length: 128, batch_tokens: 512, batch_warmup: {start: 128, over: 4 steps}}]",
    )
    # batches of 1, 1, 2, 3 and then 4 rows of 128
    tokens = [128, 256, 512, 896] + [896 + 512 * more for more in range(1, 17)]
    assert found == pytest.approx([min(1.0, done / 2560) for done in tokens])


def test_a_schedule_spans_phases_unless_a_phase_has_its_own() -> None:
    phases = "phases=[{duration: 60}, {duration: 20, lr: 0.5, schedule: {kind: constant}}, {duration: 40, lr: 1}]"
    found = rates("schedule={kind: linear}", phases)
    assert found[:60] == pytest.approx([1 - step / 100 for step in range(60)])
    assert found[60:80] == [0.5] * 20
    assert found[80:] == pytest.approx([1 - step / 100 for step in range(60, 100)])


def test_phases_inherit_settings_from_the_phase_before() -> None:
    table = TrainingPlan(
        read_recipe(
            None, ["phases=[{duration: 3, length: 64, batch_tokens: 640, mask_rate: 0.4}, {duration: 1280 tokens}]"]
        )
    )
    first, second = table.phases
    assert (second.length, second.objective.labelled_share, second.batches.rows) == (64, 0.4, 10)
    assert (second.first_step, second.first_token, table.total_steps, table.total_tokens) == (3, 1920, 5, 3200)
    planned = table.at(4)
    assert (planned.phase.index, planned.step_in_phase, planned.tokens, planned.progress) == (1, 1, 2560, 0.5)
    assert first.rope_theta is None


@given(
    rows=st.integers(1, 40),
    start=st.integers(1, 40),
    over=st.sampled_from([Amount(7, "steps"), Amount(3000, "tokens"), Amount(50, "%")]),
    duration=st.sampled_from([Amount(23, "steps"), Amount(9999, "tokens")]),
)
def test_batch_plans_equal_a_loop_over_steps(rows: Any, start: Any, over: Any, duration: Any) -> None:
    start = min(start, rows)
    batches = BatchPlan(16, rows, duration, BatchWarmup(start=start * 16, over=over))
    sizes = [batches.rows_at(step) for step in range(batches.steps)]
    done = 0
    for step, size in enumerate(sizes):
        assert batches.tokens(step) == done
        assert batches.step_at(done) == step
        done += 16 * size
    assert batches.total == done
    assert sizes == sorted(sizes)
    assert sizes[0] == start or over.value == 0
    if duration.unit == "tokens":
        assert done >= duration.value > done - 16 * sizes[-1]
    else:
        assert len(sizes) == 23


def test_a_batch_smaller_than_a_row_raises() -> None:
    with pytest.raises(RecipeError, match=r"phases\.0: batch_tokens is 100, less than one row of length 128"):
        TrainingPlan(read_recipe(None, ["phases=[{duration: 1, length: 128, batch_tokens: 100}]"]))


def test_an_exponential_schedule_falls_by_a_constant_ratio() -> None:
    own = rates("schedule={kind: exponential, warmup: 2, final: 0.01}", "phases.0.duration=12")
    assert own[:3] == [0.5, 1.0, 1.0]
    assert own[2:] == pytest.approx([0.01 ** (step / 10) for step in range(10)])


def test_an_inverse_square_root_schedule_does_not_depend_on_the_duration() -> None:
    short, long = (rates("schedule={kind: inverse_sqrt, warmup: 4}", f"phases.0.duration={n}") for n in (20, 40))
    assert short == long[:20]
    assert short[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert short[16] == pytest.approx(0.5)  # sqrt(4 / 16)
    with pytest.raises(RecipeError, match=r"schedule.warmup is '0 steps'; inverse_sqrt decays relative to its warm-up"):
        read_recipe(None, ["schedule={kind: inverse_sqrt, warmup: 0}"])


def test_theta_moves_linearly_and_later_phases_keep_its_end() -> None:
    phases = "[{duration: 2, rope_theta: 100}, {duration: 5, rope_theta: {start: 200, end: 1000}}, {duration: 2}]"
    plan = TrainingPlan(read_recipe(None, [f"phases={phases}"]))
    found = [plan.at(step).rope_theta for step in range(plan.total_steps)]
    assert found == [100, 100, 200, 400, 600, 800, 1000, 1000, 1000]


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ("{kind: linear, budget: 50 seconds}", lambda share: 1 - share),
        ("{kind: cosine, budget: 50 seconds}", lambda share: (1 + math.cos(math.pi * share)) / 2),
        ("{kind: wsd, warmup: 0, decay: 50%, shape: linear, budget: 50 seconds}", lambda share: min(1, 2 - 2 * share)),
    ],
)
def test_a_schedule_with_a_budget_follows_the_elapsed_share_of_it(schedule: Any, factor: Any) -> None:
    plan = TrainingPlan(read_recipe(None, ["optimizer.lr=1", "phases.0.duration=100", f"schedule={schedule}"]))
    for step, seconds in ((0, 0.0), (0, 20.0), (7, 20.0), (99, 45.0)):
        assert plan.at(step, seconds).learning_rate == pytest.approx(factor(seconds / 50))
    assert plan.at(99, 80.0).learning_rate == pytest.approx(factor(1.0))


def test_the_warmup_is_a_share_of_the_budget_too() -> None:
    schedule = "schedule={kind: constant, warmup: 50%, budget: 1 hour}"
    plan = TrainingPlan(read_recipe(None, ["phases.0.duration=100", schedule]))
    rate = plan.recipe.optimizer.lr
    assert plan.at(90, 360.0).learning_rate == pytest.approx(rate * 11 / 50)  # the step after a tenth of 100 steps
    assert plan.at(3, 1800.0).learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule={budget: soon}", "schedule.budget is 'soon'; it must be a time such as '90 seconds'"),
        ("schedule={budget: 0 hours}", "schedule.budget is '0 hours'; it must be a time"),
        ("phases.0.schedule={budget: 1 hour}", "phases.0.schedule.budget has no meaning; set schedule.budget"),
        ("phases.0.rope_theta={start: 10}", "phases.0.rope_theta.end is missing"),
        ("phases.0.min_length=4", "phases.0.min_length is 4; it must be greater than or equal to 8"),
    ],
)
def test_wrong_times_and_thetas_raise(override: Any, message: Any) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        read_recipe(None, [override])


def test_a_minimum_length_above_the_length_raises() -> None:
    with pytest.raises(RecipeError, match=r"phases\.0: min_length is 256; it must be at most length, 128"):
        TrainingPlan(read_recipe(None, ["phases.0.min_length=256"]))
