"""The parts of a study's page that have compute or learning rates on their axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertblocks.core.console import write_seconds
from bertblocks.lab.report_charts import Band, Point, band_chart, pareto_chart, pareto_front, rate_chart
from bertblocks.lab.report_tables import Row
from bertblocks.lab.results import CurvePoint, LearningRateSearch, StudyResults, TrialRecord
from bertblocks.lab.statistics.learning_rate import LearningRateFit, fit_learning_rate
from bertblocks.lab.statistics.scaling import PowerLaw, difference_trend, fit_power_law
from bertblocks.lab.statistics.verdicts import Comparison, references
from bertblocks.reports.charts import Chart
from bertblocks.reports.page import Html, figures, paragraph, section, table, write_value

FLOPS = "training compute, FLOPs"


def label(measure: str) -> str:
    """The name of a measure or a column as people write it.

    Example:
        >>> label("held_out_loss")
        'held-out loss'
    """
    return measure.replace("held_out", "held-out").replace("_", " ")


def compute_charts(results: StudyResults) -> list[Chart]:
    """The held-out loss during training by compute, tokens or time so far: means of seeds, with their range."""
    groups: dict[tuple[str, str | None], dict[int, list[CurvePoint]]] = {}
    for trial in results.trials:
        steps = groups.setdefault((trial.variant, trial.size), {})
        for point in trial.curve:
            steps.setdefault(point.step, []).append(point)
    bands = [
        Band(variant, _curve(steps, field), variant if size is None else f"{variant} at {size}", name)
        for name, field in {"FLOPs": "flops", "tokens": "tokens", "seconds": "seconds"}.items()
        for (variant, size), steps in groups.items()
    ]
    if not any(band.points for band in bands):
        return []
    note = "Means of the seeds during training, with the range of the seeds. Learning rates fall towards the end."
    title, x_title = "Held-out loss against compute", "training so far"
    return [band_chart(title, bands, list(results.variants), x_title, "held-out loss", note=note)]


def _curve(steps: Mapping[int, Sequence[CurvePoint]], field: str) -> list[tuple[float, float, float, float]]:
    """The mean loss over what `field` counts, with the lowest and the highest of the seeds."""
    points = []
    for _, found in sorted(steps.items()):
        x, losses = float(np.mean([getattr(point, field) for point in found])), [point.loss for point in found]
        if x > 0:
            points.append((x, float(np.mean(losses)), min(losses), max(losses)))
    return points


def pareto_charts(results: StudyResults) -> list[Chart]:
    """Quality against speed, with the variants that no other one beats in both."""
    deciding = next(iter(results.measures))
    info = results.measures[deciding]
    speeds = [name for name, other in results.measures.items() if "per second" in other.unit or "/s" in other.unit]
    measured: dict[str, dict[tuple[str, str | None], list[float]]] = {}
    for found in results.measurements:
        if math.isfinite(found.value):
            measured.setdefault(found.measure, {}).setdefault((found.variant, found.size), []).append(found.value)
    speed = measured.get(speeds[0], {}) if speeds else _training_speed(results.trials)
    title = f"{label(speeds[0])}, {results.measures[speeds[0]].unit}" if speeds else "training, tokens per second"
    quality = measured.get(deciding, {})
    size = next(reversed(_compute_by_size(results)), None)  # the largest
    keys = [key for key in quality if key in speed and key[1] == size]
    if len(keys) < 2:
        return []
    at = {key[0]: (float(np.mean(speed[key])), float(np.mean(quality[key]))) for key in keys}
    front = pareto_front(at, not info.higher_is_better)
    points = [Point(key[0], _span(speed[key]), _span(quality[key]), key[0] in front) for key in keys]
    shown = ", ".join(front) + (f" (at {size})" if size else "")
    note = (
        "Means of the seeds, with the range of the seeds. No other variant has a mean that is better in both for those "
        "on the dashed line; close means may change places with other seeds. Speed on the machine of the study."
    )
    y_title = f"{label(deciding)}, {info.unit}"
    statement = f"By their means, fastest {'or' if len(front) > 1 else 'and'} best: {shown}"
    return [pareto_chart(statement, points, list(results.variants), title, y_title, not info.higher_is_better, note)]


def _training_speed(trials: Sequence[TrialRecord]) -> dict[tuple[str, str | None], list[float]]:
    speeds: dict[tuple[str, str | None], list[float]] = {}
    for trial in trials:
        if trial.seconds > 0:
            speeds.setdefault((trial.variant, trial.size), []).append(trial.tokens / trial.seconds)
    return speeds


def _span(values: Sequence[float]) -> tuple[float, float, float]:
    return float(np.mean(values)), min(values), max(values)


def scaling_section(results: StudyResults, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> Html:
    """How the deciding measure and the differences move with compute, in a study of several sizes."""
    deciding = next(iter(results.measures))
    info = results.measures[deciding]
    compute = _compute_by_size(results)
    if len(compute) < 2:
        return Html("")
    bands = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = [
            (compute[row["size"]], row["difference"], row["low"], row["high"])
            for row in rows
            if row["variant"] == variant and row["measure"] == deciding and None not in (row["low"], row["high"])
        ]
        bands.append(Band(variant, sorted(points)))
    trends = trend_rows(results, comparisons)
    fits = power_laws(results) if not info.higher_is_better else {}
    charts = [
        band_chart(
            "The difference at each size",
            bands,
            list(results.variants),
            FLOPS,
            f"difference in {label(deciding)}",
            zero_line=True,
            note="Bands are 95% intervals of each size alone.",
        ),
        *_law_charts(results, compute, fits),
    ]
    columns = ["variant", f"slope, {info.unit} per tenfold compute", "95% from", "to", "the difference"]
    laws = [(name, fit.exponent, *fit.exponent_interval, fit.floor, *fit.floor_interval) for name, fit in fits.items()]
    return section(
        "How differences move with compute",
        figures(charts),
        table(columns, [(row["variant"], row["slope"], row["low"], row["high"], row["reading"]) for row in trends]),
        table(["variant", "exponent", "95% from", "to", "floor", "95% from", "to"], laws),
        paragraph(
            "A slope says how the difference changed over the sizes that ran, not what happens beyond them. "
            "Intervals of slopes are not corrected for the number of variants."
            + (" Power laws: loss = floor + factor / compute ^ exponent, fitted robustly." if fits else ""),
            "quiet",
        ),
    )


def _compute_by_size(results: StudyResults) -> dict[str | None, float]:
    """The mean compute of the baseline's trials, by size."""
    flops: dict[str | None, list[float]] = {}
    for trial in results.trials:
        if trial.variant == results.baseline:
            flops.setdefault(trial.size, []).append(trial.flops)
    return {size: float(np.mean(values)) for size, values in sorted(flops.items(), key=lambda item: np.mean(item[1]))}


