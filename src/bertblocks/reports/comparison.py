"""Pages of several runs: their scores, the settings in which they differ, and their curves in shared charts."""

from __future__ import annotations

from collections.abc import Sequence

from bertblocks.reports.charts import bar_chart
from bertblocks.reports.curves import learning_curve, loss_curve, score_curves, step_curves
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, write_value
from bertblocks.reports.reproduce import reproduce
from bertblocks.reports.runs import Run, differing_settings


def comparison_page(runs: Sequence[Run]) -> Html:
    """Runs next to each other. Scores share a chart only if the runs have the same metric."""
    has_one_metric = len({run.metric for run in runs}) == 1
    scored = [run for run in runs if run.score is not None]
    differing = differing_settings(runs)
    names = [run.name for run in runs]
    all_scores = {run.name: run.results.get("scores") or run.results.get("metrics") or {} for run in runs}
    keys = dict.fromkeys(key for scores in all_scores.values() for key in scores)
    charts = []
    if has_one_metric and scored:
        details = {run.name: {"95%": _write_interval(run), "state": run.state} for run in scored}
        bars = {run.name: run.score or 0.0 for run in scored}
        charts = [bar_chart(f"Best {runs[0].metric.replace('_', ' ')}", bars, runs[0].metric, details)]
        charts += learning_curve(runs)
    return join(
        paragraph(verdict(runs), "verdict"),
        section(
            "Runs",
            table(
                ["run", "task", "metric", "score", "95% interval", "tokens/s", "parameters", "state"],
                [
                    (
                        run.name,
                        run.task,
                        run.metric,
                        run.score,
                        _write_interval(run),
                        None if run.speed is None else round(run.speed),
                        run.facts.get("parameters"),
                        run.state,
                    )
                    for run in runs
                ],
            ),
        ),
        section(
            "Settings that differ", table(["setting", *names], [(k, *map(_write, v)) for k, v in differing.items()])
        ),
        section("Learning curves", figures([*charts, *loss_curve(runs)], has_hint=True)),
        section(
            "All scores",
            table(["score", *names], [(key, *(all_scores[name].get(key, "") for name in names)) for key in keys]),
        ),
        section("Other curves", figures([*score_curves(runs), *step_curves(runs)])),
        *(section(f"Reproduce {run.name}", *reproduce(run.facts), is_folded=True) for run in runs),
    )


def verdict(runs: Sequence[Run]) -> str:
    """Which run is the best, if they can be compared."""
    scored = [run for run in runs if run.score is not None]
    if len({run.metric for run in runs}) > 1 or not scored:
        return f"{len(runs)} runs of different kinds"
    sign = -1 if scored[0].lower_is_better else 1
    best = max(scored, key=lambda run: sign * (run.score or 0.0))
    rest = [run for run in scored if run is not best]
    others = ", ".join(f"{run.name} {write_value(run.score)}" for run in rest[:5])
    return f"{best.name} is best: {best.metric} {write_value(best.score)}" + (f" against {others}" if others else "")


def _write_interval(run: Run) -> str:
    return "" if run.interval is None else " to ".join(map(write_value, run.interval))


def _write(value: object) -> str:
    return "" if value is None else str(value)
