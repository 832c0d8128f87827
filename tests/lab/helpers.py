"""Runs a study in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bertblocks.lab.local import Job, Listener, run_here
from bertblocks.lab.plan import StudyPlan, make_plan
from bertblocks.lab.results import StudyResults
from bertblocks.lab.run import StudyOutcome, run_study
from bertblocks.lab.study import read_study

Write = Callable[..., Path]


class Counting:
    """Runs jobs here and remembers their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, folder: Path, jobs: Sequence[Job], slots: int, listener: Listener) -> int | None:
        self.names += [job.name.rpartition("-")[0] or job.name for job in jobs]
        return run_here(folder, jobs, slots, listener)


def plan_of(path: Path) -> StudyPlan:
    return make_plan(read_study(path))


def run(path: Path, folder: Path) -> tuple[StudyOutcome, StudyResults, list[str]]:
    counting = Counting()
    outcome = run_study(plan_of(path), folder, counting, threads=1)
    return outcome, StudyResults.load(folder), counting.names
