"""The page of a coordinate check."""

from __future__ import annotations

import math
from pathlib import Path

from bertblocks.lab.coordinate_check import LAYER_PARTS, CoordinateCheck
from bertblocks.reports.charts import Chart, Series, line_chart
from bertblocks.reports.page import figures, join, paragraph, section, settings_table, table, write_page


def write_coordinate_page(check: CoordinateCheck, path: Path, settings: dict[str, object]) -> Path:
    """Write charts of activations by width, the exponents of all activations, and the settings of the check."""
    verdict = verdict_of(check)
    body = join(
        paragraph(verdict, "verdict"),
        paragraph(
            "An activation that a parametrization controls has the same size and the same change in training at every "
            "width: its line is level. Layers share a line; the table has each of them."
        ),
        section("Change since the first step", figures(_charts(check, is_change=True), has_hint=True)),
        section("Size", figures(_charts(check, is_change=False))),
        section(
            "Exponents of the width",
            table(
                ["activation", "size", "change", "verdict"],
                [
                    (drift.name, drift.size, drift.change, "drifts" if drift.is_beyond(check.tolerance) else "")
                    for drift in check.drifts
                ],
            ),
        ),
        section("Settings", settings_table(settings), is_folded=True),
    )
    return write_page(path, "Coordinate check", body)


def verdict_of(check: CoordinateCheck) -> str:
    """Say in one sentence whether activations drift with width, and which most."""
    drifting = check.drifting
    if not drifting:
        return f"No activation drifts with width: all exponents are within {check.tolerance:g}."
    worst = max(drifting, key=lambda drift: max(drift.size, abs(drift.change)))
    count = f"{len(drifting)} of {len(check.activations)} activations drift with width"
    exponents = f"size ~ width ** {worst.size:.2f}, change ~ width ** {worst.change:.2f}"
    return f"{count}, most of all {worst.name}: {exponents}."


def _charts(check: CoordinateCheck, is_change: bool) -> list[Chart]:
    charts = []
    for part in ("embeddings", *LAYER_PARTS, "logits"):
        members = [x for x in check.activations if part in (x.name, _layer_part(x.name))]
        steps = [activation.changes[1:] if is_change else activation.sizes for activation in members]
        lines = []
        for step in range(len(steps[0])):
            means = [_geometric_mean([values[step][i] for values in steps]) for i in range(len(check.widths))]
            lines.append(Series(f"step {step + is_change}", check.widths, means))
        title = part if _layer_part(members[0].name) is None else f"layers: {part}"
        charts.append(line_chart(title, lines, "width", "mean absolute value", is_log=True))
    return charts


def _layer_part(name: str) -> str | None:
    return name.split(" ", 2)[2] if name.startswith("layer ") else None


def _geometric_mean(values: list[float]) -> float:
    if not all(0 < value < math.inf for value in values):
        return math.nan
    return math.exp(sum(map(math.log, values)) / len(values))
