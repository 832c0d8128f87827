"""Differences and their errors against scipy, the analysis of variance by loops, and exact probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from bertblocks.lab.statistics.estimates import (
    Component,
    Estimate,
    effect_size,
    linearized,
    mean_of_seeds,
    paired_difference,
    unpaired_difference,
)
from bertblocks.lab.statistics.multi_bootstrap import multi_bootstrap
from bertblocks.lab.statistics.student import critical_value

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 40])
def test_one_score_per_seed_gives_the_paired_t_test(seeds: int) -> None:
    baseline, variant = GENERATOR.standard_normal((2, seeds))
    expected = stats.ttest_rel(variant, baseline)
    found = paired_difference(baseline, variant)
    assert found.p_value() == pytest.approx(expected.pvalue, rel=1e-6)
    for level in (0.8, 0.95, 0.99):
        low, high = expected.confidence_interval(level)
        assert found.interval(1 - level) == pytest.approx((low, high), rel=1e-6)


def test_the_mean_of_seeds_is_the_one_sample_t_test() -> None:
    values = GENERATOR.standard_normal(7) + 1
    expected = stats.ttest_1samp(values, 0)
    assert mean_of_seeds(values).p_value() == pytest.approx(expected.pvalue, rel=1e-6)
    assert mean_of_seeds(values).interval() == pytest.approx(tuple(expected.confidence_interval()), rel=1e-6)


def test_seeds_and_examples_are_the_parts_of_the_analysis_of_variance() -> None:
    baseline, variant = GENERATOR.standard_normal((2, 4, 30))
    variant += 2 * GENERATOR.standard_normal(30) + GENERATOR.standard_normal((4, 1))
    difference = variant - baseline
    whole = difference.mean()
    rows, columns = difference.mean(1), difference.mean(0)
    between_seeds = sum(30 * (row - whole) ** 2 for row in rows) / 3
    between_examples = sum(4 * (column - whole) ** 2 for column in columns) / 29
    rest = sum((difference[i, j] - rows[i] - columns[j] + whole) ** 2 for i in range(4) for j in range(30)) / (3 * 29)
    seeds, examples = paired_difference(baseline, variant).components
    assert (seeds.variance, seeds.freedom) == (pytest.approx(between_seeds / 120), 3)
    assert (examples.variance, examples.freedom) == (pytest.approx((between_examples - rest) / 120), 29)


def test_unpaired_seeds_are_at_least_as_careful_as_welch() -> None:
    for _ in range(200):
        baseline, variant = GENERATOR.standard_normal(4), 3 * GENERATOR.standard_normal(6) + 1
        found = unpaired_difference(baseline, variant)
        expected = stats.ttest_ind(variant, baseline, equal_var=False)
        assert found.value / found.error == pytest.approx(expected.statistic)
        assert found.p_value() >= expected.pvalue - 1e-9


def test_unpaired_examples_equal_paired_ones_up_to_the_seeds() -> None:
    """If the seeds add nothing but their level, the part of the examples does not depend on the pairing."""
    by_example = GENERATOR.standard_normal(50)
    levels = GENERATOR.standard_normal((2, 4, 1))
    baseline, variant = levels[0] + np.zeros(50), levels[1] + by_example
    paired, unpaired = paired_difference(baseline, variant), unpaired_difference(baseline, variant)
    assert paired.components[-1].variance == pytest.approx(by_example.var(ddof=1) / 50)
    assert unpaired.components[-1].variance == pytest.approx(by_example.var(ddof=1) / 50)
    assert len(unpaired.components) == 3


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("freedom", [(1, 1), (1, 4), (2, 9), (1, 200), (4, 4)])
def test_intervals_of_two_parts_miss_at_most_as_often_as_they_say(freedom: tuple[int, int], alpha: float) -> None:
    """Integrates the exact probability of a miss over the distributions of both estimated variances."""
    shares = (np.arange(400) + 0.5) / 400
    ratios = [stats.chi2.ppf(shares, degrees) / degrees for degrees in freedom]
    first, second = np.meshgrid(*ratios)
    for share in (0.0, 0.05, 0.3, 0.5, 0.8, 1.0):
        parts = [
            share * critical_value(alpha, freedom[0]) ** 2 * first,
            (1 - share) * critical_value(alpha, freedom[1]) ** 2 * second,
        ]
        miss = 2 * stats.norm.sf(np.sqrt(parts[0] + parts[1])).mean()
        assert miss <= alpha + 2e-4
        if share in (0.0, 1.0):
            assert miss == pytest.approx(alpha, abs=2e-4)


def test_the_interval_at_the_p_value_ends_at_zero() -> None:
    estimate = Estimate(1.3, (Component(0.2, 2), Component(0.05, 80)))
    low, _ = estimate.interval(estimate.p_value())
    assert low == pytest.approx(0, abs=1e-6)


def test_one_seed_equal_seeds_and_equal_differences_prove_nothing() -> None:
    one = paired_difference(np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]]))
    same = paired_difference(np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5, 0.6]))
    nothing = paired_difference(np.ones((3, 4)), np.ones((3, 4)))
    for estimate in (one, same, nothing, unpaired_difference(np.ones(3), np.array([1.0, 2.0]))):
        assert estimate.p_value() == 1
        assert estimate.half_width() == math.inf


def test_weighted_examples_have_the_mean_and_error_of_a_ratio() -> None:
    values, weights = GENERATOR.standard_normal(20_000) + 2, GENERATOR.integers(1, 50, 20_000).astype(float)
    found = linearized(values, weights)
    assert found.mean() == pytest.approx(np.average(values, weights=weights))
    # values do not depend on weights here, so that the variance of the weighted mean has a closed form
    expected = values.var() * (weights**2).sum() / weights.sum() ** 2
    assert found.var() / len(found) == pytest.approx(expected, rel=0.05)


def test_effect_sizes_have_the_published_correction() -> None:
    """The factors c(m) of Hedges (1981), table 1."""
    for freedom, factor in {2: 0.5642, 3: 0.7236, 4: 0.7979, 5: 0.8408, 10: 0.9228, 20: 0.9619}.items():
        values = np.arange(freedom + 1.0)
        assert effect_size(values) == pytest.approx(values.mean() / values.std(ddof=1) * factor, abs=5e-4)
    assert effect_size(np.array([1.0, 2.0])) is None
    assert effect_size(np.array([2.0, 2.0, 2.0])) is None


@pytest.mark.parametrize("paired", [True, False])
def test_the_multi_bootstrap_equals_its_definition(paired: bool) -> None:
    """Draws seeds and examples with replacement, one resample at a time."""
    baseline = GENERATOR.standard_normal((6, 25)) + GENERATOR.standard_normal((6, 1))
    variant = baseline + 0.3 * GENERATOR.standard_normal((6, 25)) + 0.5 * GENERATOR.standard_normal((6, 1)) + 1
    drawn = []
    for _ in range(4000):
        examples, first = GENERATOR.integers(0, 25, 25), GENERATOR.integers(0, 6, 6)
        second = first if paired else GENERATOR.integers(0, 6, 6)
        drawn.append(variant[second][:, examples].mean() - baseline[first][:, examples].mean())
    low, high = multi_bootstrap(baseline, variant, paired=paired, samples=4000)
    expected = np.percentile(drawn, [2.5, 97.5])
    assert (low, high) == pytest.approx(tuple(expected), abs=0.05 * (expected[1] - expected[0]))


def test_many_seeds_give_the_multi_bootstrap_the_same_interval() -> None:
    baseline = GENERATOR.standard_normal((60, 80))
    variant = baseline + 0.2 + GENERATOR.standard_normal((60, 1)) + 2 * GENERATOR.standard_normal(80)
    bootstrap, exact = multi_bootstrap(baseline, variant), paired_difference(baseline, variant).interval()
    assert bootstrap == pytest.approx(exact, abs=0.1 * (exact[1] - exact[0]))


def test_three_seeds_are_too_few_for_the_multi_bootstrap_and_enough_for_the_interval() -> None:
    """Without a true difference, where seeds differ more than examples."""
    misses = {"bootstrap": 0, "interval": 0}
    for number in range(300):
        values = 0.05 * GENERATOR.standard_normal((3, 1)) + 0.1 * GENERATOR.standard_normal((3, 30))
        for name, (low, high) in (
            ("bootstrap", multi_bootstrap(np.zeros((3, 30)), values, samples=300, seed=number)),
            ("interval", paired_difference(np.zeros((3, 30)), values).interval()),
        ):
            misses[name] += low > 0 or high < 0
    assert misses["bootstrap"] > 0.1 * 300
    assert misses["interval"] <= 0.09 * 300


def test_paired_seeds_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 and 3"):
        multi_bootstrap(np.ones((2, 4)), np.ones((3, 4)))
