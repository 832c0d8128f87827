"""A table of runs: for the terminal, as csv and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertblocks.core.console import write_number
from bertblocks.reports.runs import Run, differing_settings
from bertblocks.reports.table_files import csv_table, latex_table


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row of values for each run. `settings` has the keys in which runs of the same task differ."""
    rows = []
    by_task: dict[str, list[Run]] = {}
    for run in runs:
        by_task.setdefault(run.task, []).append(run)
    differing = {task: differing_settings(group) for task, group in by_task.items()}
    for run in runs:
        place = next(number for number, other in enumerate(by_task[run.task]) if other is run)
        low, high = run.interval or (None, None)
        rows.append(
            {
                "run": str(run.folder),
                "task": run.task,
                "settings": {key: values[place] for key, values in differing[run.task].items()},
                "metric": run.metric,
                "score": run.score,
                "low": low,
                "high": high,
                "tokens_per_second": run.speed,
                "parameters": run.facts.get("parameters"),
                "state": run.state,
            }
        )
    return rows


def write_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The columns and cells of a table for people: short numbers, and the interval next to the score."""
    columns = ["run", "task", "settings", "metric", "score", "95%", "tokens/s", "parameters", "state"]
    cells = []
    for row in rows:
        settings = " ".join(f"{key}={value}" for key, value in row["settings"].items() if value is not None)
        interval = "" if row["low"] is None else f"{row['low']:.4g} to {row['high']:.4g}"
        numbers = ["" if row[key] is None else write_number(row[key]) for key in ("tokens_per_second", "parameters")]
        score = "" if row["score"] is None else f"{row['score']:.4g}"
        cells.append([row["run"], row["task"], settings, row["metric"], score, interval, *numbers, row["state"]])
    return columns, cells


def write_csv(rows: Sequence[dict[str, Any]]) -> str:
    """All values, with a column for each setting that differs."""
    settings = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    names = ["run", "task", "metric", "score", "low", "high", "tokens_per_second", "parameters", "state"]
    lines = [[row[name] for name in names] + [row["settings"].get(key) for key in settings] for row in rows]
    return csv_table([*names, *settings], lines)


def write_latex(rows: Sequence[dict[str, Any]]) -> str:
    """A table for the package booktabs."""
    return latex_table(*write_cells(rows), "llllrrrrl")
