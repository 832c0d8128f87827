"""Small SVG charts without a plotting library: lines, bars and heat maps, readable in light and dark mode.

Every chart is a self-contained string for an HTML page or a file. Text is escaped, and non-finite numbers leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Colours that most colour-blind readers can distinguish (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLE = (
    "<style>"
    ".chart{font:12px system-ui,sans-serif;--ink:#222;--faint:#ddd;--first:#0072b2}"
    "@media(prefers-color-scheme:dark){.chart{--ink:#ddd;--faint:#444;--first:#56b4e9}}"
    ".chart text{fill:var(--ink)}.chart .grid{stroke:var(--faint)}.chart .name{font-weight:600}"
    "</style>"
)
#: A line with more points is thinned to the minimum and maximum of each interval, which preserves spikes.
MAX_POINTS = 800
#: The strongest tint of a heat map that keeps its numbers readable.
MAX_TINT = 0.65
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 64, 16, 34, 40
BAR_HEIGHT, CELL_HEIGHT, CELL_WIDTH = 18, 26, 64


@dataclass(frozen=True)
class Series:
    """Named points, sorted by x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def line_chart(
    title: str, series: Sequence[Series], x_label: str = "", log_y: bool = False, width: int = 640, height: int = 260
) -> str:
    """Lines over a shared x axis, with a legend if there are several.

    Example:
        >>> chart = line_chart("loss", [Series("training", [0, 1, 2], [3.0, 2.0, 1.5])], "step")
        >>> chart.startswith("<svg"), chart.count("<polyline")
        (True, 1)
    """
    lines = [_finite(line, log_y) for line in series]
    xs = [x for points in lines for x, _ in points]
    ys = [math.log10(y) if log_y else y for points in lines for _, y in points]
    if not xs:
        return _svg(title, width, height, [_text(width / 2, height / 2, "no data", "middle")])
    x_low, x_high = _span(min(xs), max(xs))
    y_low, y_high = _span(min(ys), max(ys), room=0.04)
    right, bottom = width - MARGIN_RIGHT, height - MARGIN_BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share_x, share_y = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return MARGIN_LEFT + share_x * (right - MARGIN_LEFT), bottom - share_y * (bottom - MARGIN_TOP)

    parts = []
    for tick in _ticks(y_low, y_high):
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{MARGIN_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(MARGIN_LEFT - 6, y + 4, write_number(10**tick if log_y else tick), "end"))
    for tick in _ticks(x_low, x_high):
        x, _ = place(tick, y_low)
        parts.append(_text(x, bottom + 16, write_number(tick), "middle"))
    for index, points in enumerate(lines):
        places = [place(x, math.log10(y) if log_y else y) for x, y in _thin(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = _colour(index)
        if len(places) == 1:
            parts.append(f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" style="fill:{colour}"/>')
        else:
            parts.append(f'<polyline points="{path}" style="fill:none;stroke:{colour};stroke-width:1.8"/>')
    if x_label:
        parts.append(_text((MARGIN_LEFT + right) / 2, height - 6, x_label, "middle"))
    if len(series) > 1:
        parts += _legend([line.name for line in series], right)
    return _svg(title, width, height, parts)


def bar_chart(title: str, labels: Sequence[str], series: Sequence[Series], width: int = 640) -> str:
    """Horizontal bars: a group for each label, with one bar for each series, whose `ys` match the labels.

    Example:
        >>> chart = bar_chart("speed", ["ours", "theirs"], [Series("tokens/s", [0, 1], [30.0, 10.0])])
        >>> chart.count('class="bar"')
        2
    """
    left = 16 + 7 * max((len(label) for label in labels), default=0)
    group_height = BAR_HEIGHT * len(series) + 10
    height = MARGIN_TOP + group_height * len(labels) + 12
    highest = max((y for bars in series for y in bars.ys if math.isfinite(y)), default=0.0) or 1.0
    room = width - left - 80  # leaves space for the number after the bar
    parts = []
    for row, label in enumerate(labels):
        top = MARGIN_TOP + row * group_height
        parts.append(_text(left - 8, top + BAR_HEIGHT * len(series) / 2 + 4, label, "end"))
        for index, bars in enumerate(series):
            value = bars.ys[row]
            if not math.isfinite(value):
                continue
            y, length = top + index * BAR_HEIGHT, max(0.0, value / highest) * room
            parts.append(
                f'<rect class="bar" x="{left}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT - 3}" '
                f'style="fill:{_colour(index)}"/>'
            )
            parts.append(_text(left + length + 6, y + BAR_HEIGHT - 6, write_number(value)))
    if len(series) > 1:
        parts += _legend([bars.name for bars in series], width - MARGIN_RIGHT)
    return _svg(title, width, height, parts)


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    row_label: str = "",
    column_label: str = "",
) -> str:
    """A table of numbers tinted by their size, such as a confusion matrix.

    Example:
        >>> heat_map("confusion", ["cat", "dog"], ["cat", "dog"], [[9, 1], [0, 5]]).count('class="cell"')
        4
    """
    if len(values) != len(rows) or any(len(line) != len(columns) for line in values):
        raise ValueError(
            f"A heat map with {len(rows)} rows and {len(columns)} columns needs {len(rows)} x {len(columns)} values."
        )
    left = 16 + 7 * max((len(name) for name in (*rows, row_label)), default=0)
    cell = max(CELL_WIDTH, 12 + 7 * max((len(name) for name in columns), default=0))
    top = MARGIN_TOP + 38
    highest = max((value for line in values for value in line if math.isfinite(value)), default=0.0)
    parts = [_text(left - 8, top - 6, row_label, "end", "name")] if row_label else []
    if column_label:
        parts.append(_text(left, MARGIN_TOP + 12, column_label, kind="name"))
    for index, name in enumerate(columns):
        parts.append(_text(left + (index + 0.5) * cell, top - 6, name, "middle"))
    for number, (name, line) in enumerate(zip(rows, values, strict=True)):
        y = top + number * CELL_HEIGHT
        parts.append(_text(left - 8, y + 17, name, "end"))
        for index, value in enumerate(line):
            x = left + index * cell
            tint = MAX_TINT * max(value, 0.0) / highest if highest > 0 and math.isfinite(value) else 0.0
            parts.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{cell - 2}" height="{CELL_HEIGHT - 2}" '
                f'style="fill:var(--first);fill-opacity:{tint:.3f}"/>'
            )
            parts.append(_text(x + cell / 2, y + 17, write_number(value), "middle"))
    return _svg(title, left + cell * len(columns) + 16, top + CELL_HEIGHT * len(rows) + 12, parts)


def write_number(value: float) -> str:
    """Formats a number briefly, for an axis.

    Example:
        >>> write_number(1500000), write_number(0.00012), write_number(3.0), write_number(float("nan"))
        ('1.5M', '0.00012', '3', 'nan')
    """
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


# ---------------------------------------------------------------------- parts


def _finite(series: Series, log_y: bool) -> list[tuple[float, float]]:
    points = zip(series.xs, series.ys, strict=True)
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log_y)]


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


def _span(low: float, high: float, room: float = 0.0) -> tuple[float, float]:
    """A range that is never empty, widened on both sides by a share `room`."""
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return low - room * (high - low), high + room * (high - low)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers in the range."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def _colour(index: int) -> str:
    return "var(--first)" if index == 0 else COLOURS[index % len(COLOURS)]


def _legend(names: Sequence[str], right: float) -> list[str]:
    parts = []
    for index, name in reversed(list(enumerate(names))):
        right -= 7 * len(name)
        parts.append(_text(right, 20, name))
        parts.append(f'<rect x="{right - 16}" y="11" width="10" height="10" style="fill:{_colour(index)}"/>')
        right -= 28
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"><title>{escape(title)}</title>{STYLE}'
        + _text(8, 20, title, kind="name")
        + "".join(parts)
        + "</svg>"
    )
