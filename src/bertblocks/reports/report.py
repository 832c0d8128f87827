"""Makes the page of a run, or of several, from their files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from bertblocks.core.log import logger
from bertblocks.core.requirements import MissingPackageError
from bertblocks.reports.charts import ChartError
from bertblocks.reports.comparison import comparison_page
from bertblocks.reports.distillation import distillation_page
from bertblocks.reports.evaluation import evaluation_page
from bertblocks.reports.finetuning import finetuning_page
from bertblocks.reports.page import REPORT, Html, join, write_page
from bertblocks.reports.pretraining import pretraining_page
from bertblocks.reports.runs import Run

PAGES = {
    "finetune": finetuning_page,
    "distill": distillation_page,
    "pretrain": pretraining_page,
    "evaluate": evaluation_page,
}
TITLES = {
    "finetune": "Fine-tuning",
    "distill": "Distillation",
    "pretrain": "Pretraining",
    "evaluate": "Evaluation",
}
#: A page of a run that is going loads itself again after so many seconds.
REFRESH_SECONDS = 10


def write_report(runs: Sequence[Run], path: Path | None = None) -> Path:
    """Writes the page of a run, or one of several with their curves in shared charts. Seeds count as several."""
    shown = [*runs[0].seeds] if len(runs) == 1 and len(runs[0].seeds) > 1 else list(runs)
    run = runs[0]
    if len(runs) == 1:
        title = f"{TITLES[run.kind]}: {run.name}"
    else:
        title = f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    body = PAGES[run.kind](shown[0]) if len(shown) == 1 else comparison_page(_named_apart(shown))
    refresh = REFRESH_SECONDS if any(run.state == "running" for run in runs) else None
    return write_page(path or run.folder / REPORT, title, join(_heading(title), body), refresh)


def write_report_if_possible(run: Run) -> None:
    """Writes a run's own page. If charts cannot be drawn, the run is complete too, and a note says what to do."""
    try:
        write_report([run])
    except (ChartError, MissingPackageError) as error:
        logger.warning(f"{error}; then write the page with: bertblocks report {run.folder}")


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs whose names differ: those with the same name get their folder too."""
    names = [run.name for run in runs]
    return [
        replace(run, facts={**run.facts, "name": str(run.folder)}) if names.count(run.name) > 1 else run for run in runs
    ]


def _heading(title: str) -> Html:
    return Html(f'<h1 dir="auto">{escape(title)}</h1>')
