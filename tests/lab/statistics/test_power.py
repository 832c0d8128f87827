"""Power against scipy's noncentral t, published sample sizes, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from bertblocks.lab.statistics.estimates import paired_difference
from bertblocks.lab.statistics.power import minimum_detectable_effect, power, seeds_needed


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 25])
@pytest.mark.parametrize("effect", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_power_is_that_of_the_noncentral_t(seeds: int, effect: float, alpha: float) -> None:
    limit, shift = stats.t.isf(alpha / 2, seeds - 1), effect * math.sqrt(seeds)
    expected = stats.nct.sf(limit, seeds - 1, shift) + stats.nct.cdf(-limit, seeds - 1, shift)
    assert power(2 * effect, 2.0, seeds, alpha) == pytest.approx(expected, abs=1e-5)


def test_numbers_of_seeds_are_those_of_published_tables() -> None:
    """Pairs for a paired t test at 5% with a power of 80%, as G*Power and R's power.t.test give them."""
    assert [seeds_needed(effect, 1.0) for effect in (0.2, 0.5, 0.8)] == [199, 34, 15]
    assert seeds_needed(0.0, 1.0) is None


def test_the_minimum_detectable_effect_has_the_stated_power() -> None:
    for seeds in (2, 3, 5, 10):
        effect = minimum_detectable_effect(0.4, seeds, 0.025, 0.9, 0.1)
        assert power(effect, 0.4, seeds, 0.025, 0.1) == pytest.approx(0.9, abs=1e-4)
    assert minimum_detectable_effect(0.4, 1) == math.inf
    assert minimum_detectable_effect(0.0, 3) == 0


@pytest.mark.parametrize("seeds", [3, 6])
def test_power_with_examples_is_what_simulated_studies_find(seeds: int) -> None:
    generator, examples, studies = np.random.default_rng(1), 150, 1500
    deviation, by_example, noise, effect = 0.5, 2.0, 0.3, 1.0
    found = 0
    for _ in range(studies):
        values = effect + deviation * generator.standard_normal((seeds, 1))
        values = values + by_example * generator.standard_normal(examples)
        values = values + noise * generator.standard_normal((seeds, examples))
        found += paired_difference(np.zeros_like(values), values).p_value() < 0.05
    total = math.hypot(deviation, noise / math.sqrt(examples))
    expected = power(effect, total, seeds, 0.05, by_example / math.sqrt(examples))
    assert found / studies == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / studies))
