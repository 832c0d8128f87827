"""What pages of several tasks show of predictions: quality by label, calibration, and errors by length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise
from typing import Any

from bertblocks.reports.charts import Chart, bar_chart, scatter_chart
from bertblocks.reports.page import Html, figures, section, table

Record = Mapping[str, Any]
#: How many examples a table shows of each kind, such as the worst.
SHOWN = 100
#: Groups in charts of calibration and of errors by length.
GROUPS = 10
#: Bars in a chart of labels; the table below it has all of them.
MAX_BARS = 100


def label_scores(real: Sequence[set], found: Sequence[set], kind: Callable[[Any], str] = str) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each label, worst first; `kind` names the label of an item.

    Example:
        >>> label_scores([{"a"}, {"b"}], [{"a"}, {"a"}])[1]
        {'label': 'a', 'precision': 0.5, 'recall': 1.0, 'F1': 0.6666666666666666, 'examples': 1, 'predicted': 2}
    """
    hits, num_real, num_found = (
        Counter(kind(item) for items in side for item in items)
        for side in ([a & b for a, b in zip(real, found, strict=True)], real, found)
    )
    rows = [
        {
            "label": label,
            "precision": hits[label] / max(num_found[label], 1),
            "recall": hits[label] / max(num_real[label], 1),
            "F1": 2 * hits[label] / max(num_real[label] + num_found[label], 1),
            "examples": num_real[label],
            "predicted": num_found[label],
        }
        for label in sorted({*num_real, *num_found})
    ]
    return sorted(rows, key=lambda row: row["F1"])


def by_label(real: Sequence[set], found: Sequence[set], kind: Callable[[Any], str] = str) -> list[Html]:
    rows = label_scores(real, found, kind)
    if not rows:
        return []
    details = {
        row["label"]: {key: round(row[key], 4) for key in ("precision", "recall", "examples", "predicted")}
        for row in rows
    }
    bars = {row["label"]: row["F1"] for row in rows[:MAX_BARS]}
    title = "F1 by label, worst first" + (f" ({MAX_BARS} of {len(rows)})" if len(rows) > MAX_BARS else "")
    numbers = table(list(rows[0]), [list(row.values()) for row in rows], is_searchable=True)
    is_short = len(rows) <= 12
    return [
        figures([bar_chart(title, bars, "F1", details)], is_wide=True),
        numbers if is_short else section("Table", numbers, is_folded=True),
    ]


def calibration(records: Sequence[Record], is_right: Sequence[float]) -> list[Chart]:
    """Accuracy by the model's own probability, and the mean distance between them (Guo et al., 2017)."""
    order = sorted(range(len(records)), key=lambda i: records[i]["probability"])
    points, error = [], 0.0
    for group in _split(order):
        confidence = sum(records[i]["probability"] for i in group) / len(group)
        accuracy = sum(is_right[i] for i in group) / len(group)
        error += abs(confidence - accuracy) * len(group) / len(order)
        points.append({"confidence": confidence, "accuracy": accuracy, "examples": len(group)})
    chart = scatter_chart("Calibration", points, "confidence", "accuracy", size="examples", diagonal=True)
    note = f"Expected calibration error {error:.3f}. On the dashed line the model is right as often as it says."
    return [replace(chart, note=note)]


def by_length(records: Sequence[Record], quality: Sequence[float], name: str = "error rate") -> list[Chart]:
    """The mean of 1 - quality by length of the text, in groups of equally many examples."""
    lengths = [len(_length_text(record)) for record in records]
    order = sorted(range(len(records)), key=lambda i: lengths[i])
    points = [
        {
            "characters": sum(lengths[i] for i in group) / len(group),
            name: 1 - sum(quality[i] for i in group) / len(group),
            "examples": len(group),
        }
        for group in _split(order)
    ]
    chart = scatter_chart(f"{name.capitalize()} by length of the text", points, "characters", name, size="examples")
    return [chart]


def _length_text(record: Record) -> str:
    if "texts" in record:
        return " ".join(record["texts"])
    return record.get("text") or record.get("context") or record.get("query") or ""


def _split(order: Sequence[int]) -> list[Sequence[int]]:
    """Up to `GROUPS` parts of about the same size."""
    count = min(GROUPS, max(1, len(order) // 5))
    bounds = [round(number * len(order) / count) for number in range(count + 1)]
    return [order[a:b] for a, b in pairwise(bounds) if b > a]


def show_text(text: str) -> Html:
    return Html(f'<span dir="auto">{escape(text)}</span>')


def cut_text(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
