"""The curves of runs, from their metrics.jsonl; several runs share a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bertblocks.reports.charts import Chart, Series, line_chart
from bertblocks.reports.runs import STEP_KEYS, Run

#: Training values with a chart of their own: title, and format of the axis.
STEP_CHARTS = {
    "learning_rate": ("Learning rate", "~e"),
    "gradient_norm": ("Gradient norm", ""),
    "tokens_per_second": ("Tokens per second", "~s"),
    "packing": ("Share of slots filled with tokens", ""),
    "memory": ("Peak memory, bytes", "~s"),
}


def learning_curve(runs: Sequence[Run]) -> list[Chart]:
    """The main score by step, from the untrained model on, with baselines and the best checkpoint of a single run."""
    metric = runs[0].metric
    series = [_series(run.evaluations, metric, run.name) for run in runs]
    series = [line for line in series if line.xs]
    if not series:
        return []
    name = metric.replace("_", " ")
    if len(runs) > 1:
        return [line_chart(f"{name.capitalize()} on the evaluation examples", series)]
    line = series[0]
    choose = min if runs[0].lower_is_better else max
    recorded = runs[0].results.get("chosen", {}).get("best_step")
    best = next(((x, y) for x, y in zip(line.xs, line.ys, strict=True) if x == recorded), None)
    if best is None and len(line.xs) > 1:
        best = choose(zip(line.xs, line.ys, strict=True), key=lambda point: point[1])
    marks = {key: scores[metric] for key, scores in runs[0].results.get("baselines", {}).items() if metric in scores}
    if runs[0].kind == "pretrain" and "unigram_loss" in runs[0].results.get("metrics", {}):
        marks["unigram"] = runs[0].results["metrics"]["unigram_loss"]
    chart = line_chart(f"{name.capitalize()} from step 0", [line], marks=marks, best=best)
    note = "The diamond marks the best checkpoint" + ("; dashed lines are baselines." if marks else ".")
    return [replace(chart, note=note if best else "")]


def loss_curve(runs: Sequence[Run]) -> list[Chart]:
    """The training loss and its parts."""
    keys = dict.fromkeys(key for run in runs for line in run.steps for key in line if key.startswith("loss"))
    series = []
    for run in runs:
        for key in keys:
            name = key.replace("_", " ") if len(runs) == 1 else run.name if len(keys) == 1 else f"{run.name}, {key}"
            series.append(_series(run.steps, key, "training" if name == "loss" else name, is_dense=True))
    series = [line for line in series if line.xs]
    return [line_chart("Training loss", series)] if series else []


def score_curves(runs: Sequence[Run]) -> list[Chart]:
    """All other scores of the evaluations: in one chart for a single run, in one each for several."""
    names = dict.fromkeys(
        key
        for run in runs
        for line in run.evaluations
        for key, value in line.items()
        if key not in STEP_KEYS and key != runs[0].metric and isinstance(value, (int, float))
    )
    groups = {"Other scores": [n for n in names if "loss" not in n], "Other losses": [n for n in names if "loss" in n]}
    if len(runs) > 1:
        groups = {name.replace("_", " ").capitalize(): [name] for name in names}
    charts = []
    for title, keys in groups.items():
        series = [
            _series(run.evaluations, key, key.replace("_", " ") if len(runs) == 1 else run.name)
            for key in keys
            for run in runs
        ]
        series = [line for line in series if line.xs]
        if series:
            charts.append(line_chart(title, series))
    return charts


def step_curves(runs: Sequence[Run]) -> list[Chart]:
    """Learning rate, gradient norm, speed, packing, memory, and whatever else the steps recorded."""
    known = {*STEP_CHARTS, *STEP_KEYS}
    keys = dict.fromkeys(key for run in runs for line in run.steps for key in line if not key.startswith("loss"))
    others = {key: (key.replace("_", " ").capitalize(), "") for key in keys if key not in known}
    charts = []
    for key, (title, form) in {**STEP_CHARTS, **others}.items():
        series = [_series(run.steps, key, run.name, is_dense=True) for run in runs]
        series = [line for line in series if line.xs]
        if series:
            charts.append(line_chart(title, series, y_format=form))
    return charts


def _series(lines: Sequence[dict], key: str, name: str, is_dense: bool = False) -> Series:
    points = [line for line in lines if isinstance(line.get(key), (int, float))]
    return Series(name, [line["step"] for line in points], [line[key] for line in points], is_dense)
