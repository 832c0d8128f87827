"""Studies as the lab would measure them, drawn from a model whose true differences are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertblocks.lab.results import CurvePoint, LearningRateSearch, MeasureInfo, Measurement, StudyResults, TrialRecord

LOSS = MeasureInfo("loss", "nats", False, "held-out loss per masked token")
ACCURACY = MeasureInfo("accuracy", "share", True, "masked tokens that the model fills as they were")
SPEED = MeasureInfo("throughput", "tokens/s", True, "tokens per second in training on this machine")


def simulate(
    effects: Mapping[str, float],
    seeds: int = 5,
    seed: int | np.random.Generator = 0,
    examples: int = 40,
    spread: float = 0.01,
    shared: float = 0.05,
    by_example: float = 0.0,
    noise: float = 0.1,
) -> StudyResults:
    """A study with one measure, a baseline, and variants whose loss differs from it by `effects`.

    A loss is the sum of what the seed does to all variants (`shared`), what it does to one (`spread`), the difficulty
    of the example, what a variant finds hard or easy (`by_example`), and `noise`.
    """
    generator = np.random.default_rng(seed)
    names = ["baseline", *effects]
    by_seed = shared * generator.standard_normal((1, seeds, 1))
    difficulty = generator.standard_normal((1, 1, examples))
    values = (
        3.0
        + np.array([0.0, *effects.values()])[:, None, None]
        + by_seed
        + spread / np.sqrt(2) * generator.standard_normal((len(names), seeds, 1))
        + difficulty
        + by_example / np.sqrt(2) * generator.standard_normal((len(names), 1, examples))
        + noise / np.sqrt(2) * generator.standard_normal((len(names), seeds, examples))
    )
    trials = [trial(name, number) for name in names for number in range(seeds)]
    found = [
        Measurement(name, number, None, "loss", float(values[i, number].mean()), values[i, number])
        for i, name in enumerate(names)
        for number in range(seeds)
    ]
    return study(names, trials, found, {"loss": LOSS})


def trial(name: str, seed: int, size: str | None = None, **changes: Any) -> TrialRecord:
    values: dict[str, Any] = {
        **{"learning_rate": 1e-3, "steps": 1000, "tokens": 2_000_000, "flops": 4.8e13, "seconds": 60.0},
        **{"parameters": 4_400_000, "peak_memory": 600 * 2**20, "curve": []},
    }
    return TrialRecord(name, seed, size, **{**values, **changes})


def study(
    names: Sequence[str], trials: list[TrialRecord], found: list[Measurement], measures: dict[str, MeasureInfo]
) -> StudyResults:
    return StudyResults(
        name="simulated",
        description="Drawn from a model, not trained.",
        baseline=names[0],
        variants={name: {} if name == names[0] else {"model.norm_fn": name} for name in names},
        measures=measures,
        scale="4.4 M parameters, 2 M tokens",
        settings={"budget": "tokens", "seeds": 1 + max((record.seed for record in trials), default=-1)},
        trials=trials,
        measurements=found,
    )


def simulate_full(
    effects: Mapping[str, float], sizes: Mapping[str, int], seeds: int = 5, seed: int = 0, examples: int = 200
) -> StudyResults:
    """A study of several sizes (name to parameters) with three measures, curves and learning-rate searches.

    An effect is the difference in loss at the smallest size; it halves with every tenfold compute.
    """
    generator = np.random.default_rng(seed)
    names = ["baseline", *effects]
    trials, found, searches = [], [], []
    weights = generator.integers(20, 120, examples).astype(float)
    difficulty = 0.4 * generator.standard_normal(examples)
    smallest = min(sizes.values())
    for size, parameters in sizes.items():
        flops = 6.0 * parameters * 2e6
        by_seed = 0.02 * generator.standard_normal(seeds)
        for place, name in enumerate(names):
            effect = dict(effects).get(name, 0.0) * 0.5 ** np.log10(parameters / smallest)
            for number in range(seeds):
                level = 2.0 + 1.4 * (flops / 1e13) ** -0.2 + effect + by_seed[number] + 0.008 * generator.normal()
                scores = level + difficulty + 0.1 * generator.standard_normal(examples)
                loss = float((scores * weights).sum() / weights.sum())
                right = (generator.random(examples) < np.exp(-loss / 3)).astype(float)
                speed = 33_000 * smallest / parameters * (1 + 0.1 * place) * (1 + 0.02 * generator.normal())
                curve = [
                    CurvePoint(step, 2000 * step, flops * step / 1000, 2000 * step / speed, loss + 4 * 0.995**step)
                    for step in range(100, 1001, 100)
                ]
                trials.append(
                    trial(name, number, size, flops=flops, parameters=parameters, seconds=2e6 / speed, curve=curve)
                )
                found += [
                    Measurement(name, number, size, "loss", loss, scores, weights),
                    Measurement(name, number, size, "accuracy", float(right.mean()), right),
                    Measurement(name, number, size, "throughput", speed),
                ]
            rates = np.geomspace(2e-4, 2e-2, 5)
            best = -2.7 + 0.1 * place
            points = [
                (float(rate), 3.2 + effect + 0.4 * (np.log10(rate) - best) ** 2 + 0.01 * generator.normal())
                for rate in rates
            ]
            searches.append(LearningRateSearch(name, size, points, float(10**best)))
    made = study(names, trials, found, {"loss": LOSS, "accuracy": ACCURACY, "throughput": SPEED})
    made.searches.extend(searches)
    return made
