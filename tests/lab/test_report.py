"""The report of a study shows the numbers of its statistics, in the page, in its files and as JSON."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from scipy import stats

from bertblocks.lab.report import headline, summarize, write_study_report
from bertblocks.lab.report_charts import Effect, forest_chart, pareto_front
from bertblocks.lab.report_scales import pareto_charts
from bertblocks.lab.results import StudyResults
from bertblocks.lab.statistics.verdicts import judge
from bertblocks.reports.charts import CONFIG
from tests.lab.simulated import simulate, simulate_full
from tests.reports.browser import CHROMIUM, open_browser

SIZES = {"1M": 1_000_000, "4M": 4_000_000, "16M": 16_000_000, "64M": 64_000_000}


def with_one_size(results: StudyResults) -> StudyResults:
    return replace(
        results,
        trials=[replace(record, size=None) for record in results.trials],
        measurements=[replace(found, size=None) for found in results.measurements],
        searches=[replace(search, size=None) for search in results.searches],
    )


@pytest.fixture(scope="module")
def one() -> StudyResults:
    return with_one_size(simulate_full({"rope": -0.2, "alibi": 0.0, "none": 0.3}, {"small": 4_400_000}))


@pytest.fixture(scope="module")
def sized() -> StudyResults:
    return simulate_full({"glu": -0.3, "same": 0.0}, SIZES, seeds=4)


def write(results: StudyResults, folder: Path) -> str:
    return write_study_report(results, folder)[0].read_text(encoding="utf-8")


def test_the_page_begins_with_the_verdict_and_its_scale(one: StudyResults, tmp_path: Path) -> None:
    page = write(one, tmp_path)
    title = "rope is better than baseline in loss, none is worse, alibi is undecided"
    assert re.search(rf"<h1[^>]*>{title}</h1><p class=\"verdict\"[^>]*>Found at {re.escape(one.scale)}", page)
    row = re.search(r"<tr><td[^>]*>rope</td>.*?</tr>", page)
    assert row is not None
    assert one.scale in row[0]
    assert ">better</span>" in row[0]
    for name in ("Held-out loss against compute", "Learning rates", "Other measures", "keys that differ", "Settings"):
        assert name in page


def test_all_charts_compile_and_hold_the_numbers(sized: StudyResults, tmp_path: Path) -> None:
    page = write(sized, tmp_path)
    found = re.findall(r'<script type="application/json">(.*?)</script>', page)
    specs = [json.loads(text) for text in found]
    assert len(specs) >= 1 + 2 + 2 + len(SIZES)
    for spec in specs:
        assert vl_convert.vegalite_to_vega({**spec, "config": CONFIG})["marks"]
    forest = {row["name"]: row for row in specs[0]["data"]["values"]}
    values = {(m.variant, m.size, m.seed): m.value for m in sized.measurements if m.measure == "loss"}
    expected = np.mean([values["glu", "1M", seed] - values["baseline", "1M", seed] for seed in range(4)])
    assert forest["glu at 1M"]["value"] == pytest.approx(expected)


def test_files_hold_the_same_numbers_as_the_summary(one: StudyResults, tmp_path: Path) -> None:
    paths = {path.name: path for path in write_study_report(one, tmp_path)}
    assert set(paths) == {"report.html", "comparisons.md", "comparisons.tex", "comparisons.csv", "trials.csv"}
    summary = json.loads(json.dumps(summarize(one), allow_nan=False))
    rows = list(csv.DictReader(io.StringIO(paths["comparisons.csv"].read_text())))
    assert [float(row["difference"]) for row in rows] == [row["difference"] for row in summary["comparisons"]]
    trials = list(csv.DictReader(io.StringIO(paths["trials.csv"].read_text())))
    speeds = {name: [float(row["throughput"]) for row in trials if row["variant"] == name] for name in one.variants}
    test = stats.ttest_rel(speeds["rope"], speeds["baseline"])
    found = next(row for row in rows if (row["variant"], row["measure"]) == ("rope", "throughput"))
    assert (float(found["p"]), found["verdict"]) == (pytest.approx(test.pvalue, rel=1e-6), "")
    assert (float(found["low"]), float(found["high"])) == pytest.approx(tuple(test.confidence_interval()), rel=1e-6)
    markdown = paths["comparisons.md"].read_text().splitlines()
    assert len(markdown) == 2 + len(rows)
    assert markdown[2].startswith(
        f"| rope | baseline | loss | better | {summary['comparisons'][0]['difference']:+.4g} |"
    )
    latex = paths["comparisons.tex"].read_text()
    assert latex.count(r"\\") == 1 + len(rows)
    assert r"95\%" in latex


def test_the_page_holds_the_raw_data(one: StudyResults, tmp_path: Path) -> None:
    page = write(one, tmp_path)
    links = dict(re.findall(r'<a download="([^"]+)" href="data:[^;]+;base64,([^"]+)"', page))
    data = json.loads(base64.b64decode(links["simulated.json"]))
    assert data["measurements"][0]["examples"] == one.measurements[0].examples.tolist()
    assert len(data["trials"][0]["curve"]) == len(one.trials[0].curve)
    trials = list(csv.DictReader(io.StringIO(base64.b64decode(links["simulated-trials.csv"]).decode())))
    assert float(trials[0]["loss"]) == one.measurements[0].value


def test_names_cannot_break_the_page_or_the_tables(tmp_path: Path) -> None:
    name = 'a<b>|&_"</script>'
    page = write(replace(simulate({name: -0.5}), name="x</title><b>"), tmp_path)
    assert "<b>|" not in page
    assert "x</title>" not in page
    assert "a<b>\\|&_" in (tmp_path / "comparisons.md").read_text()
    assert r"\&\_" in (tmp_path / "comparisons.tex").read_text()


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ({"a": 0.0}, "Undecided: no difference from baseline in loss is beyond chance"),
        ({"a": -1.0, "b": -1.0, "c": 1.0}, "a and b are better than baseline in loss, c is worse"),
        ({"a": 1.0, "b": 0.0}, "a is worse than baseline in loss, b is undecided"),
        ({}, "Undecided: there is nothing to compare with the baseline"),
    ],
)
def test_headlines_are_statements(effects: dict[str, float], expected: str) -> None:
    results = simulate(effects, seed=4)
    assert headline(results, judge(results)) == expected


def test_headlines_of_sizes_and_of_unfinished_studies(sized: StudyResults) -> None:
    assert headline(sized, judge(sized)).startswith("glu at all sizes is better than baseline in loss, same at")
    waiting = replace(simulate({"a": -1.0, "b": -1.0}), missing=[("b", 5, None)])
    assert headline(waiting, judge(waiting)) == "So far: a is better than baseline in loss, b is undecided"
    ladder = replace(simulate({"a": -1.0, "b": -2.0}), settings={"design": "ladder"})
    assert headline(ladder, judge(ladder)) == "a and b are better than the step before in loss"
    single = simulate({"a": 0.0}, seeds=1)
    assert headline(single, judge(single)) == "Undecided: one seed does not show how much seeds differ"


def test_main_effects_are_reported(tmp_path: Path) -> None:
    results = simulate({"post+rope": -0.5, "pre+learned": 0.0, "pre+rope": -0.5})
    names = {"baseline": "post+learned"}
    renamed = replace(
        results,
        baseline="post+learned",
        variants={names.get(name, name): keys for name, keys in results.variants.items()},
        measurements=[replace(m, variant=names.get(m.variant, m.variant)) for m in results.measurements],
        settings={"design": "factorial"},
    )
    assert "Main effects" in write(renamed, tmp_path)
    effects = {row["level"]: row for row in summarize(renamed)["main_effects"]}
    assert effects["rope"]["interval"][1] < 0
    assert effects["pre"]["interval"][0] < 0 < effects["pre"]["interval"][1]
    assert "Main effects" not in write(results, tmp_path)


def test_trends_and_power_laws_are_reported(sized: StudyResults) -> None:
    summary = summarize(sized)
    trend = {row["variant"]: row for row in summary["trends_per_tenfold_compute"]}
    assert trend["glu"]["low"] > 0  # an improvement of 0.3 that halves with tenfold compute
    assert trend["glu"]["reading"] == "shrinks"
    low, high = summary["power_laws"]["baseline"]["exponent_interval"]
    assert low < 0.2 < high


def test_the_front_has_what_nothing_beats(one: StudyResults) -> None:
    assert pareto_front({"a": (1, 1), "b": (1, 1), "c": (2, 0), "d": (0.5, 1)}, lower_is_better=False) == [
        "a",
        "b",
        "c",
    ]
    (chart,) = pareto_charts(one)
    front = {row["series"] for row in chart.spec["data"]["values"] if row["front"]}
    assert front == {"rope", "alibi", "none"}  # each faster than the one before, and the baseline slower than all
    slow = replace(one, measures={"loss": one.measures["loss"]})
    assert pareto_charts(slow)[0].spec["data"]["values"][0]["x"] == pytest.approx(
        np.mean([record.tokens / record.seconds for record in one.trials if record.variant == "baseline"])
    )


def test_unknown_intervals_are_left_out_of_the_forest() -> None:
    effect = Effect("a", "undecided", 0.1, (-math.inf, math.inf), (-math.inf, math.inf), [0.1])
    missing = Effect("b", "undecided", math.nan, (math.nan, math.nan), (math.nan, math.nan), [])
    chart = forest_chart("Effects", [effect, missing], "difference", True, "")
    (row,) = chart.spec["data"]["values"]
    assert (row["name"], row["low"], row["tested_high"]) == ("a", None, None)


@pytest.mark.parametrize("kind", ["nothing", "one seed", "failed", "diverged search"])
def test_pages_of_unusual_studies_can_be_written(kind: str, tmp_path: Path) -> None:
    results = simulate({"a": 0.0}, seeds=1 if kind == "one seed" else 3)
    if kind == "nothing":
        results = replace(results, trials=[], measurements=[], missing=[("a", 0, None), ("baseline", 0, None)])
    elif kind == "failed":
        results = replace(results, failures=[("a", 2, None, "its loss is not finite")], settings={"stopped": ["a"]})
    elif kind == "diverged search":
        search = simulate_full({}, {"s": 1_000_000}, seeds=2).searches[0]
        results = replace(results, searches=[replace(search, size=None, points=[(1e-3, math.inf)], chosen=1e-3)])
    page = write(results, tmp_path)
    assert "Undecided" in page or "So far undecided" in page
    content = re.search(r'href="data:application/json;base64,([^"]+)"', page)
    assert content is not None
    json.loads(base64.b64decode(content[1]), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    json.dumps(summarize(results), allow_nan=False)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_pages_have_no_problem_in_a_browser(one: StudyResults, sized: StudyResults, tmp_path: Path) -> None:
    pytest.importorskip("websocket")
    unfinished = replace(simulate({"a": 0.0}, seeds=1), missing=[("a", 1, None)])
    studies = {"one": one, "sized": sized, "unfinished": unfinished}
    with open_browser(tmp_path / "profile") as browser:
        for name, results in studies.items():
            (tmp_path / name).mkdir()
            page = write_study_report(results, tmp_path / name)[0]
            for width, mode in ((1400, "light"), (400, "dark")):
                assert browser.open(page, width, mode) == []
                drawn = "[...document.querySelectorAll('figure .view')].every((view) => view.querySelector('svg'))"
                assert browser.evaluate(drawn)
        browser.open(tmp_path / "one" / "report.html")
        ticks = "[...document.querySelectorAll('.charts:not(.wide) figure')][0].querySelector('svg').textContent"
        before = browser.evaluate(ticks)
        browser.evaluate("document.querySelector('input[type=radio][value=seconds]').click()")
        assert browser.evaluate(f"new Promise((done) => setTimeout(() => done({ticks}), 200))") != before
