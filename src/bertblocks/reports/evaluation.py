"""The page of an evaluation: scores of models, their differences, and the predictions of each."""

from __future__ import annotations

from typing import Any

from bertblocks.core.storage import read_json_lines
from bertblocks.reports.charts import Series, bar_chart, line_chart
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, write_value
from bertblocks.reports.predictions import prediction_sections
from bertblocks.reports.reproduce import reproduce_section
from bertblocks.reports.runs import PREDICTIONS, Run


def evaluation_page(run: Run) -> Html:
    """Models on the same examples, on a suite of tasks, or on facts hidden in long texts."""
    values = run.results
    parts = _suites(values) if "suite" in values else _needles(values) if "needle" in values else _files(run)
    return join(*parts, reproduce_section(run))


def _files(run: Run) -> list[Html]:
    values, metric = run.results, run.results["metric"]
    models = values["models"]
    keys = list(models[0]["scores"])
    rows = [(model["model"], *(model["scores"].get(key, "") for key in keys)) for model in models]
    differences = [
        (other["model"], other["difference"], other["low"], other["high"]) for other in values["differences"]
    ]
    sign = -1 if "perplexity" in metric else 1
    best = max(models, key=lambda model: sign * model["scores"][metric])
    sentence = (
        f"{values['task']} on {values['data']}, {models[0]['examples']:,} examples · "
        f"{'' if len(models) == 1 else 'best: '}{best['model']}, {metric} {write_value(best['scores'][metric])} · "
        f"{str(run.facts.get('started', ''))[:10]}"
    )
    bars = {f"{number}: {model['model']}": model["scores"][metric] for number, model in enumerate(models, start=1)}
    chart = [bar_chart(metric.replace("_", " "), bars, metric)] if len(models) > 1 else []
    parts = [
        paragraph(sentence, "verdict"),
        section("Scores", table(["model", *keys], rows), figures(chart)),
        section(
            f"Difference in {metric} from {models[0]['model']}, with 95% intervals",
            table(["model", "difference", "from", "to"], differences),
        ),
    ]
    for number, model in enumerate(models):
        found = prediction_sections(read_json_lines(run.folder / prediction_file(number)))
        title = f"Predictions of {model['model']}"
        parts.append(found if len(models) == 1 else section(title, found, is_folded=True))
    return parts


def prediction_file(number: int) -> str:
    """The file with the predictions of a model, in the order of the command.

    Example:
        >>> prediction_file(0), prediction_file(1)
        ('predictions.jsonl', 'predictions-2.jsonl')
    """
    return PREDICTIONS if number == 0 else PREDICTIONS.replace(".", f"-{number + 1}.")


def _suites(values: dict[str, Any]) -> list[Html]:
    models = values["models"]
    names = [task["task"] for task in models[0]["tasks"]]
    rows = [
        (model["model"], *(task["score"] for task in model["tasks"]), "" if model["mean"] is None else model["mean"])
        for model in models
    ]
    means = [f"{model['model']} {write_value(model['mean'])}" for model in models if model["mean"] is not None]
    charts = [
        bar_chart(model["model"], {task["task"]: task["score"] for task in model["tasks"]}, "score") for model in models
    ]
    details = []
    for model in models:
        for task in model["tasks"]:
            metrics = dict.fromkeys(metric for scores in task["parts"].values() for metric in scores)
            parts = [(part, *(scores.get(m, "") for m in metrics)) for part, scores in task["parts"].items()]
            name = f"{model['model']}: {task['task']}"
            details.append(section(name, table(["part", *metrics], parts), is_folded=True))
    title = f"{values['suite']}" + (f" · mean: {', '.join(means)}" if means else "")
    scores = section("Scores", table(["model", *names, "mean"], rows), figures(charts))
    return [paragraph(title, "verdict"), scores, *details]


def _needles(values: dict[str, Any]) -> list[Html]:
    parts = [paragraph("Facts found in long texts, by length and depth", "verdict")]
    for name, found in values["needle"].items():
        lines = [
            Series(f"depth {depth:g}", found["lengths"], [row[number] for row in found["accuracy"]])
            for number, depth in enumerate(found["depths"])
        ]
        chart = line_chart(f"{name}: facts found", lines, "tokens", marks={"by chance": found["chance"]})
        rows = [(length, *row) for length, row in zip(found["lengths"], found["accuracy"], strict=True)]
        columns = ["length", *(f"depth {depth:g}" for depth in found["depths"])]
        parts.append(section(name, figures([chart], is_wide=True), table(columns, rows)))
    return parts
