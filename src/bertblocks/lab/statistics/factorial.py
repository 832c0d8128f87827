"""Main effects of a factorial design: what a level changes on average over all levels of the other factors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from bertblocks.lab.results import Measurement, StudyResults
from bertblocks.lab.statistics.estimates import Estimate, paired_difference
from bertblocks.lab.statistics.verdicts import stack_scores

#: Variants of a factorial design have the names of their levels, joined by this.
JOINT = "+"


@dataclass(frozen=True)
class MainEffect:
    """A level of a factor against the factor's first level, at one size."""

    level: str
    reference: str
    size: str | None
    difference: Estimate
    seeds: int


def main_effects(results: StudyResults) -> list[MainEffect]:
    """The main effects on the first measure; none unless the study is a complete factorial design.

    Every trial counts for every factor, so that main effects have smaller errors than comparisons of two variants.
    """
    factors = _factors(results)
    deciding = next(iter(results.measures))
    by_size: dict[str | None, dict[tuple[str, int], Measurement]] = {}
    for found in results.measurements:
        if found.measure == deciding and math.isfinite(found.value):
            by_size.setdefault(found.size, {})[found.variant, found.seed] = found
    effects = []
    for size, trials in by_size.items():
        names = [JOINT.join(levels) for levels in itertools.product(*factors)]
        seeds = sorted(s for s in {seed for _, seed in trials} if all((name, s) in trials for name in names))
        if not seeds or not factors:
            continue
        for place, levels in enumerate(factors):
            groups = {level: [name for name in names if name.split(JOINT)[place] == level] for level in levels}
            for level in levels[1:]:
                pairs = [
                    stack_scores(*([trials[name, seed] for seed in seeds] for name in pair))
                    for pair in zip(groups[levels[0]], groups[level], strict=True)
                ]
                if len({first.ndim for first, _ in pairs}) > 1:
                    continue
                first, second = (np.mean([pair[side] for pair in pairs], axis=0) for side in (0, 1))
                effects.append(MainEffect(level, levels[0], size, paired_difference(first, second), len(seeds)))
    return effects


def _factors(results: StudyResults) -> list[list[str]]:
    """The levels of each factor, from the names of the variants; none if they are not all combinations."""
    if results.settings.get("design") != "factorial":
        return []
    parts = [name.split(JOINT) for name in results.variants]
    if len({len(levels) for levels in parts}) > 1:
        return []
    factors = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    combinations = {tuple(levels) for levels in itertools.product(*factors)}
    return factors if len(factors) > 1 and {tuple(levels) for levels in parts} == combinations else []
