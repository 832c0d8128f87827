"""The best learning rate: exact parabolas, the coverage of its interval, and designs that miss it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bertblocks.lab.statistics.learning_rate import fit_learning_rate, learning_rates

RATES = learning_rates(1e-4, 1e-2, 5)


def losses(best: float, curvature: float = 0.5, noise: np.ndarray | None = None) -> list[tuple[float, float]]:
    noise = np.zeros(len(RATES)) if noise is None else noise
    return [
        (rate, 3 + curvature * math.log10(rate / best) ** 2 + float(error))
        for rate, error in zip(RATES, noise, strict=True)
    ]


def test_a_parabola_is_found_exactly() -> None:
    fit = fit_learning_rate(losses(2e-3))
    assert fit.chosen == pytest.approx(2e-3)
    assert (fit.low, fit.high) == pytest.approx((2e-3, 2e-3), rel=1e-4)
    assert (fit.optimum, fit.remark) == ("inside", "")
    assert fit.loss(2e-3) == pytest.approx(3)
    assert fit.loss(2e-2) == pytest.approx(3.5)


def test_the_fit_equals_numpy_and_the_interval_has_its_coverage() -> None:
    generator, studies, best = np.random.default_rng(0), 1000, 2e-3
    covered = 0
    for _ in range(studies):
        points = losses(best, noise=0.02 * generator.standard_normal(5))
        fit = fit_learning_rate(points)
        covered += fit.low is None or fit.high is None or fit.low <= best <= fit.high
    assert covered / studies == pytest.approx(0.95, abs=0.02)
    square, linear, constant = np.polyfit(np.log10(RATES), [loss for _, loss in points], 2)
    assert fit.coefficients == pytest.approx((constant, linear, square))
    assert math.log10(fit.chosen) == pytest.approx(-linear / (2 * square))


def test_large_samples_agree_with_the_delta_method() -> None:
    generator = np.random.default_rng(1)
    points = [pair for _ in range(200) for pair in losses(2e-3, noise=0.02 * generator.standard_normal(5))]
    fit = fit_learning_rate(points)
    x = np.log10([rate for rate, _ in points])
    (square, linear, _), covariance = np.polyfit(x, [loss for _, loss in points], 2, cov=True)
    gradient = np.array([linear / (2 * square**2), -1 / (2 * square)])
    error = math.sqrt(gradient @ covariance[:2, :2] @ gradient)
    assert math.log10(fit.high / fit.low) / 2 == pytest.approx(1.96 * error, rel=0.02)


@pytest.mark.parametrize(("best", "word", "chosen"), [(1e-5, "below", RATES[0]), (0.3, "above", RATES[-1])])
def test_an_optimum_outside_the_design_is_reported(best: float, word: str, chosen: float) -> None:
    fit = fit_learning_rate(losses(best))
    assert fit.optimum == "outside"
    assert word in fit.remark
    assert fit.chosen == pytest.approx(chosen)


def test_losses_without_a_minimum_give_the_best_rate_that_ran() -> None:
    falling = [(rate, 3 - 0.1 * i - 0.02 * i * i) for i, rate in enumerate(RATES)]
    fit = fit_learning_rate(falling)
    assert (fit.chosen, fit.optimum, fit.coefficients) == (RATES[-1], "outside", None)
    assert "highest" in fit.remark
    with pytest.raises(ValueError, match="no parabola"):
        fit.loss(1e-3)


def test_noise_leaves_the_interval_open() -> None:
    fit = fit_learning_rate(losses(1e-3, 0.01, np.array([0.3, -0.2, 0.1, -0.2, 0.3])))
    assert (fit.low, fit.high) == (None, None)
    assert "too noisy" in fit.remark


def test_diverged_runs_do_not_count() -> None:
    points = [*losses(2e-3), (0.1, math.inf), (0.2, math.nan)]
    assert fit_learning_rate(points).chosen == pytest.approx(2e-3)
    few = fit_learning_rate([(1e-3, 3.0), (1e-2, 4.0), (1e-4, 3.5), (1.0, math.inf)])
    assert (few.chosen, few.optimum) == (1e-3, "unknown")
    with pytest.raises(ValueError, match="search lower"):
        fit_learning_rate([(1.0, math.inf)])


def test_a_rate_that_nearly_diverged_does_not_move_the_minimum() -> None:
    points = [(1e-4, 3.5), (3e-4, 3.2), (1e-3, 3.05), (3e-3, 3.1), (1e-2, 6.9)]
    square, linear, _ = np.polyfit(np.log10([rate for rate, _ in points]), [loss for _, loss in points], 2)
    assert 10 ** (-linear / (2 * square)) < 6e-4  # with all five, the minimum would be far from the best two
    fit = fit_learning_rate(points)
    assert 1e-3 < fit.chosen < 3e-3
    assert "without 0.01" in fit.remark
    assert fit_learning_rate([*points, (3e-2, 7.5)]).chosen == pytest.approx(fit.chosen)


@pytest.mark.parametrize("count", [4, 5, 6, 9])
def test_no_rate_of_a_parabola_is_left_out(count: int) -> None:
    rates = learning_rates(1e-4, 1e-2, count)
    for best in np.geomspace(1e-5, 1e-1, 200):
        fit = fit_learning_rate([(rate, math.log10(rate / best) ** 2) for rate in rates])
        assert "without" not in fit.remark
        assert fit.chosen == pytest.approx(min(max(best, 1e-4), 1e-2), rel=1e-6)


def test_designs_have_equal_ratios() -> None:
    ratios = np.array(RATES[1:]) / np.array(RATES[:-1])
    assert ratios == pytest.approx([10**0.5] * 4, rel=1e-4)
    with pytest.raises(ValueError, match="2 learning rates"):
        learning_rates(1e-4, 1e-2, 2)
