"""Power laws that are known, with outliers and with noise, and differences that move with scale."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from bertblocks.lab.statistics.scaling import difference_trend, fit_power_law

COMPUTE = np.repeat(np.geomspace(1e12, 1e15, 5), 3)
TRUTH = 2.0 + 1.5 * (COMPUTE / 1e13) ** -0.25


def test_a_power_law_is_found_exactly() -> None:
    fit = fit_power_law(COMPUTE, TRUTH)
    assert fit is not None
    assert (fit.floor, fit.exponent) == pytest.approx((2.0, 0.25), rel=1e-4)
    assert fit.factor * fit.unit**fit.exponent == pytest.approx(1.5 * 1e13**0.25, rel=1e-3)
    assert fit.loss(1e17) == pytest.approx(2.15, rel=1e-4)


def test_the_fit_is_that_of_scipy() -> None:
    losses = TRUTH * (1 + 0.002 * np.random.default_rng(0).uniform(-1, 1, len(TRUTH)))
    fit = fit_power_law(COMPUTE, losses)
    assert fit is not None
    x = COMPUTE / fit.unit
    expected, _ = optimize.curve_fit(lambda x, e, a, b: e + a * x**-b, x, losses, p0=(2, 1, 0.3), sigma=losses)
    assert (fit.floor, fit.factor, fit.exponent) == pytest.approx(tuple(expected), rel=1e-3)


def test_an_outlier_hardly_moves_the_fit() -> None:
    generator = np.random.default_rng(1)
    losses = TRUTH * (1 + 0.002 * generator.standard_normal(len(TRUTH)))
    losses[4] *= 1.5
    fit = fit_power_law(COMPUTE, losses)
    assert fit is not None
    assert fit.loss(1e14) == pytest.approx(2.0 + 1.5 * 10**-0.25, rel=0.01)
    x = COMPUTE / fit.unit
    plain, _ = optimize.curve_fit(lambda x, e, a, b: e + a * x**-b, x, losses, p0=(2, 1, 0.3), sigma=losses)
    assert abs(fit.exponent - 0.25) < abs(plain[2] - 0.25) / 3


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_cover_the_truth(seeds: int) -> None:
    """Nine of ten at least; percentiles of refits are not exact with so few sizes."""
    generator, studies = np.random.default_rng(seeds), 100
    compute = np.repeat(np.geomspace(1e12, 1e15, 5), seeds)
    truth = 2.0 + 1.5 * (compute / 1e13) ** -0.25
    covered = np.zeros(3)
    for _ in range(studies):
        fit = fit_power_law(compute, truth * (1 + 0.005 * generator.standard_normal(len(truth))), draws=200)
        assert fit is not None
        pairs = (
            (0.25, fit.exponent_interval),
            (2.0, fit.floor_interval),
            (2.0 + 1.5 * 1e3**-0.25, fit.loss_interval(1e16)),
        )
        covered += [low <= value <= high for value, (low, high) in pairs]
    assert (covered / studies >= 0.85).all()


def test_too_few_sizes_and_rising_losses_have_no_fit() -> None:
    assert fit_power_law([1.0, 10.0, 100.0], [3.0, 2.5, 2.2]) is None
    assert fit_power_law([1.0, 10.0, 100.0, 1000.0], [2.0, 2.5, 2.7, 3.0]) is None


def test_the_trend_of_a_difference_is_the_mean_slope_of_the_seeds() -> None:
    generator = np.random.default_rng(2)
    sizes = [1e9, 3e9, 1e10, 1e11]
    table = {seed: {size: float(generator.standard_normal()) for size in sizes} for seed in range(4)}
    slopes = [stats.linregress(np.log10(sizes), list(points.values())).slope for points in table.values()]
    trend = difference_trend(table)
    assert trend is not None
    assert trend.value == pytest.approx(np.mean(slopes))
    assert trend.p_value() == pytest.approx(stats.ttest_1samp(slopes, 0).pvalue)
    assert difference_trend({0: {1e9: 1.0}}) is None
