"""Runs a study in its folder: texts, searches, trials and measures. Only what is missing runs."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.storage import atomic_file, checksum, lock_folder, read_json, write_json
from bertblocks.lab.corpora import READY, corpus_folder, with_shared_tokens
from bertblocks.lab.local import Job, Runner, run_in_processes
from bertblocks.lab.measures import MeasureSection
from bertblocks.lab.plan import Arm, StudyPlan
from bertblocks.lab.results import (
    FAILURE_FILE,
    STUDY_FILE,
    TRIAL_FILE,
    TRIALS,
    LearningRateSearch,
    StudyResults,
    read_record,
)
from bertblocks.lab.search import choose_rate, next_rates
from bertblocks.lab.statistics.futility import is_hopeless
from bertblocks.lab.statistics.verdicts import judge
from bertblocks.lab.study import Study
from bertblocks.lab.trial import DIVERGED, RUN, SPEC, Trial, is_done
from bertblocks.training.amounts import read_time
from bertblocks.training.run_folder import RunFolderError

LOGS, FILES = "logs", "files"


@dataclass(frozen=True)
class StudyOutcome:
    """How a study ended: the signal that stopped it, and the trials that failed, with the last line of their logs."""

    folder: Path
    signal: int | None
    failed: dict[str, str]


class _StoppedError(Exception):
    """A signal stopped the study."""


def run_study(
    plan: StudyPlan,
    folder: Path | None = None,
    runner: Runner = run_in_processes,
    threads: int | None = None,
    console: Console | None = None,
) -> StudyOutcome:
    """Runs what is missing of a study, with `threads` for each trial and as many trials at a time as there are cores.

    The same call continues after any interruption. A plan with more variants or seeds adds only their trials.
    """
    folder = (folder or Path("studies") / plan.source.study.name).absolute()
    lock = _claim(folder)
    try:
        execution = _Execution(_own_files(plan, folder), folder, runner, threads, console or Console(quiet=True))
        return execution.run()
    finally:
        os.close(lock)


def _claim(folder: Path) -> int:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "study.yaml").is_file():
        raise RunFolderError(f"{folder} holds files that do not belong to a study; choose another folder.")
    try:
        return lock_folder(folder)
    except BlockingIOError as error:
        raise RunFolderError(
            f"Another process runs the study in {folder}; wait for it, or choose another folder."
        ) from error


def _own_files(plan: StudyPlan, folder: Path) -> StudyPlan:
    """Copies the study, its recipe and the files of its measures into the folder, which then needs nothing else."""
    study = plan.source.study
    measures = []
    for measure in study.measures:
        changes = {}
        for key in measure.file_keys:
            if (given := getattr(measure, key)) is not None:
                name = str(Path(FILES) / f"{checksum(Path(given))[:10]}-{Path(given).name}")
                if Path(given).parent == folder / FILES:
                    name = str(Path(FILES) / Path(given).name)
                if not (folder / name).is_file():
                    with atomic_file(folder / name) as copy, Path(given).open("rb") as file:
                        shutil.copyfileobj(file, copy)
                changes[key] = name
        measures.append(measure.model_copy(update=changes))
    source = plan.source.owned(measures)
    for name, values in (("recipe.yaml", source.base), ("study.yaml", source.dump())):
        with atomic_file(folder / name) as file:
            file.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode())
    return StudyPlan(source, plan.arms, plan.base)


@dataclass
class _Execution:
    """The work on a study by one process."""

    plan: StudyPlan
    folder: Path
    runner: Runner
    threads: int | None
    console: Console
    searches: list[LearningRateSearch] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    def run(self) -> StudyOutcome:
        study = self.plan.source.study
        cores = allowed_cpus()
        self.times_trials = study.budget.equal == "seconds" and not torch.cuda.is_available()
        at_a_time = 1 if self.times_trials else len(self.plan.arms) * len(study.seed_list)
        self.threads = self._recorded_threads() or self.threads or max(cores // at_a_time, 1)
        self.slots = torch.cuda.device_count() or max(cores // self.threads, 1)
        own = [section for section in study.measures if not section.is_exclusive]
        exclusive = [section for section in study.measures if section.is_exclusive]
        try:
            self._record([])
            self._prepare()
            rates = self._search()
            trials = self.plan.trials(rates)
            self._record(trials)
            for group in self._groups(trials):
                self._run_trials([trial for trial in group if trial.variant not in self.stopped], own)
                self._stop_hopeless(trials)
            for section in exclusive:
                self._run_trials([trial for trial in trials if self._is_trained(trial)], [section], alone=True)
        except _StoppedError as stopped:
            return StudyOutcome(self.folder, stopped.args[0], self.failed)
        return StudyOutcome(self.folder, None, self.failed)

    # ------------------------------------------------------------------ the parts of a study

    def _prepare(self) -> None:
        for recipe in self.plan.corpora():
            place = corpus_folder(recipe)
            if not (self.folder / place / READY).is_file():
                self.console.print("Preparing the texts.")
                work = {"prepare": recipe.record()}
                job = Job("texts", work, self.folder / LOGS / f"{place.name}.txt", allowed_cpus())
                self._run_jobs([job], 1, {})
                if not (self.folder / place / READY).is_file():
                    raise RunFolderError(f"The texts could not be prepared: {self.failed.get('texts', '')}")

    def _search(self) -> dict[tuple[str, str | None], dict[str, Any]]:
        """Runs short trials until each arm has its learning rate. Returns the keys to change, by variant and size."""
        search = self.plan.source.study.search
        if search is None:
            return {}
        points: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(self.plan.arms))}
        while True:
            wanted = [
                (index, self.plan.search_trial(arm, {"optimizer.lr": rate}))
                for index, arm in enumerate(self.plan.arms)
                for rate in next_rates(search, arm.recipe.optimizer.lr, points[index])
            ]
            if not wanted:
                break
            self._run_trials([trial for _, trial in wanted], [])
            for index, trial in wanted:
                points[index].append((trial.recipe.optimizer.lr, self._final_loss(trial)))
        self.searches = [
            choose_rate(search, arm.variant.name, arm.size, points[index]) for index, arm in enumerate(self.plan.arms)
        ]
        for found in self.searches:
            self.console.print(f"{found.variant}: learning rate {found.chosen:.3g}.")
        return {(found.variant, found.size): {"optimizer.lr": found.chosen} for found in self.searches}

    def _final_loss(self, trial: Trial) -> float:
        place = self.folder / TRIALS / trial.name
        if (place / FAILURE_FILE).is_file():
            return math.inf
        if not (place / TRIAL_FILE).is_file():
            raise RunFolderError(f"{trial.name} failed: {self.failed.get(trial.name, 'see its log')}")
        return read_record(place).curve[-1].loss

    def _groups(self, trials: Sequence[Trial]) -> list[list[Trial]]:
        """All trials at once or, with early stopping, seed by seed."""
        if not self.plan.source.study.early_stopping:
            return [list(trials)]
        return [[trial for trial in trials if trial.seed == seed] for seed in self.plan.source.study.seed_list]

    def _stop_hopeless(self, trials: Sequence[Trial]) -> None:
        if not self.plan.source.study.early_stopping:
            return
        for variant in hopeless_variants(StudyResults.load(self.folder), self.plan.source.study):
            if variant not in self.stopped:
                self.console.print(f"{variant} can no longer be better; its other seeds are left out.")
                self.stopped.append(variant)
        self._record(trials)

    # ------------------------------------------------------------------ trials

    def _run_trials(self, trials: Sequence[Trial], sections: Sequence[MeasureSection], alone: bool = False) -> None:
        missing = [trial for trial in trials if not is_done(self.folder, trial, sections)]
        if not missing:
            return
        threads = allowed_cpus() if alone else self.threads or 1
        alone = alone or self.times_trials
        shared = with_shared_tokens(self.plan.base)
        for trial in missing:
            write_json(self.folder / TRIALS / trial.name / SPEC, trial.spec(shared, sections))
        jobs = [
            Job(trial.name, {"trial": trial.name}, self.folder / LOGS / f"{trial.name}.txt", threads, alone)
            for trial in missing
        ]
        costs = {trial.name: trial.flops * trial.tokens for trial in missing}
        self._run_jobs(jobs, 1 if alone else self.slots, costs)

    def _run_jobs(self, jobs: Sequence[Job], slots: int, costs: dict[str, float]) -> None:
        progress = _Progress(self.folder, self.console, costs, len(jobs))
        signal = self.runner(self.folder, jobs, slots, progress)
        self.failed |= progress.failed
        if signal is not None:
            raise _StoppedError(signal)

    def _is_trained(self, trial: Trial) -> bool:
        return (self.folder / TRIALS / trial.name / TRIAL_FILE).is_file()

    # ------------------------------------------------------------------ the record

    def _recorded_threads(self) -> int | None:
        """The threads of earlier trials: sums over more threads differ in their last digits."""
        file = self.folder / STUDY_FILE
        return read_json(file)["settings"]["threads"] if file.is_file() else None

    def _record(self, trials: Sequence[Trial]) -> None:
        """Describes the study and its trials, for the report."""
        plan, study = self.plan, self.plan.source.study
        planned = [
            {"variant": trial.variant, "seed": trial.seed, "size": trial.size, "folder": trial.name}
            for trial in trials
            if trial.variant not in self.stopped or self._is_trained(trial)
        ]
        if not trials and (self.folder / STUDY_FILE).is_file():
            return
        write_json(
            self.folder / STUDY_FILE,
            {
                "name": study.name,
                "description": study.description,
                "baseline": plan.baseline,
                "variants": {arm.variant.name: changed_keys(arm) for arm in plan.arms if arm.size == plan.arms[0].size},
                "measures": {name: asdict(info) for name, info in plan.infos.items()},
                "sections": {section.label: section.model_dump(mode="json") for section in study.measures},
                "scale": plan.scale,
                "settings": {
                    "budget": study.budget.model_dump(mode="json"),
                    "design": study.design,
                    "seeds": study.seed_list,
                    "sizes": study.sizes,
                    "level": study.level,
                    "power": study.power,
                    "threads": self.threads,
                    "stopped": self.stopped,
                    "search": None if study.search is None else study.search.model_dump(mode="json"),
                    "recipe": plan.base.record(),
                },
                "searches": [asdict(search) for search in self.searches],
                "trials": planned,
            },
        )


def changed_keys(arm: Arm) -> dict[str, Any]:
    """The keys in which an arm differs from the base recipe, including those that the budget solved."""
    return {**arm.variant.changes, **arm.solved}


def hopeless_variants(results: StudyResults, study: Study) -> list[str]:
    """The variants with seeds to go that can no longer be better than the baseline, at any size."""
    deciding, total = next(iter(results.measures)), len(study.seed_list)
    looks: dict[str, list[bool]] = {}
    for comparison in judge(results, study.level):
        if comparison.measure == deciding:
            seeds, higher = comparison.seeds, results.measures[deciding].higher_is_better
            before = seeds - 1 if seeds > 2 else 0  # two seeds are the first look
            looks.setdefault(comparison.variant, []).append(
                1 < seeds < total and is_hopeless(comparison.difference, seeds / total, before / total, higher)
            )
    return [variant for variant, hopeless in looks.items() if all(hopeless)]


class _Progress:
    """Prints a line for each trial that ends, and from time to time, with the time left by FLOPs."""

    def __init__(self, folder: Path, console: Console, costs: dict[str, float], count: int) -> None:
        self.folder, self.console, self.costs, self.count = folder, console, costs, count
        self.began = time.monotonic()
        self.running: list[str] = []
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self._begun = 0.0

    def started(self, job: Job) -> None:
        self.running.append(job.name)
        if job.name in self.costs:
            self._begun += self.costs[job.name] * self._share(job.name)  # from before this call

    def ended(self, job: Job, code: int) -> None:
        self.running.remove(job.name)
        if code >= 128 or code < 0:
            return
        self.done.append(job.name)
        state = "done"
        if code == DIVERGED:
            state = "its loss is not finite"
        elif code:
            lines = job.log.read_text(encoding="utf-8").split("\n") if job.log.is_file() else []
            self.failed[job.name] = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
            state = f"failed: {self.failed[job.name]}"
        self.console.print(f"{len(self.done)}/{self.count} {job.name}: {state}{self._time_left()}", highlight=False)

    def waiting(self) -> None:
        shares = ", ".join(f"{name} {self._share(name):.0%}" for name in self.running)
        self.console.print(f"{len(self.done)}/{self.count} done; running {shares}{self._time_left()}", highlight=False)

    def _share(self, name: str) -> float:
        lines = read_metrics(self.folder / TRIALS / name / RUN / "metrics.jsonl")
        trained = [line for line in lines if "learning_rate" in line]
        if not trained:
            return 0.0
        spec = read_json(self.folder / TRIALS / name / SPEC)
        last, budget = trained[-1], spec["recipe"]["schedule"]["budget"]
        done = last["step"] / spec["steps"] if budget is None else last["seconds"] / read_time(budget)
        return min(done, 1.0)

    def _time_left(self) -> str:
        total = sum(self.costs.values())
        finished = sum(self.costs.get(name, 0.0) for name in self.done)
        finished += sum(self.costs.get(name, 0.0) * self._share(name) for name in self.running)
        gained, left = finished - self._begun, total - finished
        if gained <= 0 or left <= 0:
            return ""
        seconds = (time.monotonic() - self.began) * left / gained
        minutes = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f"; about {minutes} left"
