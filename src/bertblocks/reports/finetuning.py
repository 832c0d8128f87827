"""The page of a fine-tuning run."""

from __future__ import annotations

from pathlib import Path

from bertblocks.reports.curves import learning_curve, loss_curve, score_curves, step_curves
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, tiles
from bertblocks.reports.predictions import prediction_sections
from bertblocks.reports.reproduce import reproduce_section
from bertblocks.reports.runs import Run
from bertblocks.reports.verdict import write_verdict


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
    """One sentence about task, model, data and score."""
    model, train = (Path(str(run.settings.get(key, ""))).name for key in ("model", "train"))
    baselines = run.results.get("baselines", {})
    found = {name: scores[run.metric] for name, scores in baselines.items() if run.metric in scores}
    return write_verdict(run, f"{run.task} with {model} on {train}", found)


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
