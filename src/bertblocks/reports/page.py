"""report.html: a self-contained page about a run, with its curves and the caller's sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.storage import atomic_file
from bertblocks.reports.charts import Series, line_chart, write_number

REPORT = "report.html"
STYLE = """
:root{color-scheme:light dark;--ink:#222;--paper:#fff;--faint:#e4e4e4;--quiet:#666}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#16181d;--faint:#34373e;--quiet:#999}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1340px;margin:2em auto;
padding:0 1em}
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.15em;margin-top:2em}p.quiet{color:var(--quiet);margin-top:0}
table{border-collapse:collapse}th,td{text-align:left;vertical-align:top;padding:.2em 1.2em .2em 0;
border-bottom:1px solid var(--faint);overflow-wrap:anywhere}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}
.charts{display:flex;flex-wrap:wrap;gap:1em}svg{max-width:100%;height:auto}summary{cursor:pointer}
"""
#: Bookkeeping values in metrics.jsonl that have no curve.
HIDDEN_KEYS = {"step", "tokens", "seconds"}
#: Metrics with a chart of their own: its title, and whether its scale is logarithmic.
OWN_CHARTS = {
    "learning_rate": ("Learning rate", False),
    "tokens_per_second": ("Tokens per second", False),
    "gradient_norm": ("Gradient norm", True),
    "packing": ("Share of slots filled with tokens", False),
}


@dataclass(frozen=True)
class ReportSection:
    """A heading and HTML from `table` or `bertblocks.reports.charts`. `is_folded` collapses it."""

    title: str
    html: str
    is_folded: bool = False

    def render(self) -> str:
        title = escape(self.title)
        if self.is_folded:
            return f"<details><summary><h2 style='display:inline'>{title}</h2></summary>{self.html}</details>"
        return f"<h2>{title}</h2>{self.html}"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table. Numbers are right-aligned, and all text is escaped.

    Example:
        >>> table(["word", "share"], [["<b>", 0.5]])
        '<table><tr><th>word</th><th>share</th></tr><tr><td>&lt;b&gt;</td><td class="number">0.5</td></tr></table>'
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def settings_table(values: Mapping[str, Any]) -> str:
    """A table of nested settings, with dotted keys."""
    return table(["key", "value"], [(key, str(value)) for key, value in _flatten(values)])


def write_report(
    folder: Path, title: str, summary: Sequence[ReportSection], details: Sequence[ReportSection] = (), note: str = ""
) -> Path:
    """Writes report.html into a run's folder: the summary, the curves of its metrics.jsonl, and the details."""
    curves = ReportSection("Curves", f"<div class='charts'>{''.join(draw_curves(folder / 'metrics.jsonl'))}</div>")
    body = "".join(section.render() for section in (*summary, curves, *details))
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p class='quiet'>{escape(note)}</p>{body}</body></html>\n"
    )
    with atomic_file(folder / REPORT) as file:
        file.write(page.encode())
    return folder / REPORT


def draw_curves(path: Path) -> list[str]:
    """A chart of all losses, a chart of all other scores, and one for each metric in `OWN_CHARTS`."""
    lines = read_metrics(path)
    names = dict.fromkeys(
        key
        for line in lines
        for key, value in line.items()
        if isinstance(value, (int, float)) and key not in HIDDEN_KEYS
    )
    curves = {name: _curve(name, lines) for name in names}
    losses = [curve for name, curve in curves.items() if "loss" in name]
    scores = [curve for name, curve in curves.items() if "loss" not in name and name not in OWN_CHARTS]
    charts = [line_chart(title, group, "step") for title, group in (("Loss", losses), ("Quality", scores)) if group]
    own = [(curves[name], *OWN_CHARTS[name]) for name in OWN_CHARTS if name in curves]
    return charts + [line_chart(title, [curve], "step", log_y) for curve, title, log_y in own]


def _curve(name: str, lines: Sequence[Mapping[str, Any]]) -> Series:
    points = [line for line in lines if isinstance(line.get(name), (int, float))]
    return Series(name.replace("_", " "), [line["step"] for line in points], [line[name] for line in points])


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"<td>{escape(str(value))}</td>"
    text = f"{value:,}" if isinstance(value, int) else write_number(value)
    return f'<td class="number">{text}</td>'


def _flatten(values: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yields dotted keys and values, without empty values."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _flatten(value, f"{path}.{key}".removeprefix("."))
    elif isinstance(values, list) and any(isinstance(value, Mapping) for value in values):
        for index, value in enumerate(values):
            yield from _flatten(value, f"{path}.{index}")
    elif values not in (None, {}, [], ""):
        yield path, values
