"""Interactive charts as Vega-Lite specifications, which a page draws offline and `to_svg` turns into a picture.

All colours are CSS variables, so that a chart follows the light or dark mode of its page without being drawn again.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bertblocks.core.requirements import require_packages

Spec = dict[str, Any]
#: Colours that most colour-blind readers can distinguish (Okabe and Ito, 2008), dark enough for white paper.
LIGHT = ("#0072b2", "#c04e00", "#007a5a", "#a8477c", "#8a6d00", "#3f6fb5", "#555555")
#: The same hues on a dark page.
DARK = ("#56b4e9", "#ff9a4d", "#35c79d", "#e6a0c8", "#f0d442", "#9db8f2", "#bbbbbb")
INK, QUIET, FAINT = "var(--ink)", "var(--quiet)", "var(--faint)"
COLOURS = [f"var(--c{number})" for number in range(len(LIGHT))]
#: A dense line is thinned to the minimum and maximum of each interval, which preserves spikes.
MAX_POINTS = 800
#: Lines with at most this many points show each of them.
DOTTED_POINTS = 60
#: A confusion matrix shows numbers up to this many labels.
MAX_NUMBERED = 12
#: The strongest tint of a cell that keeps its number readable.
MAX_TINT = 0.65
#: A chart as wide as its place in the page.
FILL: Spec = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **{"labelColor": INK, "titleColor": QUIET, "gridColor": FAINT, "domainColor": FAINT, "tickColor": FAINT},
        **{"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 200},
    },
    "legend": {"labelColor": INK, "titleColor": QUIET, "labelFontSize": 12, "orient": "top", "title": None},
    "header": {"labelColor": INK, "titleColor": QUIET},
    "title": {"color": INK, "anchor": "start", "fontSize": 13},
    "text": {"color": INK},
    "range": {"category": COLOURS},
}


@dataclass(frozen=True)
class Series:
    """Named points, sorted by x. A dense series, such as the loss of every step, can be smoothed."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_dense: bool = False


@dataclass(frozen=True)
class Chart:
    """A titled chart. A scrolling one keeps its width on a narrow page; the others fill the width that there is."""

    title: str
    spec: Spec
    #: What the reader can change: the page adds a switch for a logarithmic scale, and a slider for smoothing.
    controls: tuple[str, ...] = ()
    note: str = ""
    is_scrolling: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    x_title: str = "step",
    y_title: str = "",
    marks: Mapping[str, float] | None = None,
    best: tuple[float, float] | None = None,
    y_format: str = "",
    is_log: bool = False,
) -> Chart:
    """Lines over a shared x axis that starts at 0, or on logarithmic axes.

    `marks` are horizontal lines, such as baselines, and `best` is a point to mark.

    Example:
        >>> chart = line_chart("Loss", [Series("training", [0, 1, 2], [3.0, 2.0, 1.5], is_dense=True)])
        >>> len(chart.spec["data"]["values"]), chart.controls
        (3, ('log', 'smooth'))
    """
    values: list[Spec] = [
        {"x": x, "y": y, "series": line.name, "dense": line.is_dense, "dot": len(line.xs) <= DOTTED_POINTS}
        for line in series
        for x, y in _thin(_finite(line))
    ]
    # padding in pixels keeps points at the edge whole
    x_scale = {"type": "log", "nice": False} if is_log else {"zero": True, "nice": False, "padding": 8}
    ticks: Spec = {"values": sorted({row["x"] for row in values})} if is_log else {"tickMinStep": 1}  # whole steps
    x_axis: Spec = {"grid": False, **ticks}
    x = {"field": "x", "type": "quantitative", "title": x_title, "scale": x_scale, "axis": x_axis}
    y_axis = {"tickCount": 6, **({"format": y_format} if y_format else {})}
    y_scale: Spec = {"type": "log", "nice": False} if is_log else {"zero": False, "padding": 6}
    levels = [row["y"] for row in values] + list((marks or {}).values())
    if levels and min(levels) == max(levels):
        y_scale["domain"] = [levels[0] - (abs(levels[0]) or 1) / 20, levels[0] + (abs(levels[0]) or 1) / 20]
    y = {"field": "shown", "type": "quantitative", "title": y_title or None, "scale": y_scale, "axis": y_axis}
    names = [line.name for line in series]
    colour: Spec = {"field": "series", "type": "nominal", "sort": names, "legend": None if len(names) < 2 else {}}
    colour["scale"] = {"domain": names}
    opacity = {"condition": {"param": "toggled", "value": 1}, "value": 0.08}
    tooltip = [
        {"field": "series", "type": "nominal", "title": "line"},
        {"field": "x", "type": "quantitative", "title": x_title, "format": ","},
        {"field": "y", "type": "quantitative", "title": "value", "format": ".5~g"},
    ]
    encoding = {"x": x, "y": y, "color": colour, "opacity": opacity}
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.8, "interpolate": "linear"},
            "encoding": encoding,
            "params": [
                {"name": "toggled", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"},
                {"name": "zoom", "bind": "scales", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}},
            ],
        },
        {
            "mark": {"type": "point", "filled": True, "size": 45},
            "encoding": {
                **encoding,
                "opacity": {"condition": [{"test": "!datum.dot", "value": 0}, opacity["condition"]], "value": 0.08},
                "tooltip": tooltip,
            },
        },
    ]
    if marks:
        layers += _rules(marks)
    if best is not None:
        layers.append(_best(best))
    spec = {
        "description": f"{title}: {', '.join(names)} by {x_title}",
        "data": {"values": values},
        "transform": [
            {"window": [{"op": "mean", "field": "y", "as": "mean"}], "frame": [0, 0], "groupby": ["series"]},
            {"calculate": "datum.dense ? datum.mean : datum.y", "as": "shown"},
        ],
        **FILL,
        "height": 260,
        "layer": layers,
    }
    controls = ("log",) if values and not is_log and all(row["y"] > 0 for row in values) else ()
    return Chart(title, spec, (*controls, "smooth") if any(line.is_dense for line in series) else controls)


