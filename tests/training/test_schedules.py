"""Learning rates by their formulas, and the steps of a run by counting."""

import math
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


def test_constant() -> None:
    assert rates("schedule={kind: constant, warmup: 4}") == [0.25, 0.5, 0.75] + [1.0] * 97


def test_linear_to_a_share() -> None:
    expected = [min((step + 1) / 10, 1 - 0.8 * max(step - 10, 0) / 90) for step in range(100)]
    assert rates("schedule={kind: linear, warmup: 10%, final: 0.2}") == pytest.approx(expected)


def test_cosine_that_ends_early() -> None:
    """NeoBERT: to a tenth at nine tenths of the run."""
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * min(step, 90) / 90)) / 2 for step in range(100)]
    assert rates("schedule={kind: cosine, final: 0.1, until: 90%}") == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_wsd(shape: Any) -> None:
    def fall(done: float) -> float:
        return 1 - (math.sqrt(done) if shape == "sqrt" else done)

    expected = [min((step + 1) / 5, fall(max(step - 80, 0) / 20)) for step in range(100)]
    assert rates(f"schedule={{kind: wsd, warmup: 5, decay: 20 steps, shape: {shape}}}") == pytest.approx(expected)


def test_by_tokens_as_by_steps_where_batches_are_equal() -> None:
    by_steps = rates("schedule={kind: linear, warmup: 10}")
    assert rates("schedule={kind: linear, warmup: 20480 tokens}") == pytest.approx(by_steps)


def test_warm_up_by_tokens_follows_a_growing_batch() -> None:
    found = rates(
        "schedule={kind: constant, warmup: 2560 tokens}",
        "phases=[{duration: 20, length: 128, batch_tokens: 512, batch_warmup: {start: 128, over: 4 steps}}]",
    )
    # batches of 1, 1, 2, 3 and then 4 rows of 128
    tokens = [128, 256, 512, 896] + [896 + 512 * more for more in range(1, 17)]
    assert found == pytest.approx([min(1.0, done / 2560) for done in tokens])


def test_one_schedule_spans_phases_and_a_phase_may_have_its_own() -> None:
    phases = "phases=[{duration: 60}, {duration: 20, lr: 0.5, schedule: {kind: constant}}, {duration: 40, lr: 1}]"
    found = rates("schedule={kind: linear}", phases)
    assert found[:60] == pytest.approx([1 - step / 100 for step in range(60)])
    assert found[60:80] == [0.5] * 20
    assert found[80:] == pytest.approx([1 - step / 100 for step in range(60, 100)])


def test_phases_take_over_what_they_do_not_say() -> None:
    table = TrainingPlan(
        read_recipe(
            None, ["phases=[{duration: 3, length: 64, batch_tokens: 640, mask_rate: 0.4}, {duration: 1280 tokens}]"]
        )
    )
    first, second = table.phases
    assert (second.length, second.mask_rate, second.batches.rows) == (64, 0.4, 10)
    assert (second.first_step, second.first_token, table.total_steps, table.total_tokens) == (3, 1920, 5, 3200)
    moment = table.at(4)
    assert (moment.phase.index, moment.step_in_phase, moment.tokens, moment.progress) == (1, 1, 2560, 0.5)
    assert first.rope_theta is None


@given(
    rows=st.integers(1, 40),
    start=st.integers(1, 40),
    over=st.sampled_from([Amount(7, "steps"), Amount(3000, "tokens"), Amount(50, "%")]),
    duration=st.sampled_from([Amount(23, "steps"), Amount(9999, "tokens")]),
)
def test_batches_count_as_a_loop_does(rows: Any, start: Any, over: Any, duration: Any) -> None:
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


def test_a_batch_smaller_than_a_row_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"phases\.0: batch_tokens is 100, less than one row of length 128"):
        TrainingPlan(read_recipe(None, ["phases=[{duration: 1, length: 128, batch_tokens: 100}]"]))
