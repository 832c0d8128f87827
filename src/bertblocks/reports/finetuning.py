"""The report of a fine-tuning run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertblocks.reports.charts import heat_map
from bertblocks.reports.page import ReportSection, settings_table, table, write_report

#: A confusion matrix shows at most this many labels: those with the most mistakes.
MAX_CONFUSED = 24


def write_finetuning_report(
    folder: Path,
    title: str,
    scores: Mapping[str, Mapping[str, float]],
    tables: Mapping[str, Sequence[Sequence[Any]]],
    confusion: tuple[Sequence[Sequence[int]], Sequence[str]] | None,
    settings: Mapping[str, Any],
    note: str = "",
) -> Path:
    """Writes report.html: scores, the confusion matrix, curves, tables (header row first) and settings.

    `scores` has a column for each baseline, the result and the test file; "result" lists all metrics.
    """
    rows = [[name, *(column.get(name, "") for column in scores.values())] for name in scores["result"]]
    summary = [ReportSection("Scores on the evaluation examples", table(["score", *scores], rows))]
    if confusion is not None:
        summary.append(ReportSection("Confusion matrix", _draw_confusion(*confusion)))
    details = [ReportSection(name, table(rows[0], rows[1:])) for name, rows in tables.items() if len(rows) > 1]
    details.append(ReportSection("Settings", settings_table(settings), is_folded=True))
    return write_report(folder, title, summary, details, note)


def _draw_confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    mistakes = [sum(row) + sum(line[i] for line in counts) - 2 * row[i] for i, row in enumerate(counts)]
    shown = sorted(sorted(range(len(names)), key=lambda i: -mistakes[i])[:MAX_CONFUSED])
    title = "Gold labels (rows) and predictions (columns)"
    if len(shown) < len(names):
        title += f", for the {len(shown)} labels with the most mistakes"
    shown_names = [names[i] for i in shown]
    values = [[counts[i][j] for j in shown] for i in shown]
    return heat_map(title, shown_names, shown_names, values, "gold", "predicted")
