"""A self-contained page: a verdict, tiles, charts, tables that can be searched, and everything needed to reproduce it.

All parts return `Html`. Every other text that a page shows is escaped.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from bertblocks.core.console import write_number
from bertblocks.core.storage import atomic_file
from bertblocks.reports.charts import CONFIG, Chart, dark_variables, javascript, light_variables

REPORT = "report.html"
#: A page may run its own scripts, and cannot load anything.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
HINT = (
    "Shift and the wheel zoom into a chart, dragging moves it, and a double click shows all of it again. A click on a "
    "name in a legend shows only that line."
)
#: Longer texts in a cell get room.
TEXT_LENGTH = 40


class Html(str):
    """Text that is already HTML."""


def join(*parts: Html) -> Html:
    return Html("".join(parts))


def section(title: str, *parts: Html, is_folded: bool = False) -> Html:
    """Parts under a heading; empty if there are none. A folded section opens with a click."""
    body = join(*parts)
    if not body:
        return Html("")
    if is_folded:
        return Html(f"<details><summary>{escape(title)}</summary>{body}</details>")
    return Html(f"<section><h2>{escape(title)}</h2>{body}</section>")


def paragraph(text: str, kind: str = "") -> Html:
    return Html(f'<p class="{kind}" dir="auto">{escape(text)}</p>' if text else "")


def tiles(values: Mapping[str, Any]) -> Html:
    """The most important numbers, large, each above its name."""
    boxes = "".join(
        f'<div class="tile"><b>{escape(_brief(value))}</b><span>{escape(name)}</span></div>'
        for name, value in values.items()
        if value not in (None, "")
    )
    return Html(f'<div class="tiles">{boxes}</div>' if boxes else "")


def _brief(value: Any) -> str:
    return write_number(value) if _is_number(value) and abs(value) >= 1e6 else write_value(value)


def figures(charts: Sequence[Chart], is_wide: bool = False, has_hint: bool = False) -> Html:
    """Charts next to each other where there is room, or each on the whole width. The hint says how to use them."""
    drawn = "".join(map(_figure, charts))
    if not drawn:
        return Html("")
    hint = paragraph(HINT, "quiet hint") if has_hint else ""
    return Html(f'<div class="charts{" wide" if is_wide else ""}">{drawn}</div>{hint}')


def _figure(chart: Chart) -> Html:
    inputs = {
        "log": '<label><input type="checkbox" name="log"> log scale</label>',
        "smooth": '<label>smoothing <input type="range" name="smooth" min="0" max="30" value="0"></label>',
    }
    controls = "".join(inputs[name] for name in chart.controls)
    note = f"<small>{escape(chart.note)}</small>" if chart.note else ""
    scroll = " scroll" if chart.is_scrolling else ""
    return Html(
        f"<figure><figcaption>{escape(chart.title)}{note}</figcaption>"
        f'<div class="controls">{controls}</div><div class="frame{scroll}"><div class="view"></div></div>'
        f"{embed_json(chart.spec)}</figure>"
    )


def embed_json(value: Any, name: str = "") -> Html:
    """JSON that scripts of the page read; no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = re.sub("[&<\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)
    identity = f' id="{name}"' if name else ""
    return Html(f'<script type="application/json"{identity}>{text}</script>')


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    is_searchable: bool = False,
    filters: Sequence[str] = (),
) -> Html:
    """A table that scrolls on its own if it is too wide. A click on a heading sorts by its column.

    Example:
        >>> "<b>" in table(["word"], [["<b>"]]), "&lt;b&gt;" in table(["word"], [["<b>"]])
        (False, True)
    """
    body = [list(row) for row in rows]
    if not body:
        return Html("")
    is_number = [all(_is_number(row[i]) or row[i] in ("", None) for row in body) for i in range(len(columns))]
    head = "".join(
        f'<th{" class=number" if right else ""}><button type="button">{escape(column)}</button></th>'
        for column, right in zip(columns, is_number, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in body)
    html = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
    html = f'<div class="scroll">{html}</div>'
    if not is_searchable:
        return Html(html)
    choices = "".join(
        f'<select aria-label="{escape(name)}" data-column="{list(columns).index(name)}">'
        f'<option value="">{escape(name)}: all</option></select>'
        for name in filters
    )
    tools = f'<div class="tools"><input type="search" placeholder="search" aria-label="search">{choices}</div>'
    return Html(f'<div class="searchable">{tools}{html}</div>')


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, Html):
        return f'<td class="text" dir="auto">{value}</td>'
    if _is_number(value):
        return f'<td class="number" data-value="{value}">{escape(write_value(value))}</td>'
    text = "" if value is None else str(value)
    kind = ' class="text"' if len(text) > TEXT_LENGTH else ""
    return f'<td{kind} dir="auto">{escape(text)}</td>'


def settings_table(values: Mapping[str, Any]) -> Html:
    """A table of nested settings, with dotted keys and without empty values."""
    return table(["key", "value"], [(key, str(value)) for key, value in flatten(values).items()], is_searchable=True)


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Dotted keys and values, without empty values.

    Example:
        >>> flatten({"a": {"b": 1, "c": None}, "d": [{"e": 2}]})
        {'a.b': 1, 'd.0.e': 2}
    """
    if isinstance(values, Mapping) and values:
        items: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list) and any(isinstance(value, Mapping) for value in values):
        items = enumerate(values)
    else:
        return {} if values in (None, {}, [], "") else {path: values}
    return {key: v for name, value in items for key, v in flatten(value, f"{path}.{name}".removeprefix(".")).items()}


def badge(text: str, kind: str) -> Html:
    """A word on a coloured ground. `kind` is "better", "worse" or "undecided"."""
    return Html(f'<span class="badge {kind}">{escape(text)}</span>')


def download(label: str, name: str, content: str, media_type: str) -> Html:
    """A link that saves a file, which is part of the page."""
    data = base64.b64encode(content.encode()).decode()
    return Html(f'<a download="{escape(name)}" href="data:{media_type};base64,{data}">{escape(label)}</a> ')


def code(text: str) -> Html:
    return Html(f"<pre><code>{escape(text)}</code></pre>")


def write_value(value: Any) -> str:
    """A value as people read it: numbers are short, whole ones have separators.

    Example:
        >>> write_value(1234567), write_value(0.123456), write_value(True)
        ('1,234,567', '0.1235', 'True')
    """
    if not _is_number(value):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else write_number(value)


def write_page(path: Path, title: str, body: Html, refresh: int | None = None) -> Path:
    """Writes a page that works offline. It loads itself again every `refresh` seconds."""
    here = resources.files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    variables = (
        f":root{{color-scheme:light dark;{light_variables()}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark_variables()}}}}}"
    )
    reload = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{reload}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{variables}{style}</style></head><body>{body}{embed_json(CONFIG, 'chart-config')}"
        f'<script type="module">{_script(javascript())}</script><script type="module">{_script(script)}</script>'
        f"</body></html>\n"
    )
    with atomic_file(path) as file:
        file.write(page.encode(errors="replace"))
    return path


def _script(text: str) -> str:
    return re.sub(r"<(/script|!--)", r"<\\\1", text, flags=re.IGNORECASE)
