"""The report of a pretraining run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertblocks.reports.page import ReportSection, settings_table, table, write_report

#: A text with a mask, the masked word, and predictions with their probabilities.
FilledText = tuple[str, str, Sequence[tuple[str, float]]]


def write_pretraining_report(
    folder: Path,
    name: str,
    metrics: Mapping[str, float],
    filled: Sequence[FilledText],
    facts: Mapping[str, Any],
    recipe: Mapping[str, Any],
    config: Mapping[str, Any],
    note: str = "",
) -> Path:
    """Writes report.html: metrics next to the unigram baseline, filled masks, facts, curves and settings."""
    evaluated = []
    for key, value in metrics.items():
        if not key.startswith("unigram_"):
            baseline = metrics.get(key.replace("held_out", "unigram"), "") if "held_out" in key else ""
            evaluated.append((key.replace("_", " "), value, baseline))
    guesses = [
        (text, answer, ", ".join(f"{word} {share:.0%}" for word, share in words)) for text, answer, words in filled
    ]
    return write_report(
        folder,
        f"Pretraining: {name}",
        [
            ReportSection("Scores on held-out texts", table(["", "model", "unigram"], evaluated)),
            ReportSection("Filled masks", table(["text", "masked word", "predictions"], guesses)),
            ReportSection("Run", table(["", ""], facts.items())),
        ],
        [
            ReportSection("Recipe", settings_table(recipe), is_folded=True),
            ReportSection("Model", settings_table(config), is_folded=True),
        ],
        note=note,
    )
