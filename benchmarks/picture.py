"""A run as charts: the speeds in every workload, and how cost grows with length, as an SVG and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Sheet, by_model, study_sheets, workload_sheet
from bertblocks.reports.charts import Chart, Series, bar_chart, line_chart, to_svg
from bertblocks.reports.page import Html, figures, join, paragraph, section, table, write_page
from bertblocks.reports.reproduce import reproduce


def draw(run: dict[str, Any]) -> str:
    """All charts below each other, without workloads that were not run."""
    return to_svg([*map(speed_chart, run["rows"].values()), *growth_charts(run)])


def speed_chart(result: dict[str, Any]) -> Chart:
    speeds = {name: found["speed"]["median"] for name, found in result["contenders"].items() if "speed" in found}
    return bar_chart(result["title"], speeds, f"times as fast as {result['baseline']}")


def growth_charts(run: dict[str, Any]) -> list[Chart]:
    return [growth_chart(kind, results) for kind, results in by_model(run["stacks"]).items()]


def growth_chart(kind: str, results: list[dict[str, Any]]) -> Chart:
    lengths = [result["facts"]["tokens"] for result in results]
    names = [name for name, found in results[0]["contenders"].items() if "seconds" in found]
    series = [
        Series(name, lengths, [result["contenders"][name]["seconds"]["median"] * 1e3 for result in results])
        for name in names
    ]
    return line_chart(f"{kind} stack: ms by tokens", series, "tokens", "ms", is_log=True)


def write_bench_page(run: dict[str, Any], path: Path) -> None:
    """Writes a page with all charts and tables of a run."""
    goals = [line for sheet in study_sheets(run) if sheet.title == "Goals" for line in sheet.lines]
    met = sum(line[-1] == "yes" for line in goals)
    machine = run["machine"]
    sentence = f"{len(run['rows'])} workloads on {machine['processor']}, {machine['threads']} threads"
    sentence += f" · {met} of {len(goals)} goals met" if goals else ""
    workloads = [
        section(result["title"], figures([speed_chart(result)], is_wide=True), _table(workload_sheet(result)))
        for result in run["rows"].values()
    ]
    body = join(
        Html("<h1>Benchmarks</h1>"),
        paragraph(f"{sentence} · {run['minutes']:g} minutes", "verdict"),
        section("Goals", *(_table(sheet) for sheet in study_sheets(run) if sheet.title == "Goals")),
        *workloads,
        section("Growth with length", figures(growth_charts(run), has_hint=True)),
        *(section(sheet.title, _table(sheet)) for sheet in study_sheets(run) if sheet.title != "Goals"),
        section("Reproduce", *reproduce(run)),
    )
    write_page(path, "Benchmarks", body)


def _table(sheet: Sheet) -> Html:
    return table(sheet.columns, sheet.lines)
