"""The charts of a study, as Vega-Lite specifications in the style of all reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertblocks.reports.charts import COLOURS, FILL, QUIET, Chart, Spec

#: The colours of verdicts.
VERDICT_COLOURS = {"better": COLOURS[2], "worse": COLOURS[1], "undecided": QUIET}
#: Learning rates and FLOPs span orders of magnitude.
SCIENTIFIC = ".2~e"
LOG_AXIS: Spec = {"format": SCIENTIFIC, "tickCount": 6, "labelOverlap": "greedy", "labelSeparation": 8}
ZOOM: Spec = {"name": "zoom", "bind": "scales", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}}
TOGGLE: Spec = {"name": "toggled", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}


@dataclass(frozen=True)
class Effect:
    """A row of a forest plot: a difference, its 95% interval and the wider one of the test, and those of the seeds."""

    name: str
    verdict: str
    value: float
    interval: tuple[float, float]
    tested: tuple[float, float]
    by_seed: Sequence[float]


def forest_chart(title: str, effects: Sequence[Effect], x_title: str, lower_is_better: bool, note: str) -> Chart:
    """Differences from the baseline with intervals, below each other, and the line where there is no difference."""
    rows = [_effect_row(effect) for effect in effects if math.isfinite(effect.value)]
    seeds = [{"name": effect.name, "seed": value} for effect in effects for value in effect.by_seed]
    shown = [0.0, *(row[key] for row in rows for key in ("value", "low", "high") if row[key] is not None)]
    shown += [effect for row in effects for effect in row.by_seed]
    span = max(shown) - min(shown) or 1.0
    tested = [row[key] for row in rows for key in ("tested_low", "tested_high") if row[key] is not None]
    low, high = min([min(shown), *tested]), max([max(shown), *tested])  # long lines are cut
    left, right = max(low, min(shown) - span / 2) - span / 20, min(high, max(shown) + span / 2) + span / 20
    names = [row["name"] for row in rows]
    y: Spec = {"field": "name", "type": "nominal", "sort": names, "scale": {"domain": names}, "title": None}
    y["axis"] = {"ticks": False, "domain": False, "grid": True}
    domain = {"domain": [left, right], "nice": False}
    x: Spec = {"type": "quantitative", "title": x_title, "scale": domain, "axis": {"tickCount": 7}}
    colour: Spec = {"field": "verdict", "type": "nominal", "legend": {}}
    colour["scale"] = {"domain": list(VERDICT_COLOURS), "range": list(VERDICT_COLOURS.values())}
    tooltip = [
        {"field": "name", "type": "nominal", "title": "variant"},
        {"field": "verdict", "type": "nominal"},
        *(
            {"field": field, "type": "quantitative", "title": name, "format": ".4~g"}
            for field, name in (
                ("value", "difference"),
                ("low", "95% from"),
                ("high", "to"),
                ("tested_low", "test from"),
                ("tested_high", "to "),
            )
        ),
    ]

    def bar(low: str, high: str, width: float) -> Spec:
        return {
            "mark": {"type": "rule", "strokeWidth": width, "strokeCap": "round", "clip": True},
            "encoding": {
                "x": {**x, "field": low},
                "x2": {"field": high},
                "y": y,
                "color": colour,
                "tooltip": tooltip,
            },
        }

    better, worse = ("\u2190 better", "worse \u2192") if lower_is_better else ("better \u2192", "\u2190 worse")
    sides = (better, worse) if lower_is_better else (worse, better)
    spec = {
        "description": f"{title}: {', '.join(names)}",
        "data": {"values": rows},
        **FILL,
        "height": 40 * len(rows) + 16,
        "layer": [
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "strokeDash": [4, 4], "color": QUIET},
                "encoding": {"x": {**x, "datum": 0}},
            },
            bar("tested_low", "tested_high", 1.3),
            bar("low", "high", 5),
            {
                "data": {"values": seeds},
                "mark": {"type": "tick", "thickness": 1.5, "size": 16, "yOffset": 0, "color": QUIET, "opacity": 0.75},
                "encoding": {"x": {**x, "field": "seed"}, "y": y},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1, "stroke": "var(--paper)"},
                "encoding": {"x": {**x, "field": "value"}, "y": y, "color": colour, "tooltip": tooltip},
            },
            *(
                {
                    "data": {"values": [{}]},
                    "mark": {"type": "text", "align": align, "baseline": "bottom", "color": QUIET, "text": text},
                    "encoding": {"x": {"value": place}, "y": {"value": -3}},
                }
                for align, text, place in (("left", sides[0], 0), ("right", sides[1], {"expr": "width"}))
            ),
        ],
    }
    return Chart(title, spec, note=note)


def _effect_row(effect: Effect) -> dict[str, Any]:
    ends = {
        "low": effect.interval[0],
        "high": effect.interval[1],
        "tested_low": effect.tested[0],
        "tested_high": effect.tested[1],
    }
    finite = {key: value if math.isfinite(value) else None for key, value in ends.items()}
    return {"name": effect.name, "verdict": effect.verdict, "value": effect.value, **finite}


@dataclass(frozen=True)
class Band:
    """A line with a range around it. Lines of the same series have the same colour."""

    series: str
    #: (x, y, low, high)
    points: Sequence[tuple[float, float, float, float]]
    label: str = ""
    #: What x counts, if the reader can choose it.
    axis: str = ""


def band_chart(
    title: str,
    bands: Sequence[Band],
    variants: Sequence[str],
    x_title: str,
    y_title: str,
    dots: Sequence[tuple[str, float, float]] = (),
    has_marks: bool = True,
    zero_line: bool = False,
    note: str = "",
) -> Chart:
    """Lines over a logarithmic x axis with ranges around them, and single (series, x, y) dots.

    If bands have several axes, the reader chooses which of them to see.
    """
    axes = list(dict.fromkeys(band.axis for band in bands))
    rows = [
        {
            **{"series": band.series, "line": band.label or band.series, "axis": band.axis},
            **{"x": x, "y": y, "low": low, "high": high},
        }
        for band in bands
        for x, y, low, high in band.points
        if math.isfinite(y)
    ]
    single = [{"series": name, "x": x, "y": y} for name, x, y in dots if math.isfinite(y)]
    names = list(dict.fromkeys(str(row["series"]) for row in [*rows, *single]))
    x = {"field": "x", "type": "quantitative", "title": x_title, "scale": {"type": "log", "nice": False, "padding": 10}}
    x["axis"] = {**LOG_AXIS, "grid": False}
    y = {"type": "quantitative", "title": y_title, "scale": {"zero": False, "padding": 6}, "axis": {"tickCount": 6}}
    colour = _colour(variants, names)
    faded = {"condition": {"param": "toggled", "value": 1}, "value": 0.08}
    tooltip = [
        {"field": "line", "type": "nominal", "title": "variant"},
        {"field": "x", "type": "quantitative", "title": x_title, "format": SCIENTIFIC},
        *(
            {"field": field, "type": "quantitative", "title": name, "format": ".4~g"}
            for field, name in (("y", y_title), ("low", "from"), ("high", "to"))
        ),
    ]
    line = {"x": x, "color": colour, "detail": {"field": "line"}}
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.8},
            "encoding": {**line, "y": {**y, "field": "y"}, "opacity": faded},
            "params": [TOGGLE, ZOOM],
        },
        {
            "mark": {"type": "area"},
            "encoding": {
                **line,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
                "opacity": {"condition": {"param": "toggled", "value": 0.16}, "value": 0.02},
            },
        },
    ]
    if has_marks:
        mark = {"type": "point", "filled": True, "size": 40}
        encoding = {"x": x, "y": {**y, "field": "y"}, "color": colour, "opacity": faded, "tooltip": tooltip}
        layers.append({"mark": mark, "encoding": encoding})
    if single:
        mark = {"type": "point", "filled": True, "size": 34}
        at = {"x": x, "y": {**y, "field": "y"}, "color": colour, "opacity": faded, "tooltip": tooltip[1:3]}
        layers.append({"data": {"values": single}, "mark": mark, "encoding": at})
    if zero_line:
        rule = {"type": "rule", "strokeDash": [4, 4], "color": QUIET}
        layers.append({"data": {"values": [{}]}, "mark": rule, "encoding": {"y": {**y, "datum": 0}}})
    description = f"{title}: {', '.join(names)} by {x_title}"
    spec = {"description": description, "data": {"values": rows}, **FILL, "height": 300, "layer": layers}
    if len(axes) > 1:
        spec["params"] = [{"name": "axis", "value": axes[0], "bind": {"input": "radio", "options": axes, "name": "by"}}]
        spec["transform"] = [{"filter": "datum.axis === axis"}]
    return Chart(title, spec, note=note)


@dataclass(frozen=True)
class Point:
    """A variant in the plane of speed and quality, with the ranges of its seeds."""

    name: str
    x: tuple[float, float, float]
    y: tuple[float, float, float]
    on_front: bool


def pareto_chart(
    title: str,
    points: Sequence[Point],
    variants: Sequence[str],
    x_title: str,
    y_title: str,
    lower_is_better: bool,
    note: str = "",
) -> Chart:
    """Variants by speed and quality; a line connects those that no other variant beats in both."""
    rows = [
        {
            "series": point.name,
            **dict(zip(("x", "x_low", "x_high"), point.x, strict=True)),
            **dict(zip(("y", "y_low", "y_high"), point.y, strict=True)),
            "front": point.on_front,
        }
        for point in points
    ]
    names = [point.name for point in points]
    x: Spec = {"type": "quantitative", "title": x_title, "scale": {"zero": False, "padding": 40}}
    x["axis"] = {"format": "~s", "tickCount": 6, "grid": False, "labelOverlap": "greedy", "labelSeparation": 8}
    y: Spec = {"type": "quantitative", "title": y_title, "axis": {"tickCount": 6}}
    y["scale"] = {"zero": False, "padding": 24, "reverse": lower_is_better}
    colour = {**_colour(variants, names), "legend": None}
    tooltip = [
        {"field": "series", "type": "nominal", "title": "variant"},
        *(
            {"field": field, "type": "quantitative", "title": name, "format": form}
            for field, name, form in (("x", x_title, ",.0f"), ("y", y_title, ".4~g"))
        ),
    ]
    at = {"x": {**x, "field": "x"}, "y": {**y, "field": "y"}}
    front = {"filter": "datum.front"}
    range_mark = {"type": "rule", "strokeWidth": 1.3, "opacity": 0.6}
    spec = {
        "description": f"{title}: {', '.join(names)}",
        "data": {"values": rows},
        **FILL,
        "height": 300,
        "layer": [
            {
                "transform": [front],
                "mark": {"type": "line", "strokeDash": [4, 4], "color": QUIET, "strokeWidth": 1.3},
                "encoding": {**at, "order": {"field": "x"}},
            },
            {
                "mark": range_mark,
                "encoding": {
                    "x": {**x, "field": "x_low"},
                    "x2": {"field": "x_high"},
                    "y": {**y, "field": "y"},
                    "color": colour,
                },
            },
            {
                "mark": range_mark,
                "encoding": {
                    "x": {**x, "field": "x"},
                    "y": {**y, "field": "y_low"},
                    "y2": {"field": "y_high"},
                    "color": colour,
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
                "encoding": {**at, "color": colour, "tooltip": tooltip},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 8, "dy": -9, "fontSize": 12},
                "encoding": {**at, "text": {"field": "series"}},
            },
        ],
    }
    return Chart(title, spec, note=note)


def pareto_front(points: Mapping[str, tuple[float, float]], lower_is_better: bool) -> list[str]:
    """The names of (speed, quality) points that no other point equals or beats in both, and beats in one.

    Example:
        >>> pareto_front({"a": (1.0, 3.0), "b": (2.0, 3.1), "c": (1.5, 3.2)}, lower_is_better=True)
        ['a', 'b']
    """
    sign = -1 if lower_is_better else 1

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        speed, quality = one[0] - other[0], sign * (one[1] - other[1])
        return speed >= 0 and quality >= 0 and (speed > 0 or quality > 0)

    return [name for name, at in points.items() if not any(beats(other, at) for other in points.values())]


def rate_chart(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    points: Mapping[str, Sequence[tuple[float, float]]],
    variants: Sequence[str],
    chosen: Mapping[str, tuple[float, float, float | None, float | None]],
    note: str,
) -> Chart:
    """Losses over learning rates with the parabola of each variant.

    `chosen` has the rate, its loss, and the interval of the best rate.
    """
    names = list(points)
    x: Spec = {"field": "x", "type": "quantitative", "title": "learning rate"}
    x["scale"] = {"type": "log", "nice": False, "padding": 14}
    x["axis"] = {**LOG_AXIS, "grid": False}
    y: Spec = {"field": "y", "type": "quantitative", "title": "loss of short runs", "axis": {"tickCount": 6}}
    y["scale"] = {"zero": False, "padding": 12}
    colour = _colour(variants, names)
    faded = {"condition": {"param": "toggled", "value": 1}, "value": 0.08}
    tooltip = [
        {"field": "series", "type": "nominal", "title": "variant"},
        {"field": "x", "type": "quantitative", "title": "learning rate", "format": SCIENTIFIC},
        {"field": "y", "type": "quantitative", "title": "loss", "format": ".4~g"},
    ]
    base = {"x": x, "y": y, "color": colour, "opacity": faded}
    ends = [
        {"series": name, "x": rate, "y": loss, "low": low, "high": high}
        for name, (rate, loss, low, high) in chosen.items()
    ]
    bounded = [row for row in ends if row["low"] is not None and row["high"] is not None]
    intervals = {
        "data": {"values": bounded},
        "mark": {"type": "rule", "strokeWidth": 5, "strokeCap": "round", "opacity": 0.35, "clip": True},
        "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": colour},
    }
    spec = {
        "description": f"{title}: {', '.join(names)}",
        "data": {"values": _pairs(curves)},
        **FILL,
        "height": 300,
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": base, "params": [TOGGLE, ZOOM]},
            {
                "data": {"values": _pairs(points)},
                "mark": {"type": "point", "filled": True, "size": 45},
                "encoding": {**base, "tooltip": tooltip},
            },
            *([intervals] if bounded else []),
            {
                "data": {"values": ends},
                "mark": {"type": "point", "shape": "diamond", "size": 190, "strokeWidth": 2},
                "encoding": {**base, "tooltip": tooltip},
            },
        ],
    }
    return Chart(title, spec, note=note)


def _colour(variants: Sequence[str], names: Sequence[str]) -> Spec:
    """The colour of a variant, the same in all charts, with a legend of those that a chart shows."""
    legend = {"values": list(names)} if len(names) > 1 else None
    scale = {"domain": list(variants)}
    return {"field": "series", "type": "nominal", "sort": list(variants), "scale": scale, "legend": legend}


def _pairs(groups: Mapping[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    return [{"series": name, "x": x, "y": y} for name, points in groups.items() for x, y in points if math.isfinite(y)]
