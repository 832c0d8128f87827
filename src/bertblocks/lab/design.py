"""The variants of a study: which keys each of them changes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from bertblocks.core.registry import nearest
from bertblocks.core.settings import RecipeError
from bertblocks.lab.study import Study

#: The variant of a one-at-a-time design that has the first level of every factor.
BASE = "base"


@dataclass(frozen=True)
class Variant:
    """A named set of changes to the recipe."""

    name: str
    changes: dict[str, Any]


def make_variants(study: Study, origin: str) -> list[Variant]:
    """The variants of a study, the baseline first."""
    if study.factors is not None:
        design = _factorial if study.design == "factorial" else _one_at_a_time
        variants = design(study.factors)
    else:
        assert study.variants is not None
        variants = []
        before: dict[str, Any] = {}
        for name, changes in study.variants.items():
            changes = {**before, **changes}
            variants.append(Variant(name, changes))
            before = changes if study.design == "ladder" else {}
    names = [variant.name for variant in variants]
    baseline = study.baseline or names[0]
    if baseline not in names:
        raise RecipeError(
            f"{origin}: baseline is {baseline!r}, which is not a variant{nearest(baseline, names)}; "
            f"the variants are {', '.join(names)}."
        )
    return sorted(variants, key=lambda variant: variant.name != baseline)


def _factorial(factors: dict[str, dict[str, dict[str, Any]]]) -> list[Variant]:
    """All combinations of levels, named after them.

    Example:
        >>> [variant.name for variant in _factorial({"a": {"x": {}, "y": {}}, "b": {"u": {}, "v": {}}})]
        ['x+u', 'x+v', 'y+u', 'y+v']
    """
    combinations = itertools.product(*(levels.items() for levels in factors.values()))
    return [
        Variant("+".join(name for name, _ in levels), {key: value for _, own in levels for key, value in own.items()})
        for levels in combinations
    ]


def _one_at_a_time(factors: dict[str, dict[str, dict[str, Any]]]) -> list[Variant]:
    """The first levels of all factors, and every other level alone.

    Example:
        >>> [variant.name for variant in _one_at_a_time({"a": {"x": {}, "y": {}}, "b": {"u": {}, "v": {}}})]
        ['base', 'a-y', 'b-v']
    """
    first = {name: next(iter(levels.values())) for name, levels in factors.items()}
    variants = [Variant(BASE, _merge(first))]
    for factor, levels in factors.items():
        for level, changes in list(levels.items())[1:]:
            variants.append(Variant(f"{factor}-{level}", _merge({**first, factor: changes})))
    return variants


def _merge(levels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {key: value for changes in levels.values() for key, value in changes.items()}
