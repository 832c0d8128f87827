"""Verdicts: is a variant better or worse than the baseline, or does the study not tell?

The first measure decides. Its comparisons, over all variants and sizes, are the family that Holm's correction covers:
of studies without any true difference, 5% at most have any verdict but "undecided". Other measures come with intervals
and without verdicts. In a ladder, where each variant adds a change, each is compared with the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bertblocks.lab.results import Measurement, StudyResults
from bertblocks.lab.statistics.estimates import (
    Estimate,
    effect_size,
    linearized,
    paired_difference,
    unpaired_difference,
)
from bertblocks.lab.statistics.multi_bootstrap import multi_bootstrap
from bertblocks.lab.statistics.power import minimum_detectable_effect

Array = NDArray[np.float64]
BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
#: Why a comparison without any other problem is undecided.
CHANCE = "the difference may be chance"
ALPHA = 0.05
#: The power at which the minimum detectable effect is stated.
POWER = 0.8


@dataclass(frozen=True)
class Comparison:
    """A variant against its reference, the baseline or the step before, on one measure at one size."""

    variant: str
    reference: str
    size: str | None
    measure: str
    #: The seeds that count, and whether the variants share them.
    seeds: int
    is_paired: bool
    reference_mean: float
    variant_mean: float
    difference: Estimate
    #: The differences of the seeds, if they are paired.
    by_seed: tuple[float, ...]
    #: The scores of both, `[seeds]` or `[seeds, examples]`; None if nothing can be compared.
    scores: tuple[Array, Array] | None = field(default=None, repr=False)
    p: float = 1.0
    #: Holm's p value, and the level at which the comparison was tested; None for measures that do not decide.
    adjusted_p: float | None = None
    tested_at: float | None = None
    verdict: str | None = None
    #: Why there is no verdict.
    reason: str = ""

    @property
    def relative(self) -> float:
        """The difference as a share of the reference."""
        return self.difference.value / abs(self.reference_mean) if self.reference_mean else math.nan

    @property
    def effect_size(self) -> float | None:
        """Hedges' g of the paired differences."""
        return effect_size(np.array(self.by_seed)) if self.by_seed else None

    def bootstrap(self) -> tuple[float, float] | None:
        """The 95% interval of the Multi-Bootstrap, if there are scores of examples and several seeds."""
        if self.scores is None or self.scores[0].ndim < 2 or self.seeds < 2:
            return None
        return multi_bootstrap(*self.scores, paired=self.is_paired)

    def detectable(self, alpha: float = ALPHA) -> float | None:
        """The difference that as many seeds, with the spread found here, show with a power of 80%.

        Divide `alpha` by the number of comparisons that Holm corrects together.
        """
        if not self.difference.components or not self.is_paired:
            return None
        seeds, *examples = self.difference.components
        deviation = math.sqrt(seeds.variance * self.seeds)
        error = math.sqrt(sum(part.variance for part in examples))
        return minimum_detectable_effect(deviation, self.seeds, alpha, POWER, error)


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> tuple[list[float], list[float]]:
    """Adjusted p values, and the level at which each hypothesis is tested (Holm, 1979).

    Example:
        >>> adjusted, levels = holm([0.01, 0.04, 0.03, 0.005])
        >>> [round(p, 3) for p in adjusted], [round(level, 4) for level in levels]
        ([0.03, 0.06, 0.06, 0.02], [0.0167, 0.025, 0.025, 0.0125])
    """
    count = len(p_values)
    adjusted, levels = [1.0] * count, [alpha] * count
    largest, level = 0.0, 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda index: p_values[index])):
        if largest <= alpha:  # after the first that is not rejected, none is
            level = alpha / (count - rank)
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index], levels[index] = largest, level
    return adjusted, levels


def judge(results: StudyResults, alpha: float | None = None) -> list[Comparison]:
    """Compares every variant with its reference on every measure; those of the first measure get verdicts.

    `alpha` is the rate of false verdicts over the family. Default: the study's own level.
    """
    alpha = alpha or results.settings.get("level", ALPHA)
    sizes = list(dict.fromkeys([trial.size for trial in results.trials] + [size for _, _, size in results.missing]))
    pairs = references(results)
    by_key: dict[tuple[str, str, str | None], list[Measurement]] = {}
    for found in results.measurements:
        by_key.setdefault((found.measure, found.variant, found.size), []).append(found)
    compared = [
        _compare(
            results,
            Comparison(name, reference, size, measure, 0, True, math.nan, math.nan, Estimate(math.nan), ()),
            *(by_key.get((measure, one, size), []) for one in (reference, name)),
        )
        for measure in results.measures
        for size in sizes
        for name, reference in pairs.items()
    ]
    deciding = next(iter(results.measures), "")
    family = [comparison for comparison in compared if comparison.measure == deciding]
    rest = [comparison for comparison in compared if comparison.measure != deciding]
    adjusted, levels = holm([comparison.p for comparison in family], alpha)
    is_higher = bool(family) and results.measures[deciding].higher_is_better
    judged = [
        _with_verdict(replace(comparison, adjusted_p=p, tested_at=level), is_higher, alpha)
        for comparison, p, level in zip(family, adjusted, levels, strict=True)
    ]
    return judged + rest


