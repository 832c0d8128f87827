"""Charts hold the numbers that they were given, compile without a warning, and draw their marks in the right places."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

from bertblocks.reports.charts import (
    CONFIG,
    MAX_POINTS,
    Chart,
    Series,
    bar_chart,
    line_chart,
    matrix_chart,
    scatter_chart,
    to_svg,
)

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
SVG = "{http://www.w3.org/2000/svg}"
LINES = [Series("training", [1, 2, 3], [3.0, 2.0, 1.0], is_dense=True), Series("other", [0, 3], [1.0, 2.0])]
CHARTS = [
    line_chart("Loss", LINES, marks={"baseline": 1.5}, best=(3, 1.0)),
    line_chart("Growth", [Series("ms", [128, 256], [1.0, 4.0])], "tokens", "ms", is_log=True),
    bar_chart("Speed", {"ours": 3.0, "theirs": 1.0}, "times", {"ours": {"a.b[c]": 1}}),
    matrix_chart("Confusion", ["cat", "dog"], [[9, 1], [0, 5]]),
    matrix_chart("Confusion", [str(n) for n in range(40)], [[1] * 40] * 40),
    scatter_chart("Calibration", [{"a": 0.5, "b": 0.4, "n": 3}], "a", "b", size="n", diagonal=True),
]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_specifications_compile(chart: Chart) -> None:
    assert vl_convert.vegalite_to_vega({**chart.spec, "config": CONFIG})["marks"]


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg([chart]))


def paths(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    groups = [group for group in root.iter(f"{SVG}g") if kind in group.attrib.get("class", "").split()]
    return [path for group in groups for path in group.iter(f"{SVG}path") if group is not path]


def test_bars_are_as_long_as_their_values() -> None:
    bars = paths(drawn(bar_chart("Speed", {"a": 10.0, "b & <c>": 30.0})), "mark-rect")
    widths = [
        max(map(float, re.findall(r"[hH](-?[\d.]+)", bar.attrib["d"])))
        for bar in bars
        if "h" in bar.attrib["d"].lower()
    ]
    texts = [element.text for element in drawn(bar_chart("Speed", {"b & <c>": 30.0})).iter(f"{SVG}text")]
    assert "b & <c>" in texts
    assert len(widths) == 2
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.05)  # corners are rounded


def test_a_line_maps_points_linearly() -> None:
    line = paths(drawn(line_chart("loss", [Series("loss", [0, 10, 40], [4.0, 3.0, 2.0])])), "mark-line")[0]
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", line.attrib["d"])]
    (x0, y0), (x1, y1), (x2, y2) = zip(numbers[::2], numbers[1::2], strict=True)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 4, abs=1e-3)
    assert (y1 - y0) / (y2 - y0) == pytest.approx(1 / 2, abs=1e-3)
    assert y2 > y0  # more is higher up


def test_many_points_are_thinned_without_losing_a_spike() -> None:
    ys = [1.0] * 50_000
    ys[31_111] = 100.0
    values = line_chart("loss", [Series("loss", range(len(ys)), ys, is_dense=True)]).spec["data"]["values"]
    assert len(values) <= MAX_POINTS + 2
    assert max(row["y"] for row in values) == 100.0
    assert [row["x"] for row in values] == sorted(row["x"] for row in values)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20), st.text(max_size=20))
def test_any_numbers_and_texts_give_finite_values(pairs: Any, title: Any) -> None:
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    for row in line_chart(title, [Series(title, xs, ys)]).spec["data"]["values"]:
        assert math.isfinite(row["x"])
        assert math.isfinite(row["y"])
    bars = bar_chart(title, {f"{title}{number}": y for number, y in enumerate(ys)})
    assert all(math.isfinite(row["value"]) for row in bars.spec["data"]["values"])


def test_labels_of_a_matrix_are_sorted_by_mistakes() -> None:
    chart = matrix_chart("Confusion", ["a", "b", "c"], [[9, 0, 0], [0, 5, 4], [0, 1, 5]])
    assert chart.spec["encoding"]["x"]["sort"] == ["b", "c", "a"]
    shares = {(cell["gold"], cell["predicted"]): cell["share"] for cell in chart.spec["data"]["values"]}
    assert shares == {("a", "a"): 1, ("b", "b"): 5 / 9, ("b", "c"): 4 / 9, ("c", "b"): 1 / 6, ("c", "c"): 5 / 6}
    with pytest.raises(ValueError, match="2 labels needs 2 x 2 counts"):
        matrix_chart("Confusion", ["x", "y"], [[1], [3]])


def test_a_picture_has_colours_for_light_and_dark_pages() -> None:
    svg = to_svg(CHARTS[:3])
    assert ElementTree.fromstring(svg).tag == f"{SVG}svg"
    assert "prefers-color-scheme:dark" in svg
    assert "var(--c0)" in svg
    assert "white" not in svg.partition("<g")[0]


def test_ticks_of_a_few_steps_are_whole_numbers() -> None:
    chart = line_chart("Score", [Series("accuracy", [0, 4], [0.3, 0.2])])
    assert '"tickMinStep": 1' in json.dumps(chart.spec)