def _rules(marks: Mapping[str, float]) -> list[Spec]:
    data = {"values": [{"y": value, "name": name} for name, value in marks.items()]}
    y = {"field": "y", "type": "quantitative"}
    label = {"type": "text", "align": "right", "dy": -6, "x": "width", "color": QUIET, "fontSize": 11}
    return [
        {
            "data": data,
            "mark": {"type": "rule", "strokeDash": [4, 4], "color": QUIET},
            "encoding": {"y": y, "tooltip": [{"field": "name", "type": "nominal"}, {**y, "format": ".4~g"}]},
        },
        {"data": data, "mark": label, "encoding": {"y": y, "text": {"field": "name"}}},
    ]


def _best(point: tuple[float, float]) -> Spec:
    return {
        "data": {"values": [{"x": point[0], "y": point[1]}]},
        "mark": {"type": "point", "shape": "diamond", "size": 220, "color": INK, "strokeWidth": 2},
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "y", "type": "quantitative"},
            "tooltip": [
                {"field": "x", "type": "quantitative", "title": "best checkpoint, step", "format": ","},
                {"field": "y", "type": "quantitative", "title": "score", "format": ".5~g"},
            ],
        },
    }


def bar_chart(
    title: str, bars: Mapping[str, float], x_title: str = "", details: Mapping[str, Mapping[str, Any]] | None = None
) -> Chart:
    """Horizontal bars in the given order; `details` of a bar appear when the pointer is on it.

    Example:
        >>> bar_chart("Speed", {"ours": 3.0, "theirs": 1.0}, "times as fast").spec["data"]["values"][0]
        {'name': 'ours', 'value': 3.0}
    """
    values = [
        {"name": name, "value": value, **(details or {}).get(name, {})}
        for name, value in bars.items()
        if math.isfinite(value)
    ]
    fields = dict.fromkeys(key for row in values for key in row if key not in ("name", "value"))
    tooltip = [
        {"field": "name", "type": "nominal"},
        {"field": "value", "type": "quantitative", "title": x_title or "value", "format": ".4~g"},
        *({"field": _escape_field(field), "type": "nominal", "title": field} for field in fields),
    ]
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}}
    x = {"field": "value", "type": "quantitative", "title": x_title or None, "axis": {"tickCount": 6}}
    spec = {
        "description": f"{title}: {', '.join(bars)}",
        "data": {"values": values},
        **FILL,
        "height": 22 * len(values) + 8,
        "encoding": {"y": y, "x": x},
        "layer": [
            {"mark": {"type": "bar", "color": COLOURS[0], "cornerRadius": 2}, "encoding": {"tooltip": tooltip}},
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11},
                "encoding": {"text": {"field": "value", "format": ".3~g"}},
            },
        ],
    }
    return Chart(title, spec)


