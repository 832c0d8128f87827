"""Main effects of factorial designs against their definition and least squares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bertblocks.lab.results import Measurement, StudyResults
from bertblocks.lab.statistics.factorial import main_effects
from bertblocks.lab.statistics.verdicts import judge
from tests.lab.simulated import LOSS, study, trial

NORMS = {"post": 0.0, "pre": -0.2}
POSITIONS = {"learned": 0.0, "rope": -0.1, "none": 0.3}


def factorial(noise: float = 0.02, seeds: int = 4) -> StudyResults:
    generator = np.random.default_rng(0)
    names = [f"{norm}+{position}" for norm in NORMS for position in POSITIONS]
    found = [
        Measurement(name, seed, None, "loss", 3 + NORMS[norm] + POSITIONS[position] + noise * generator.normal())
        for name in names
        for norm, position in [name.split("+")]
        for seed in range(seeds)
    ]
    made = study(names, [trial(m.variant, m.seed) for m in found], found, {"loss": LOSS})
    return replace(made, settings={"design": "factorial"})


def test_main_effects_are_means_over_the_other_factors() -> None:
    results = factorial()
    value = {(m.variant, m.seed): m.value for m in results.measurements}
    effects = {effect.level: effect for effect in main_effects(results)}
    assert {level: effect.reference for level, effect in effects.items()} == {
        "pre": "post",
        "rope": "learned",
        "none": "learned",
    }
    by_seed = [np.mean([value[f"pre+{p}", s] - value[f"post+{p}", s] for p in POSITIONS]) for s in range(4)]
    expected = stats.ttest_1samp(by_seed, 0)
    assert effects["pre"].difference.value == pytest.approx(np.mean(by_seed))
    assert effects["pre"].difference.p_value() == pytest.approx(expected.pvalue, rel=1e-6)
    for level, truth in (("rope", -0.1), ("none", 0.3)):
        low, high = effects[level].difference.interval(0.001)
        assert low < truth < high


def test_main_effects_have_smaller_errors_than_single_comparisons() -> None:
    errors: dict[str, list[float]] = {"main": [], "single": []}
    for seeds in range(3, 12):
        results = factorial(seeds=seeds)
        errors["main"].append(next(e for e in main_effects(results) if e.level == "pre").difference.error)
        errors["single"].append(next(c for c in judge(results) if c.variant == "pre+learned").difference.error)
    assert np.mean(errors["main"]) < 0.75 * np.mean(errors["single"])


def test_seeds_that_miss_a_variant_do_not_count() -> None:
    results = factorial()
    kept = [m for m in results.measurements if (m.variant, m.seed) != ("pre+none", 3)]
    assert {effect.seeds for effect in main_effects(replace(results, measurements=kept))} == {3}


def test_other_designs_have_no_main_effects() -> None:
    results = factorial()
    assert main_effects(replace(results, settings={})) == []
    incomplete = {name: keys for name, keys in results.variants.items() if name != "pre+none"}
    assert main_effects(replace(results, variants=incomplete)) == []
    assert main_effects(replace(results, measurements=[])) == []