def references(results: StudyResults) -> dict[str, str]:
    """The variant with which each one is compared: the baseline or, in a ladder, the one before it."""
    names = list(results.variants)
    if results.settings.get("design") == "ladder":
        return dict(zip(names[1:], names, strict=False))
    return {name: results.baseline for name in names if name != results.baseline}


def _compare(
    results: StudyResults, empty: Comparison, reference: Sequence[Measurement], variant: Sequence[Measurement]
) -> Comparison:
    """Fills an empty comparison with what the seeds of both say."""
    reason = _why_not(results, empty, [*reference, *variant])
    base, other = (
        {found.seed: found for found in group if math.isfinite(found.value)} for group in (reference, variant)
    )
    shared = sorted(base.keys() & other.keys())
    is_paired = len(shared) > 1 or not (len(base) > 1 and len(other) > 1)
    first = [base[seed] for seed in (shared if is_paired else sorted(base))]
    second = [other[seed] for seed in (shared if is_paired else sorted(other))]
    if not first or not second:
        return replace(empty, reason=reason)
    scores = stack_scores(first, second)
    estimate = (paired_difference if is_paired else unpaired_difference)(*scores)
    return replace(
        empty,
        seeds=min(len(first), len(second)),
        is_paired=is_paired,
        reference_mean=float(np.mean([found.value for found in first])),
        variant_mean=float(np.mean([found.value for found in second])),
        difference=estimate,
        by_seed=tuple(b.value - a.value for a, b in zip(first, second, strict=True)) if is_paired else (),
        scores=scores,
        p=1.0 if reason else estimate.p_value(),
        reason=reason,
    )


def stack_scores(*groups: Sequence[Measurement]) -> tuple[Array, Array]:
    """The scores of both variants: `[seeds, examples]`, or `[seeds]` unless all trials have examples that explain them.

    Scores of a part of the examples, or of others than those of the value, would be another measure.
    """
    rows = [[_example_scores(found) for found in group] for group in groups]
    lengths = {None if row is None else len(row) for side in rows for row in side}
    if len(lengths) == 1 and None not in lengths:
        first, second = (np.stack([row for row in side if row is not None]) for side in rows)
    else:
        first, second = (np.array([found.value for found in group]) for group in groups)
    return first, second


def _example_scores(found: Measurement) -> Array | None:
    """The scores of a trial's examples, if their mean is its value."""
    if found.examples is None or len(found.examples) < 2:
        return None
    scores = linearized(found.examples, found.weights)
    return scores if np.isclose(scores.mean(), found.value, rtol=1e-5, atol=1e-9) else None


def _why_not(results: StudyResults, compared: Comparison, found: Sequence[Measurement]) -> str:
    """Why a comparison cannot have a verdict yet. Verdicts before the planned seeds have run would be too many."""
    names, size = (compared.reference, compared.variant), compared.size
    stopped = results.settings.get("stopped", [])
    if compared.variant in stopped:
        return "stopped early, because it could no longer win"
    if compared.reference in stopped:
        return f"{compared.reference}, with which it is compared, stopped early"
    failed = [(name, why) for name, _, at, why in results.failures if name in names and at == size]
    if failed:
        return f"{len(failed)} of its trials failed, the first of {failed[0][0]}: {failed[0][1]}"
    missing = [trial for trial in results.missing if trial[0] in names and trial[2] == size]
    if missing:
        return f"waits for {len(missing)} of the planned trials"
    diverged = [m.variant for m in found if not math.isfinite(m.value)]
    if diverged:
        counts = [f"{diverged.count(name)} of {name}" for name in names if name in diverged]
        return f"trials without a finite value: {', '.join(counts)}"
    return ""


def _with_verdict(comparison: Comparison, higher_is_better: bool, alpha: float) -> Comparison:
    estimate = comparison.difference
    if comparison.adjusted_p is not None and comparison.adjusted_p <= alpha:
        verdict = BETTER if (estimate.value > 0) == higher_is_better else WORSE
        return replace(comparison, verdict=verdict)
    reason = comparison.reason
    if not reason and comparison.seeds < 2:
        reason = "one seed does not show how much seeds differ" if comparison.seeds else "nothing has been measured"
    elif not reason and not estimate.components:
        reason = "all seeds gave the same difference, so its error is unknown"
    elif not reason:
        reason = CHANCE
    return replace(comparison, verdict=UNDECIDED, reason=reason)
