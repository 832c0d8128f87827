"""The page of a pretraining run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertblocks.reports.charts import Chart, bar_chart
from bertblocks.reports.curves import learning_curve, loss_curve, score_curves, step_curves
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, tiles, write_seconds, write_value
from bertblocks.reports.reproduce import reproduce_section
from bertblocks.reports.runs import Run


def pretraining_page(run: Run) -> Html:
    """The verdict, held-out loss, filled masks, loss by frequency and position, and how the machine was used."""
    results = run.results
    metrics = results.get("metrics", {})
    evaluated = []
    for key, value in metrics.items():
        if not key.startswith("unigram_"):
            baseline = metrics.get(key.replace("held_out", "unigram"), "") if "held_out" in key else ""
            evaluated.append((key.replace("_", " "), value, baseline))
    filled = [
        (text["text"], text["answer"], ", ".join(f"{word} {share:.0%}" for word, share in text["guesses"]))
        for text in results.get("filled", [])
    ]
    return join(
        paragraph(verdict(run), "verdict"),
        paragraph(results.get("summary", ""), "quiet"),
        tiles(_numbers(run)),
        section("Learning curve", figures([*learning_curve([run]), *loss_curve([run])], has_hint=True)),
        section("Scores on held-out texts", table(["score", "model", "unigram"], evaluated)),
        section("Filled masks", table(["text", "masked word", "predictions"], filled, is_searchable=True)),
        section("Where the loss is", figures(_parts(results))),
        section("Training", figures([*step_curves([run]), *score_curves([run])])),
        section("Run", table(["fact", "value"], results.get("facts", {}).items())),
        reproduce_section(run),
    )


def verdict(run: Run) -> str:
    """One sentence: what was trained, how well it predicts held-out texts, duration and date."""
    metrics = run.results.get("metrics", {})
    parts = [f"pretraining of {run.name}"]
    if run.score is not None:
        start = next((line[run.metric] for line in run.evaluations if line["step"] == 0 and run.metric in line), None)
        others = {"start": start, "unigram": metrics.get("unigram_loss")}
        compared = ", ".join(f"{name} {write_value(value)}" for name, value in others.items() if value is not None)
        accuracy = metrics.get("held_out_accuracy")
        written = f"held-out loss {write_value(run.score)}" + (f" against {compared}" if compared else "")
        parts.append(written + (f", accuracy {accuracy:.1%}" if accuracy is not None else ""))
    parts.append(run.state)
    if run.seconds is not None:
        parts.append(f"{write_seconds(run.seconds)} in steps")
    parts.append(str(run.facts.get("started", ""))[:10])
    return " · ".join(part for part in parts if part)


def _numbers(run: Run) -> dict[str, Any]:
    last = run.steps[-1] if run.steps else {}
    return {
        "held-out loss": run.score,
        "held-out accuracy": run.results.get("metrics", {}).get("held_out_accuracy"),
        "steps": last.get("step"),
        "tokens": last.get("tokens"),
        "tokens per second": None if run.speed is None else round(run.speed),
        "slots filled": last.get("packing"),
        "peak memory, GB": None if "memory" not in last else last["memory"] / 1e9,
        "parameters": run.facts.get("parameters"),
    }


def _parts(results: dict[str, Any]) -> list[Chart]:
    """The held-out loss by the frequency of the token in the training texts, and by its position."""
    charts = []
    for key, title, unit in (
        ("by_frequency", "Loss by frequency of the token, per million", ""),
        ("by_position", "Loss by position in the text", ""),
    ):
        groups: Sequence[dict[str, Any]] = results.get(key, [])
        bars = {f"{group['from']:,} to {group['to']:,}{unit}": group["loss"] for group in groups}
        details = {name: {"tokens": group["tokens"]} for name, group in zip(bars, groups, strict=True)}
        if bars:
            charts.append(bar_chart(title, bars, "held-out loss", details))
    return charts
