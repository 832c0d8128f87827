"""Charts are well-formed SVG, and their marks are in the right places."""

import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertblocks.reports.charts import MAX_POINTS, MAX_TINT, Series, bar_chart, heat_map, line_chart

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def parse(chart: str) -> ElementTree.Element:
    root = ElementTree.fromstring(chart)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def points(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = [element.attrib["points"].split() for element in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_a_line_chart_maps_points_linearly() -> None:
    root = parse(line_chart("loss", [Series("training", [0, 10, 40], [4.0, 3.0, 2.0])], "step"))
    ((first, second, third),) = points(root)
    assert second[0] - first[0] == pytest.approx((third[0] - first[0]) / 4, abs=0.1)
    assert second[1] - first[1] == pytest.approx((third[1] - first[1]) / 2, abs=0.1)
    assert first[1] < third[1]  # more is higher up
    assert "step" in texts(root)
    assert "training" not in texts(root)  # one line needs no legend


def test_several_lines_share_axes_and_have_a_legend() -> None:
    chart = line_chart("loss", [Series("ours", [0, 1], [1.0, 2.0]), Series("theirs", [0, 2], [1.0, 3.0])])
    ours, theirs = points(parse(chart))
    assert ours[0] == theirs[0]
    assert ours[1][0] == pytest.approx((theirs[0][0] + theirs[1][0]) / 2, abs=0.1)
    assert {"ours", "theirs"} <= set(texts(parse(chart)))


def test_a_logarithmic_axis_spaces_powers_evenly_and_omits_values_without_a_logarithm() -> None:
    root = parse(line_chart("lr", [Series("lr", [0, 1, 2, 3], [1e-4, 1e-3, 0.0, 1e-2])], log_y=True))
    ((first, second, third),) = points(root)
    assert first[1] - second[1] == pytest.approx(second[1] - third[1], abs=0.2)


def test_many_points_are_thinned_without_losing_a_spike() -> None:
    ys = [1.0] * 50_000
    ys[31_111] = 100.0
    (line,) = points(parse(line_chart("loss", [Series("loss", range(len(ys)), ys)])))
    assert len(line) <= MAX_POINTS + 2
    heights = [y for _, y in line]
    assert min(heights) < max(heights) - 100  # the spike, in pixels
    assert [x for x, _ in line] == sorted(x for x, _ in line)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30), st.booleans(), st.text(max_size=20))
def test_any_numbers_and_texts_give_well_formed_charts(pairs: Any, log_y: Any, title: Any) -> None:
    title = "".join(letter for letter in title if letter.isprintable())
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    root = parse(line_chart(title, [Series("<a>", xs, ys)], log_y=log_y))
    assert root.find(f"{SVG}title").text in (title, None)
    assert all(math.isfinite(number) for line in points(root) for point in line for number in point)
    parse(bar_chart(title, ["&"] * len(ys), [Series("b", xs, ys)]))


def test_bars_are_as_long_as_their_values() -> None:
    root = parse(bar_chart("tokens/s", ["a", "b & c"], [Series("one", [0, 1], [10.0, 30.0])]))
    widths = [float(element.attrib["width"]) for element in root.iter(f"{SVG}rect")]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert "b & c" in texts(root)


def test_cells_are_tinted_by_their_share_of_the_largest() -> None:
    root = parse(heat_map("confusion", ["x", "y"], ["x", "y"], [[8, 2], [0, 4]], "true", "predicted"))
    tints = [float(element.attrib["style"].rsplit(":", 1)[1]) for element in root.iter(f"{SVG}rect")]
    assert tints == pytest.approx([MAX_TINT, MAX_TINT / 4, 0.0, MAX_TINT / 2], abs=1e-3)
    assert {"8", "2", "0", "4", "true", "predicted"} <= set(texts(root))
    with pytest.raises(ValueError, match="2 rows and 1 columns"):
        heat_map("confusion", ["x", "y"], ["x"], [[1, 2], [3, 4]])