def matrix_chart(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """How often each gold label (row) was predicted as each label (column), as counts or shares of the row.

    Labels are sorted by their number of mistakes, so that confusions gather in one corner.

    Example:
        >>> chart = matrix_chart("Confusion", ["cat", "dog"], [[9, 1], [0, 5]])
        >>> [(cell["gold"], cell["predicted"], cell["share"]) for cell in chart.spec["data"]["values"]]
        [('cat', 'cat', 0.9), ('cat', 'dog', 0.1), ('dog', 'dog', 1.0)]
    """
    if len(counts) != len(labels) or any(len(row) != len(labels) for row in counts):
        raise ValueError(f"A confusion matrix of {len(labels)} labels needs {len(labels)} x {len(labels)} counts.")
    mistakes = [sum(row) + sum(line[i] for line in counts) - 2 * row[i] for i, row in enumerate(counts)]
    order = [labels[i] for i in sorted(range(len(labels)), key=lambda i: -mistakes[i])]
    values: list[Spec] = [
        {"gold": labels[i], "predicted": labels[j], "count": count, "share": count / max(sum(row), 1), "right": i == j}
        for i, row in enumerate(counts)
        for j, count in enumerate(row)
        if count
    ]
    step = 44 if len(labels) <= MAX_NUMBERED else 22 if len(labels) <= 30 else 13
    axis: Spec = {"ticks": False, "domain": False, "labelFontSize": 12 if step > 13 else 10, "labelLimit": 150}
    side: Spec = {"type": "nominal", "sort": order, "scale": {"domain": order}}
    y = {**side, "field": "gold", "title": "gold", "axis": axis}
    x = {**side, "field": "predicted", "title": "predicted", "axis": {**axis, "orient": "top", "labelAngle": -90}}
    tooltip = [
        {"field": "gold", "type": "nominal"},
        {"field": "predicted", "type": "nominal"},
        {"field": "count", "type": "quantitative"},
        {"field": "share", "type": "quantitative", "format": ".1%", "title": "of the gold label"},
    ]
    highest = max((cell["count"] for cell in values), default=1)
    # the root makes single mistakes visible among many labels
    tint = f"max(0.2, {MAX_TINT} * sqrt(unit == 'share' ? datum.share : datum.count / {highest}))"
    cells = {
        "mark": {"type": "rect", "cornerRadius": 1},
        "encoding": {
            "color": {
                "field": "right",
                "type": "nominal",
                "scale": {"domain": [True, False], "range": COLOURS[:2]},
                "legend": {"labelExpr": "datum.value ? 'right' : 'wrong'"},
            },
            "opacity": {"field": "tint", "type": "quantitative", "scale": None},
            "tooltip": tooltip,
        },
    }
    numbers = {
        "mark": {"type": "text", "fontSize": 11},
        "encoding": {"text": {"field": "text", "type": "nominal"}},
    }
    spec = {
        "description": f"{title} of {len(labels)} labels",
        "params": [{"name": "unit", "value": "share", "bind": {"input": "radio", "options": ["share", "count"]}}],
        "data": {"values": values},
        "transform": [
            {"calculate": tint, "as": "tint"},
            {"calculate": "unit == 'share' ? format(datum.share, '.0%') : '' + datum.count", "as": "text"},
        ],
        "width": {"step": step},
        "height": {"step": step},
        "encoding": {"x": x, "y": y},
        "layer": [cells, numbers] if len(labels) <= MAX_NUMBERED else [cells],
    }
    note = "Sorted by mistakes. Rows are gold labels, columns predictions; hover over a cell for its numbers."
    return Chart(title, spec, note=note, is_scrolling=True)


def scatter_chart(
    title: str, points: Sequence[Mapping[str, Any]], x: str, y: str, size: str = "", diagonal: bool = False
) -> Chart:
    """Points with named coordinates, optionally of a `size`, over the diagonal where both coordinates agree.

    Example:
        >>> scatter_chart("Calibration", [{"confidence": 0.9, "accuracy": 0.8}], "confidence", "accuracy").title
        'Calibration'
    """
    position: dict[str, Spec] = {
        "x": {"field": _escape_field(x), "type": "quantitative", "title": x, "scale": {"zero": False, "padding": 14}},
        "y": {"field": _escape_field(y), "type": "quantitative", "title": y, "scale": {"zero": False, "padding": 14}},
    }
    encoding: Spec = dict(position)
    if diagonal:
        for side in position.values():
            side["axis"] = {"values": [0, 0.2, 0.4, 0.6, 0.8, 1]}
    if size:
        encoding["size"] = {"field": _escape_field(size), "type": "quantitative", "legend": None}
        encoding["size"]["scale"] = {"range": [40, 500]}
    keys = list(points[0]) if points else []
    encoding["tooltip"] = [
        {"field": _escape_field(key), "title": key, "type": "quantitative", "format": ".4~g"}
        if isinstance(points[0][key], (int, float))
        else {"field": _escape_field(key), "title": key, "type": "nominal"}
        for key in keys
    ]
    zoom = {"name": "zoom", "bind": "scales", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}}
    mark = {"type": "point", "filled": True, "color": COLOURS[0], "opacity": 0.55 if not size else 0.85}
    if not size:
        mark["size"] = 36
    layers: list[Spec] = [{"mark": mark, "encoding": encoding, "params": [zoom]}]
    if diagonal:
        ends = {"values": [{"a": 0, "b": 0}, {"a": 1, "b": 1}]}
        line = {"type": "line", "strokeDash": [4, 4], "color": QUIET}
        at = {"x": {"field": "a", "type": "quantitative"}, "y": {"field": "b", "type": "quantitative"}}
        layers.insert(0, {"data": ends, "mark": line, "encoding": at})
    data = {"values": [dict(point) for point in points]}
    spec = {"description": f"{title}: {y} by {x}", "data": data, **FILL, "height": 260, "layer": layers}
    return Chart(title, spec)


