"""A run as one SVG: the speeds in every workload, and how cost grows with length."""

from __future__ import annotations

import math
import re
from typing import Any

from benchmarks.report import by_model
from bertblocks.reports.charts import Series, bar_chart, line_chart

WIDTH, GAP = 860, 16


def draw(run: dict[str, Any]) -> str:
    """Charts below each other, without workloads that were not run."""
    charts = [speed_chart(result) for result in run["rows"].values()]
    charts += [growth_chart(kind, results) for kind, results in by_model(run["stacks"]).items()]
    return stack_charts(charts)


def speed_chart(result: dict[str, Any]) -> str:
    speeds = {name: found["speed"]["median"] for name, found in result["contenders"].items() if "speed" in found}
    series = [Series("speed", range(len(speeds)), list(speeds.values()))]
    return bar_chart(f"{result['title']}: times as fast as {result['baseline']}", list(speeds), series, WIDTH)


def growth_chart(kind: str, results: list[dict[str, Any]]) -> str:
    lengths = [math.log2(result["facts"]["tokens"]) for result in results]
    names = [name for name, found in results[0]["contenders"].items() if "seconds" in found]
    series = [
        Series(name, lengths, [result["contenders"][name]["seconds"]["median"] * 1e3 for result in results])
        for name in names
    ]
    return line_chart(f"{kind} stack: ms", series, "tokens, as a power of 2", log_y=True, width=WIDTH)


def stack_charts(charts: list[str]) -> str:
    """Several pictures as one, below each other."""
    placed, top = [], 0
    for chart in charts:
        placed.append(chart.replace("<svg ", f'<svg y="{top}" ', 1))
        top += int(re.search(r'height="(\d+)"', chart)[1]) + GAP  # type: ignore[index]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}">' + "".join(placed) + "</svg>\n"
