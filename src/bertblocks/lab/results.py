"""What a study measured: the one structure between the trials, which write it, and the report, which reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertblocks.core.storage import read_json, write_json

#: The file of a study folder that describes the study, and its folder of trials.
STUDY_FILE, TRIALS = "study.json", "trials"
#: In the folder of a trial: what was recorded when it was trained, why it failed, and the folder of its measurements.
TRIAL_FILE, FAILURE_FILE, MEASURES = "trial.json", "failure.json", "measures"


class CurvePoint(NamedTuple):
    """One evaluation on the held-out texts during training."""

    step: int
    tokens: int
    flops: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class MeasureInfo:
    """What the values of a measure mean."""

    name: str
    unit: str
    higher_is_better: bool
    description: str


@dataclass(frozen=True)
class TrialRecord:
    """One finished training run: a variant with one seed, and at one size in a study that has sizes."""

    variant: str
    seed: int
    size: str | None
    learning_rate: float
    steps: int
    tokens: int
    flops: float
    seconds: float
    parameters: int
    #: The largest memory of the process, in bytes.
    peak_memory: int
    curve: list[CurvePoint]


@dataclass(frozen=True)
class Found:
    """One value of a measure, with the scores of single examples where there are any."""

    measure: str
    value: float
    examples: NDArray[np.float64] | None = None
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Measurement:
    """The value of one measure for one trial.

    `examples` has one score for each held-out example, in the same order in all trials, so that they are paired across
    variants and seeds; None for measures without examples. `value` is the mean of `examples` unless `weights` of the
    examples (such as their numbers of tokens) are given: then it is the weighted mean.
    """

    variant: str
    seed: int
    size: str | None
    measure: str
    value: float
    examples: NDArray[np.float64] | None = None
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class LearningRateSearch:
    """The short runs that chose a variant's learning rate: (learning rate, held-out loss) in the order they ran."""

    variant: str
    size: str | None
    points: list[tuple[float, float]]
    chosen: float
    #: An interval of the best rate, as far as the fit gives one.
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class StudyResults:
    """All that a study has measured so far."""

    name: str
    description: str
    #: The variant with which the others are compared.
    baseline: str
    #: The keys that each variant changes, including those that the budget solved.
    variants: dict[str, dict[str, Any]]
    #: The first measure is the one that decides.
    measures: dict[str, MeasureInfo]
    #: The scale of the study in one line, such as "4.4 M parameters, 2 M tokens, 3 seeds".
    scale: str
    #: Other settings: budget, design, seeds, the level of the tests, the recipe.
    settings: dict[str, Any]
    trials: list[TrialRecord] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    searches: list[LearningRateSearch] = field(default_factory=list)
    #: Trials that have not finished, as (variant, seed, size).
    missing: list[tuple[str, int, str | None]] = field(default_factory=list)
    #: Why trials failed for good, such as a loss that is not finite, as (variant, seed, size, sentence).
    failures: list[tuple[str, int, str | None, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for raw-data downloads."""
        values = {name.name: getattr(self, name.name) for name in fields(self)}
        values["measures"] = {name: asdict(info) for name, info in self.measures.items()}
        values["trials"] = [{**asdict(trial), "curve": [list(point) for point in trial.curve]} for trial in self.trials]
        values["searches"] = [asdict(search) for search in self.searches]
        values["measurements"] = [
            {**vars(found), "examples": _as_list(found.examples), "weights": _as_list(found.weights)}
            for found in self.measurements
        ]
        return values

    @classmethod
    def load(cls, folder: str | Path) -> StudyResults:
        """Reads the finished trials of a study folder."""
        folder = Path(folder)
        study = read_json(folder / STUDY_FILE)
        trials, measurements, missing, failures = [], [], [], []
        for planned in study["trials"]:
            place = folder / TRIALS / planned["folder"]
            owner = (planned["variant"], planned["seed"], planned["size"])
            if (place / FAILURE_FILE).is_file():
                failures.append((*owner, read_json(place / FAILURE_FILE)["message"]))
            if not (place / TRIAL_FILE).is_file():
                missing.append(owner)
                continue
            trials.append(read_record(place))
            for label, settings in study["sections"].items():
                found = read_measurements(place / MEASURES / f"{label}.json", settings) or []
                measurements += [Measurement(*owner, *vars(value).values()) for value in found]
        return cls(
            name=study["name"],
            description=study["description"],
            baseline=study["baseline"],
            variants=study["variants"],
            measures={name: MeasureInfo(**info) for name, info in study["measures"].items()},
            scale=study["scale"],
            settings=study["settings"],
            trials=trials,
            measurements=measurements,
            searches=[
                LearningRateSearch(**{**search, "points": [tuple(point) for point in search["points"]]})
                for search in study["searches"]
            ],
            missing=missing,
            failures=failures,
        )


def write_record(folder: Path, trial: TrialRecord) -> None:
    """Records that a trial is trained."""
    write_json(folder / TRIAL_FILE, {**asdict(trial), "curve": [list(point) for point in trial.curve]})


def read_record(folder: Path) -> TrialRecord:
    values = read_json(folder / TRIAL_FILE)
    return TrialRecord(**{**values, "curve": [CurvePoint(*point) for point in values["curve"]]})


def write_measurements(file: Path, settings: Mapping[str, Any], found: Sequence[Found]) -> None:
    """Records what one section of measures found in a trial, with the section's own settings."""
    values = [
        {**vars(value), "examples": _as_list(value.examples), "weights": _as_list(value.weights)} for value in found
    ]
    write_json(file, {"settings": dict(settings), "found": values})


def read_measurements(file: Path, settings: Mapping[str, Any]) -> list[Found] | None:
    """What a section of measures found; None if it has not run with these settings."""
    if not file.is_file():
        return None
    values = read_json(file)
    if values["settings"] != dict(settings):
        return None
    return [
        Found(one["measure"], one["value"], _as_array(one["examples"]), _as_array(one["weights"]))
        for one in values["found"]
    ]


def _as_list(values: NDArray[np.float64] | None) -> list[float] | None:
    return None if values is None else values.tolist()


def _as_array(values: list[float] | None) -> NDArray[np.float64] | None:
    return None if values is None else np.array(values, dtype=np.float64)
