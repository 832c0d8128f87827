"""The page of a fine-tuning run."""

from __future__ import annotations

from pathlib import Path

from bertblocks.reports.curves import learning_curve, loss_curve, score_curves, step_curves
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, tiles, write_seconds, write_value
from bertblocks.reports.predictions import prediction_sections
from bertblocks.reports.reproduce import reproduce_section
from bertblocks.reports.runs import Run


def finetuning_page(run: Run) -> Html:
    """What people look for comes first: the verdict, the learning curve, quality by label and examples."""
    results = run.results
    remarks = [paragraph(remark, "remark") for remark in results.get("remarks", [])]
    columns = {**results.get("baselines", {}), "result": results.get("scores", {})}
    if results.get("test"):
        columns["test"] = results["test"]
    rows = [[name, *(scores.get(name, "") for scores in columns.values())] for name in results.get("scores", {})]
    return join(
        paragraph(verdict(run), "verdict"),
        *remarks,
        tiles(_numbers(run)),
        section("Learning curve", figures([*learning_curve([run]), *loss_curve([run])], has_hint=True)),
        section("Scores on the evaluation examples", table(["score", *columns], rows)),
        prediction_sections(run.read_predictions()),
        section("Other curves", figures([*score_curves([run]), *step_curves([run])])),
        reproduce_section(run),
    )


def verdict(run: Run) -> str:
    """One sentence: task, model, data, the best score against the start and the baselines, duration and date."""
    model, train = (Path(str(run.settings.get(key, ""))).name for key in ("model", "train"))
    parts = [f"{run.task} with {model} on {train}"]
    if run.score is not None:
        interval = run.interval
        written = f" (95% {write_value(interval[0])} to {write_value(interval[1])})" if interval else ""
        others = {name: scores.get(run.metric) for name, scores in run.results.get("baselines", {}).items()}
        start = next((line[run.metric] for line in run.evaluations if line["step"] == 0 and run.metric in line), None)
        if start is not None and "untouched" not in others:
            others = {"start": start, **others}
        compared = ", ".join(f"{name} {write_value(value)}" for name, value in others.items() if value is not None)
        best = "" if run.state == "finished" else "best so far: "
        parts.append(
            f"{best}{run.metric} {write_value(run.score)}{written}" + (f" against {compared}" if others else "")
        )
    parts.append(run.state)
    if run.seconds is not None:
        parts.append(f"{write_seconds(run.seconds)} in steps")
    parts.append(str(run.facts.get("started", ""))[:10])
    return " · ".join(part for part in parts if part)


def _numbers(run: Run) -> dict[str, object]:
    chosen = run.results.get("chosen", {})
    last = run.lines[-1]["step"] if run.lines else None
    return {
        f"{run.metric}, evaluation": run.score,
        f"{run.metric}, test": run.results.get("test", {}).get(run.metric),
        "steps": chosen.get("steps", last),
        "best step": chosen.get("best_step"),
        "tokens per second": None if run.speed is None else round(run.speed),
        "parameters": run.facts.get("parameters"),
        "learning rate": chosen.get("learning_rate"),
        "precision": chosen.get("precision"),
    }
