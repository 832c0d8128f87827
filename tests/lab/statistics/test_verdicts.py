"""Verdicts of simulated studies: none without a difference, the stated power with one, and reasons for the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bertblocks.lab.results import Measurement, StudyResults
from bertblocks.lab.statistics.power import minimum_detectable_effect
from bertblocks.lab.statistics.verdicts import BETTER, UNDECIDED, WORSE, Comparison, holm, judge
from tests.lab.simulated import simulate, study, trial


def test_holm_equals_published_examples() -> None:
    """R's p.adjust(method = "holm")."""
    adjusted, levels = holm([0.01, 0.02, 0.03, 0.04, 0.05])
    assert adjusted == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert levels == pytest.approx([0.01, *[0.0125] * 4])
    assert holm([0.9, 0.0001])[0] == pytest.approx([0.9, 0.0002])
    assert holm([]) == ([], [])


def test_holm_rejects_as_its_steps_do() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        p_values = (generator.random(5) ** 3).tolist()
        expected = [False] * 5
        for rank, index in enumerate(np.argsort(p_values)):
            if p_values[index] > 0.05 / (5 - rank):
                break
            expected[index] = True
        adjusted, levels = holm(p_values)
        assert [p <= 0.05 for p in adjusted] == expected
        assert [p <= level for p, level in zip(p_values, levels, strict=True)] == expected


def false_verdicts(variants: int, seeds: int, studies: int, by_example: float) -> float:
    """The share of studies without a true difference that give any verdict."""
    generator = np.random.default_rng(1000 * variants + seeds)
    effects = {f"variant {number}": 0.0 for number in range(variants)}
    wrong = 0
    for _ in range(studies):
        results = simulate(effects, seeds, generator, examples=30, by_example=by_example)
        wrong += any(comparison.verdict != UNDECIDED for comparison in judge(results))
    return wrong / studies


def most_by_chance(studies: int) -> float:
    """What 5% may look like in so many studies, with a chance of 1 in 1000 to see more."""
    from scipy import stats

    return float(stats.binom.ppf(0.999, studies, 0.05)) / studies


@pytest.mark.parametrize(("variants", "seeds", "by_example"), [(1, 2, 0.0), (3, 3, 0.2), (5, 5, 0.0)])
def test_studies_without_a_difference_rarely_give_a_verdict(variants: int, seeds: int, by_example: float) -> None:
    assert false_verdicts(variants, seeds, 120, by_example) <= most_by_chance(120)


@pytest.mark.slow
@pytest.mark.parametrize("by_example", [0.0, 0.2])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("variants", [1, 2, 3, 5])
def test_thousands_of_studies_without_a_difference_rarely_give_a_verdict(
    variants: int, seeds: int, by_example: float
) -> None:
    found = false_verdicts(variants, seeds, 2000, by_example)
    print(f"{variants} variants, {seeds} seeds, by example {by_example}: {found:.2%} false verdicts")
    assert found <= most_by_chance(2000)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_planted_effect_is_found_with_the_stated_power(seeds: int) -> None:
    """One of three variants has the effect that the first step of Holm finds with a power of 80%."""
    generator, studies, noise, spread = np.random.default_rng(seeds), 300, 0.1, 0.01
    effect = minimum_detectable_effect(math.hypot(spread, noise / math.sqrt(40)), seeds, 0.05 / 3)
    found = {BETTER: 0, WORSE: 0, UNDECIDED: 0}
    for _ in range(studies):
        results = simulate(
            {"planted": -effect, "same": 0.0, "other": 0.0}, seeds, generator, noise=noise, spread=spread
        )
        found[verdicts(results)["planted"]] += 1
    assert found[BETTER] / studies == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / studies))
    assert found[WORSE] == 0


def verdicts(results: StudyResults) -> dict[str, str | None]:
    return {comparison.variant: comparison.verdict for comparison in judge(results)}


def test_verdicts_follow_the_direction_of_the_measure() -> None:
    results = simulate({"good": -0.5, "bad": 0.5})
    assert verdicts(results) == {"good": BETTER, "bad": WORSE}
    upward = {"loss": replace(results.measures["loss"], higher_is_better=True)}
    assert verdicts(replace(results, measures=upward)) == {"good": WORSE, "bad": BETTER}


def test_the_study_sets_the_level() -> None:
    results = simulate({"good": -0.02}, seeds=4, seed=3)
    p = only(results).p
    assert only(replace(results, settings={"level": p * 1.01})).verdict == BETTER
    assert only(replace(results, settings={"level": p * 0.99})).verdict == UNDECIDED


def test_only_the_first_measure_decides() -> None:
    results = simulate({"good": -0.5})
    twice = [replace(found, measure="again") for found in results.measurements]
    measures = {**results.measures, "again": replace(results.measures["loss"], name="again")}
    first, second = judge(replace(results, measures=measures, measurements=results.measurements + twice))
    assert (first.verdict, second.verdict) == (BETTER, None)
    assert second.difference == first.difference
    assert first.adjusted_p == first.p  # a second measure does not enlarge the family


