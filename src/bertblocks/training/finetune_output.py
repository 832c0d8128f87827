"""What fine-tuning leaves behind: a model that opens as any other, in files that are whole or not there; a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.save import save_model
from bertblocks.core.storage import atomic_entries
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.reports.charts import heat_map
from bertblocks.reports.page import ReportSection, settings_table, table, write_report
from bertblocks.tasks.base import Evaluated

#: A confusion matrix of more labels is drawn for those that are confused most.
MAX_CONFUSED = 24


def write_model(folder: Path, model: BertBlocksPreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with atomic_entries(folder) as scratch:
        save_model(model, scratch)
        tokenizer.save_pretrained(scratch)


def report_finetuning(
    folder: Path, title: str, evaluated: Evaluated, notes: Sequence[str], settings: Mapping[str, Any]
) -> None:
    """report.html of a run: scores, labels, confusions and worst examples around the curves."""
    scores = table(["score", "value"], list(evaluated.scores.items()))
    summary = [ReportSection("On the evaluation examples", scores)]
    if evaluated.confusion is not None:
        summary.append(ReportSection("Confusion", _draw_confusion(*evaluated.confusion)))
    details = [
        ReportSection(name, table(rows[0], rows[1:])) for name, rows in evaluated.tables.items() if len(rows) > 1
    ]
    details.append(ReportSection("Settings", settings_table(settings), is_folded=True))
    write_report(folder, title, summary, details, note=". ".join(notes))


def _draw_confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    mistakes = [sum(row) + sum(line[i] for line in counts) - 2 * row[i] for i, row in enumerate(counts)]
    shown = sorted(sorted(range(len(names)), key=lambda i: -mistakes[i])[:MAX_CONFUSED])
    title = "Gold labels (rows) and predictions (columns)"
    if len(shown) < len(names):
        title += f", of the {len(shown)} labels with the most mistakes"
    chosen = [names[i] for i in shown]
    return heat_map(title, chosen, chosen, [[counts[i][j] for j in shown] for i in shown], "gold", "predicted")
