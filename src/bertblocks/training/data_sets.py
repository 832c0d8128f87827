"""One or several data sets in one run: their names, their examples end to end, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.data.hashing import combine, uniform
from bertblocks.tasks.base import Evaluated, FineTuneTask
from bertblocks.tasks.predictor import Predictor

#: A file, several files, or files by the names of their data sets.
Sources = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
#: The score that is the mean over data sets of the metric of each.
MEAN = "mean"


def name_sources(sources: Sources) -> dict[str, str]:
    """The files of data sets by name: their own names if these differ, or else their paths.

    Example:
        >>> name_sources(["data/nli.csv", "qa.jsonl"]), name_sources("data/nli.csv")
        ({'nli': 'data/nli.csv', 'qa': 'qa.jsonl'}, {'nli': 'data/nli.csv'})
    """
    if isinstance(sources, Mapping):
        return {str(name): str(source) for name, source in sources.items()}
    paths = [str(sources)] if isinstance(sources, (str, Path)) else [str(source) for source in sources]
    if not paths:
        raise ValueError("The list of files is empty; give at least one file.")
    if len(set(paths)) < len(paths):
        raise ValueError(f"{next(path for path in paths if paths.count(path) > 1)} is given twice.")
    names = [Path(path).name.partition(".")[0] or path for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else paths, paths, strict=True))


def record_sources(sources: Sources) -> str | dict[str, str]:
    """What a run records of its files: one as a text, several by name."""
    if isinstance(sources, (str, Path)):
        return str(sources)
    named = name_sources(sources)
    return named if len(named) > 1 else next(iter(named.values()))


@dataclass(frozen=True)
class DataSets:
    """The items of data sets end to end, and how many of them each has."""

    names: list[str]
    sizes: list[int]
    items: list[Any]
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", [0, *accumulate(self.sizes)][:-1])

    @classmethod
    def join(cls, sets: Mapping[str, Sequence[Any]]) -> DataSets:
        items = [item for items in sets.values() for item in items]
        return cls(list(sets), [len(items) for items in sets.values()], items)

    def split(self) -> dict[str, list[Any]]:
        parts = zip(self.names, self.starts, self.sizes, strict=True)
        return {name: self.items[start : start + size] for name, start, size in parts}

    def choose(self, step: int, seed: int, temperature: float) -> int:
        """The number of the data set of a step, drawn with a probability proportional to size^(1/temperature)."""
        shares = np.cumsum(np.array(self.sizes, dtype=np.float64) ** (1 / temperature))
        drawn = uniform(combine("dataset", seed, step))[0] * shares[-1]
        return int(np.searchsorted(shares, drawn, side="right"))


def evaluate_sets(task: FineTuneTask, predictor: Predictor, sets: DataSets) -> Evaluated:
    """The scores of one data set, or those of each of several and the mean of their metrics."""
    if len(sets.names) == 1:
        return task.evaluate(predictor, sets.items)
    parts, metrics = {}, {}
    for name, items in sets.split().items():
        metrics[name], parts[name] = task.metric_of(items), task.evaluate(predictor, items)
    scores = {MEAN: float(np.mean([part.scores[metrics[name]] for name, part in parts.items()]))}
    scores |= {f"{name}/{key}": value for name, part in parts.items() for key, value in part.scores.items()}
    bounds = [(start, start + size) for start, size in zip(sets.starts, sets.sizes, strict=True)]

    def resample(chosen: np.ndarray) -> float:
        own = [chosen[(chosen >= start) & (chosen < end)] - start for start, end in bounds]
        pairs = zip(parts.values(), own, strict=True)
        return float(np.mean([part.resample(indices) for part, indices in pairs if len(indices)]))

    records = [{"dataset": name, **record} for name, part in parts.items() for record in part.predictions]
    return Evaluated(scores, resample, records)


def metric_of_sets(task: FineTuneTask, sets: DataSets) -> str:
    """The score that selects the best model."""
    return task.metric_of(sets.items) if len(sets.names) == 1 else MEAN
