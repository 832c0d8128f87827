"""The page of a pretraining run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertblocks.reports.charts import Chart, bar_chart
from bertblocks.reports.curves import learning_curve, loss_curve, score_curves, step_curves
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, tiles
from bertblocks.reports.reproduce import reproduce_section
from bertblocks.reports.runs import Run
from bertblocks.reports.verdict import write_verdict


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
    """One sentence about the model and how well it predicts held-out texts."""
    metrics = run.results.get("metrics", {})
    baselines = {"unigram": metrics["unigram_loss"]} if "unigram_loss" in metrics else {}
    accuracy = metrics.get("held_out_accuracy")
    note = "" if accuracy is None else f", accuracy {accuracy:.1%}"
    return write_verdict(run, f"pretraining of {run.name}", baselines, note)


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
