"""The tables of a study: one row for each comparison, and one for each trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertblocks.core.console import write_number
from bertblocks.core.storage import atomic_file
from bertblocks.lab.results import StudyResults
from bertblocks.lab.statistics.verdicts import ALPHA, Comparison
from bertblocks.reports.table_files import csv_table, latex_table, markdown_table

Row = dict[str, Any]
#: The columns of the tables for people, and how they are aligned.
COLUMNS = {
    **{"variant": "l", "against": "l", "measure": "l", "verdict": "l", "difference": "r", "95%": "r", "Holm's p": "r"},
    **{"seeds": "r", "scale": "l"},
}


def scale_of(results: StudyResults, size: str | None) -> str:
    """The scale at which a verdict was found: the study's own or, in a study of sizes, that of the size."""
    trials = [trial for trial in results.trials if trial.size == size]
    if size is None or not trials:
        return results.scale
    spans = [sorted(trial.parameters for trial in trials), sorted(trial.tokens for trial in trials)]
    parameters, tokens = (" to ".join(dict.fromkeys(map(write_number, (span[0], span[-1])))) for span in spans)
    seeds = len({trial.seed for trial in trials})
    return f"{parameters} parameters, {tokens} tokens, {seeds} {'seed' if seeds == 1 else 'seeds'}"


def comparison_rows(results: StudyResults, comparisons: Sequence[Comparison]) -> list[Row]:
    """All numbers of the comparisons, as plain values. What is unknown is None."""
    family = sum(comparison.verdict is not None for comparison in comparisons)
    alpha = results.settings.get("level", ALPHA)
    rows = []
    for found in comparisons:
        low, high = found.difference.interval()
        tested_low, tested_high = found.difference.interval(found.tested_at) if found.tested_at else (None, None)
        bootstrap_low, bootstrap_high = found.bootstrap() or (None, None)
        is_judged = found.verdict is not None
        row: Row = {
            "variant": found.variant,
            "against": found.reference,
            "size": found.size,
            "measure": found.measure,
            "verdict": found.verdict,
            "reason": found.reason,
            "difference": found.difference.value,
            "low": low,
            "high": high,
            "relative": found.relative,
            "p": found.p,
            "holm_p": found.adjusted_p,
            "tested_low": tested_low,
            "tested_high": tested_high,
            "bootstrap_low": bootstrap_low,
            "bootstrap_high": bootstrap_high,
            "effect_size": found.effect_size,
            "detectable": found.detectable(alpha / family) if is_judged else None,
            "against_mean": found.reference_mean,
            "variant_mean": found.variant_mean,
            "seeds": found.seeds,
            "paired": found.is_paired,
            "scale": scale_of(results, found.size),
        }
        rows.append({key: None if _is_unknown(value) else value for key, value in row.items()})
    return rows


def trial_rows(results: StudyResults) -> list[Row]:
    """What each trial cost and what it measured."""
    values: dict[tuple[str, int, str | None], dict[str, float]] = {}
    for found in results.measurements:
        values.setdefault((found.variant, found.seed, found.size), {})[found.measure] = found.value
    return [
        {
            "variant": trial.variant,
            "size": trial.size,
            "seed": trial.seed,
            **{name: values.get((trial.variant, trial.seed, trial.size), {}).get(name) for name in results.measures},
            "learning_rate": trial.learning_rate,
            "steps": trial.steps,
            "tokens": trial.tokens,
            "flops": trial.flops,
            "seconds": trial.seconds,
            "parameters": trial.parameters,
            "peak_memory": trial.peak_memory,
        }
        for trial in results.trials
    ]


def write_tables(results: StudyResults, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes comparisons.md, comparisons.tex, comparisons.csv and trials.csv."""
    cells = [_cells(row) for row in rows]
    alignment = "".join(COLUMNS.values())
    columns = list(COLUMNS)
    texts = {
        "comparisons.md": markdown_table(columns, cells, alignment),
        "comparisons.tex": latex_table(columns, cells, alignment),
        "comparisons.csv": rows_as_csv(rows),
        "trials.csv": rows_as_csv(trial_rows(results)),
    }
    for name, text in texts.items():
        with atomic_file(folder / name) as file:
            file.write(text.encode())
    return [folder / name for name in texts]


def rows_as_csv(rows: Sequence[Row]) -> str:
    """Rows of the same keys as CSV."""
    return csv_table(list(rows[0]), [list(row.values()) for row in rows]) if rows else ""


def name_of(row: Row) -> str:
    """The variant and, in a study of sizes, the size."""
    return row["variant"] if row["size"] is None else f"{row['variant']} at {row['size']}"


def _cells(row: Row) -> list[str]:
    interval = "" if row["low"] is None else f"{row['low']:+.4g} to {row['high']:+.4g}"
    difference = "" if row["difference"] is None else f"{row['difference']:+.4g}"
    p = "" if row["holm_p"] is None else write_p(row["holm_p"])
    texts = [name_of(row), row["against"], row["measure"], row["verdict"] or "", difference, interval, p]
    return [*texts, str(row["seeds"]), row["scale"]]


def write_p(p: float) -> str:
    """A p value with two digits.

    Example:
        >>> write_p(0.0312), write_p(2e-9)
        ('0.031', '< 0.0001')
    """
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def _is_unknown(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