def to_svg(charts: Sequence[Chart], width: int = 860) -> str:
    """Charts below each other as one SVG file, in light and dark mode.

    Example:
        >>> to_svg([bar_chart("Speed", {"ours": 3.0})]).startswith("<svg")
        True
    """
    parts = []
    for chart in charts:
        spec = {key: value for key, value in chart.spec.items() if key != "params"}
        spec.pop("autosize", None)
        parts.append({**spec, "title": chart.title, "width": width - 280, "layer": _still(chart.spec["layer"])})
    # the text is measured in a narrower font than most browsers have
    margin = {"left": 48, "top": 12, "right": 32, "bottom": 12}
    joined = {"vconcat": parts, "resolve": {"scale": {"color": "independent"}}, "config": CONFIG, "padding": margin}
    require_packages(["vl_convert"], "a chart")
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(joined)
    names: dict[str, str] = {}  # the library counts on, but equal charts should be equal files
    svg = re.sub(r"\bclip\d+\b", lambda match: names.setdefault(match[0], f"clip{len(names)}"), svg)
    light, dark = (_variables(palette, ink) for palette, ink in ((LIGHT, "light"), (DARK, "dark")))
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head, end, rest = svg.partition(">")
    return f"{head}{end}{style}{rest}\n"


def _still(layers: Sequence[Spec]) -> list[Spec]:
    """Layers without what only a reader can change."""
    still = []
    for layer in layers:
        encoding = dict(layer.get("encoding", {}))
        opacity = encoding.pop("opacity", {}).get("condition")
        if isinstance(opacity, list):
            encoding["opacity"] = {"condition": opacity[0], "value": 1}
        kept = {key: value for key, value in layer.items() if key not in ("params", "encoding")}
        still.append({**kept, "encoding": encoding})
    return still


INKS = {
    "light": {"ink": "#1c1e21", "quiet": "#5c6370", "faint": "#e3e5e8", "paper": "#ffffff", "panel": "#f6f7f9"},
    "dark": {"ink": "#e4e6eb", "quiet": "#a0a7b4", "faint": "#363b45", "paper": "#15181d", "panel": "#1d2128"},
}


def _variables(palette: Sequence[str], mode: str) -> str:
    names = {**INKS[mode], **{f"c{number}": colour for number, colour in enumerate(palette)}}
    return ";".join(f"--{name}:{colour}" for name, colour in names.items())


def light_variables() -> str:
    """The CSS variables of the light mode."""
    return _variables(LIGHT, "light")


def dark_variables() -> str:
    """The CSS variables of the dark mode."""
    return _variables(DARK, "dark")


class ChartError(ValueError):
    """The library of the charts did not work."""


@cache
def javascript() -> str:
    """Vega-Lite and its drawing code, to be part of a page.

    The library starts a JavaScript engine, which kills its process if address space is short. So it gets its own.
    """
    require_packages(["vl_convert"], "a report")
    code = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    if done.returncode != 0:
        raise ChartError(
            f"vl-convert-python, which draws the charts, ended with {done.returncode}: allow it more memory"
        )
    return done.stdout.decode()


def _finite(series: Series) -> list[tuple[float, float]]:
    points = zip(series.xs, series.ys, strict=True)
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _escape_field(name: str) -> str:
    """A key as Vega reads it; a dot or bracket in a field would lead into a nested object."""
    return name.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[").replace("]", "\\]")
