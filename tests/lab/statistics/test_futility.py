"""Early stopping: it never adds a verdict, and rarely stops a variant that is as good as the baseline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bertblocks.lab.statistics.estimates import Component, Estimate, mean_of_seeds
from bertblocks.lab.statistics.futility import is_hopeless
from bertblocks.lab.statistics.verdicts import UNDECIDED, judge
from tests.lab.simulated import simulate

SEEDS = 8


def stops(differences: np.ndarray, margin: float = 0.0) -> bool:
    """Whether a study that looks after every seed but the last stops a variant; lower is better."""
    for seen in range(2, SEEDS):
        estimate = mean_of_seeds(differences[:seen])
        if is_hopeless(estimate, seen / SEEDS, (seen - 1) / SEEDS if seen > 2 else 0.0, margin=margin):
            return True
    return False


@pytest.mark.parametrize(("effect", "margin"), [(0.0, 0.0), (-0.3, 0.3)])
def test_a_variant_as_good_as_the_margin_is_rarely_stopped(effect: float, margin: float) -> None:
    generator, studies = np.random.default_rng(0), 1500
    stopped = sum(stops(effect + generator.standard_normal(SEEDS), margin) for _ in range(studies))
    assert stopped / studies <= 0.05
    assert stopped > 0


def test_a_hopeless_variant_is_stopped() -> None:
    generator = np.random.default_rng(1)
    assert np.mean([stops(10 + generator.standard_normal(SEEDS)) for _ in range(200)]) > 0.95
    assert np.mean([stops(1 + generator.standard_normal(SEEDS), margin=8.0) for _ in range(200)]) > 0.95


def test_stopping_costs_little_power() -> None:
    generator, studies = np.random.default_rng(2), 1000
    lost = found = 0
    for _ in range(studies):
        differences = generator.standard_normal(SEEDS) - 1.3
        if mean_of_seeds(differences).p_value() <= 0.05:
            found += 1
            lost += stops(differences)
    assert found > 0.8 * studies
    assert lost <= 0.05 * studies


def test_stopping_never_adds_a_verdict() -> None:
    """Judges the same studies with and without the variants that looks would have stopped."""
    generator = np.random.default_rng(3)
    stopped = 0
    for _ in range(60):
        results = simulate({"same": 0.0, "good": -0.03, "bad": 0.08}, SEEDS, generator)
        full = judge(results)
        early = {found.variant for found in full if stops(np.array(found.by_seed))}
        settings = {**results.settings, "stopped": sorted(early)}
        for before, after in zip(full, judge(replace(results, settings=settings)), strict=True):
            assert after.verdict in (before.verdict, UNDECIDED)
            assert after.verdict == UNDECIDED or after.variant not in early
        stopped += len(early)
    assert stopped > 30


def test_looks_spend_what_the_study_has_progressed() -> None:
    estimate = Estimate(1.0, (Component(0.1, 4),))
    level = estimate.p_value() / 2  # the one-sided level at which the variant is worse
    assert is_hopeless(estimate, 1.0, 0.0, error=level * 1.01)
    assert not is_hopeless(estimate, 0.5, 0.0, error=level * 1.01)
    assert not is_hopeless(estimate, 0.5, 0.5)
    assert not is_hopeless(estimate, 1.0, higher_is_better=True, error=level * 1.01)
    assert not is_hopeless(Estimate(1.0), 0.5)
    with pytest.raises(ValueError, match=r"look at 0\.2"):
        is_hopeless(estimate, 0.2, 0.4)
