"""The page of a distillation."""

from __future__ import annotations

from pathlib import Path

from bertblocks.reports.curves import learning_curve, loss_curve, score_curves, step_curves
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, tiles
from bertblocks.reports.reproduce import reproduce_section
from bertblocks.reports.runs import Run
from bertblocks.reports.verdict import write_verdict


def distillation_page(run: Run) -> Html:
    """Teacher, start and student next to each other, then how the student learned."""
    results = run.results
    columns = {name: results.get(key, {}) for name, key in COLUMNS.items()}
    rows = [[name, *(scores.get(name, "") for scores in columns.values())] for name in columns["student"]]
    for name in ("parameters", "speeds"):
        if found := results.get(name):
            rows.append([NAMES[name], round(found["teacher"]), "", round(found["student"])])
    subject = f"{run.settings['method']} of {Path(str(run.settings['teacher'])).name}"
    return join(
        paragraph(write_verdict(run, subject, {}), "verdict"),
        *(paragraph(remark, "remark") for remark in results.get("remarks", [])),
        tiles(_numbers(run)),
        section("Scores", table(["score", *columns], rows)),
        section("Learning curve", figures([*learning_curve([run]), *loss_curve([run])], has_hint=True)),
        section("Other curves", figures([*score_curves([run]), *step_curves([run])])),
        reproduce_section(run),
    )


COLUMNS = {"teacher": "teacher", "start": "start", "student": "scores"}
NAMES = {"parameters": "parameters", "speeds": "texts per second"}


def _numbers(run: Run) -> dict[str, object]:
    results = run.results
    speeds, chosen = results.get("speeds", {}), results.get("chosen", {})
    return {
        run.metric.replace("_", " "): run.score,
        "times as fast": round(speeds["student"] / speeds["teacher"], 2) if speeds else None,
        "steps": chosen.get("steps", run.last_step),
        "best step": chosen.get("best_step"),
        "parameters": run.facts.get("parameters"),
        "precision": chosen.get("precision"),
    }