def trend_rows(results: StudyResults, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """By how much each variant's difference in the deciding measure changes per tenfold compute."""
    deciding = next(iter(results.measures))
    compute = _compute_by_size(results)
    pairs = references(results)
    values = {
        (found.variant, found.size, found.seed): found.value
        for found in results.measurements
        if found.measure == deciding and math.isfinite(found.value)
    }
    rows = []
    for variant in dict.fromkeys(comparison.variant for comparison in comparisons):
        by_seed: dict[int, dict[float, float]] = {}
        for (name, size, seed), value in values.items():
            base = values.get((pairs[variant], size, seed))
            if name == variant and base is not None and size in compute:
                by_seed.setdefault(seed, {})[compute[size]] = value - base
        trend = difference_trend(by_seed)
        if trend is None or not trend.components:
            continue
        low, high = trend.interval()
        middle = float(np.mean([d for points in by_seed.values() for d in points.values()]))
        is_shrinking = (middle > 0) != (trend.value > 0)
        reading = "no clear change" if low <= 0 <= high else "shrinks" if is_shrinking else "grows"
        rows.append({"variant": variant, "slope": trend.value, "low": low, "high": high, "reading": reading})
    return rows


def power_laws(results: StudyResults) -> dict[str, PowerLaw]:
    """A power law of the deciding measure over compute for each variant with enough sizes."""
    deciding = next(iter(results.measures))
    flops = {(trial.variant, trial.size, trial.seed): trial.flops for trial in results.trials}
    points: dict[str, list[tuple[float, float]]] = {}
    for found in results.measurements:
        at = flops.get((found.variant, found.size, found.seed))
        if found.measure == deciding and at and math.isfinite(found.value):
            points.setdefault(found.variant, []).append((at, found.value))
    fits = {name: fit_power_law([x for x, _ in pairs], [y for _, y in pairs]) for name, pairs in points.items()}
    return {name: fit for name, fit in fits.items() if fit is not None}


def _law_charts(results: StudyResults, compute: dict[str | None, float], fits: dict[str, PowerLaw]) -> list[Chart]:
    if not fits:
        return []
    deciding = next(iter(results.measures))
    flops = {(trial.variant, trial.size, trial.seed): trial.flops for trial in results.trials}
    dots = [
        (found.variant, flops[found.variant, found.size, found.seed], found.value)
        for found in results.measurements
        if found.measure == deciding and found.variant in fits
    ]
    places = np.geomspace(min(compute.values()), max(compute.values()), 40).tolist()
    bands = [Band(name, [(x, fit.loss(x), *fit.loss_interval(x)) for x in places]) for name, fit in fits.items()]
    note = "Points are trials, lines power laws, bands their 95% intervals."
    title = f"Power laws of {label(deciding)} over compute"
    return [band_chart(title, bands, list(results.variants), FLOPS, label(deciding), dots, has_marks=False, note=note)]


def rate_section(results: StudyResults) -> Html:
    """The searches for learning rates: losses, parabolas, and the rates that were chosen."""
    if not results.searches:
        return Html("")
    fits = [(search, _fit(search)) for search in results.searches]
    charts = []
    for size in dict.fromkeys(search.size for search in results.searches):
        group = [(search, fit) for search, fit in fits if search.size == size]
        curves, points, chosen = {}, {}, {}
        for search, fit in group:
            points[search.variant] = [point for point in search.points if math.isfinite(point[1])]
            if not points[search.variant]:
                continue
            loss = min(points[search.variant], key=lambda point: abs(math.log(point[0] / search.chosen)))[1]
            if fit is not None and fit.coefficients is not None:
                rates = [rate for rate, _ in points[search.variant]]
                places = np.geomspace(min(rates), max(rates), 50).tolist()
                curves[search.variant] = [(rate, fit.loss(rate)) for rate in places]
                loss = fit.loss(search.chosen)
            chosen[search.variant] = (search.chosen, loss, search.low, search.high)
        title = "Learning rates" if size is None else f"Learning rates at {size}"
        note = "Diamonds are the rates that were used; thick lines are 95% intervals of the best rate."
        charts.append(rate_chart(title, curves, points, list(results.variants), chosen, note))
    counts = {len(search.points) for search in results.searches}
    cost = f"{counts.pop()} short runs" if len(counts) == 1 else f"{min(counts)} to {max(counts)} short runs"
    width = (results.settings.get("search") or {}).get("width")
    where = f", at hidden size {width}; they transfer by muP" if width else ""
    rows = [
        (
            search.variant if search.size is None else f"{search.variant} at {search.size}",
            search.chosen,
            "" if search.low is None or search.high is None else f"{search.low:.3g} to {search.high:.3g}",
            len(search.points),
            fit.remark if fit else "no short run had a finite loss",
        )
        for search, fit in fits
    ]
    return section(
        "Learning rates",
        paragraph(f"Each variant has its own learning rate, from {cost} per variant{where}."),
        figures(charts),
        table(["variant", "chosen", "95% interval of the best", "short runs", "remark"], rows),
    )


def _fit(search: LearningRateSearch) -> LearningRateFit | None:
    return fit_learning_rate(search.points) if any(math.isfinite(loss) for _, loss in search.points) else None


def key_rows(results: StudyResults) -> tuple[list[str], list[list[Any]]]:
    """The keys in which variants differ, one column for each, with what each variant costs."""
    keys = list(dict.fromkeys(key for changes in results.variants.values() for key in changes))
    rows = []
    for name, changes in results.variants.items():
        trials = [trial for trial in results.trials if trial.variant == name]
        rows.append(
            [
                f"{name} (baseline)" if name == results.baseline else name,
                *("" if key not in changes else write_value(changes[key]) for key in keys),
                *(
                    _range([getattr(trial, field) for trial in trials])
                    for field in ("parameters", "steps", "tokens", "flops", "seconds")
                ),
            ]
        )
    return ["variant", *keys, "parameters", "steps", "tokens", "FLOPs", "seconds"], rows


def _range(values: Sequence[float]) -> Any:
    if not values:
        return ""
    low, high = (write_value(float(value)) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def cost_tiles(results: StudyResults) -> dict[str, Any]:
    return {
        "variants": len(results.variants),
        "finished trials": len(results.trials),
        "missing trials": len(results.missing) or None,
        "training FLOPs": f"{sum(trial.flops for trial in results.trials):.3g}",
        "training time, all trials": write_seconds(sum(trial.seconds for trial in results.trials)),
    }