def only(results: StudyResults) -> Comparison:
    (comparison,) = judge(results)
    return comparison


def test_unfinished_stopped_and_diverged_trials_leave_a_comparison_undecided() -> None:
    results = simulate({"bad": 0.5})
    assert only(results).verdict == WORSE
    waiting = only(replace(results, missing=[("baseline", 5, None)]))
    stopped = only(replace(results, settings={"stopped": ["bad"]}))
    found = [replace(m, value=math.nan) if m.variant == "bad" and m.seed == 1 else m for m in results.measurements]
    diverged = only(replace(results, measurements=found))
    failed = only(replace(results, failures=[("bad", 5, None, "its loss is not finite")]))
    for comparison, reason in (
        (waiting, "waits for 1"),
        (stopped, "stopped early"),
        (diverged, "1 of bad"),
        (failed, "1 of its trials failed, the first of bad: its loss is not finite"),
    ):
        assert comparison.verdict == UNDECIDED
        assert reason in comparison.reason
    assert (stopped.seeds, diverged.seeds) == (5, 4)


def test_one_seed_and_equal_trials_leave_a_comparison_undecided() -> None:
    assert "one seed" in only(simulate({"bad": 0.5}, seeds=1)).reason
    found = [Measurement(name, seed, None, "loss", 3.0) for name in ("baseline", "same") for seed in range(3)]
    trials = [trial(m.variant, m.seed) for m in found]
    equal = only(study(["baseline", "same"], trials, found, simulate({}).measures))
    assert (equal.verdict, equal.difference.value, "same difference" in equal.reason) == (UNDECIDED, 0, True)
    empty = replace(simulate({"new": 0.0}), measurements=[])
    assert "nothing" in only(empty).reason


def test_seeds_that_are_not_shared_are_compared_unpaired() -> None:
    results = simulate({"bad": 0.5}, seeds=6, shared=0.01)
    kept = [m for m in results.measurements if (m.seed < 3) == (m.variant == "bad")]
    comparison = only(replace(results, measurements=kept))
    assert (comparison.is_paired, comparison.seeds, comparison.verdict) == (False, 3, WORSE)
    assert comparison.effect_size is None
    assert comparison.bootstrap() is not None


def test_the_steps_of_a_ladder_are_compared_with_those_before() -> None:
    results = simulate({"a": -0.5, "b": -1.0, "c": -0.7})
    ladder = replace(results, settings={"design": "ladder"})
    found = {comparison.variant: comparison for comparison in judge(ladder)}
    assert {name: comparison.reference for name, comparison in found.items()} == {"a": "baseline", "b": "a", "c": "b"}
    assert {name: comparison.verdict for name, comparison in found.items()} == {"a": BETTER, "b": BETTER, "c": WORSE}
    assert found["c"].difference.value == pytest.approx(0.3, abs=0.1)
    stopped = judge(replace(ladder, settings={"design": "ladder", "stopped": ["b"]}))
    assert [comparison.verdict for comparison in stopped] == [BETTER, UNDECIDED, UNDECIDED]
    assert "b, with which it is compared, stopped early" in stopped[2].reason


def test_weights_change_the_difference() -> None:
    results = simulate({"bad": 0.0}, seeds=3, examples=2, noise=0.0)
    found = []
    for m in results.measurements:
        scores = np.array([1.0, 1.0]) if m.variant == "baseline" else np.array([1.0, 3.0]) + 0.01 * m.seed
        value = (3 * scores[0] + scores[1]) / 4
        found.append(replace(m, value=value, examples=scores, weights=np.array([3.0, 1.0])))
    comparison = only(replace(results, measurements=found))
    assert comparison.difference.value == pytest.approx(0.5 + 0.01)
    assert comparison.scores[0].ndim == 2


def test_examples_that_do_not_explain_the_value_do_not_count() -> None:
    results = simulate({"bad": 0.1})
    part = [replace(m, examples=m.examples[:7]) for m in results.measurements]
    without = [replace(m, examples=None) for m in results.measurements]
    some = [m if m.seed else replace(m, examples=None) for m in results.measurements]
    expected = only(replace(results, measurements=without)).difference
    assert only(replace(results, measurements=part)).difference == expected
    assert only(replace(results, measurements=some)).difference == expected
    assert expected.value == pytest.approx(only(results).difference.value)


def test_a_comparison_states_what_it_could_have_found() -> None:
    comparison = only(simulate({"same": 0.0}, seeds=4, noise=0.0))
    spread = float(np.std(comparison.by_seed, ddof=1))
    assert comparison.detectable() == pytest.approx(minimum_detectable_effect(spread, 4), rel=1e-3)
    assert comparison.relative == pytest.approx(comparison.difference.value / comparison.reference_mean)
