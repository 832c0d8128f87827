"""report.html is self-contained, shows what the run recorded, and escapes all text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bertblocks.reports.charts import heat_map
from bertblocks.reports.page import ReportSection, draw_curves, table, write_report
from bertblocks.reports.pretraining import write_pretraining_report

VOID = {"meta", "br", "rect", "line", "polyline", "circle"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[Any] = []
        self.tags: list[Any] = []
        self.words: list[Any] = []
        self.links: list[Any] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: Any, attributes: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "onload", "onclick")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: Any) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        self.words.append(data)


def write_metrics(folder: Any) -> None:
    lines = [
        {"step": step, "tokens": 100 * step, "loss": 5.0 / step, "learning_rate": 1e-3, "gradient_norm": 1.0,
         "tokens_per_second": 9000.0, "packing": 0.99, "seconds": 0.1 * step, "phase": "short"}
        for step in range(1, 30)
    ]  # fmt: skip
    lines.insert(10, {"step": 10, "held_out_loss": 3.0, "held_out_accuracy": 0.4})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 31, "lo')  # a run that was killed while it wrote


def test_report_curves_equal_the_recorded_metrics(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    charts = draw_curves(tmp_path / "metrics.jsonl")
    titles = [re.search(r"<title>(.*?)</title>", chart)[1] for chart in charts]
    assert titles == [
        "Loss", "Quality", "Learning rate", "Tokens per second", "Gradient norm", "Share of slots filled with tokens",
    ]  # fmt: skip
    # the training loss is a line of 29 points, the one evaluation a dot
    assert len(re.search(r'points="(.*?)"', charts[0])[1].split()) == 29
    assert charts[0].count("<circle") == 1


def test_a_pretraining_report_shows_what_the_run_recorded(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    metrics = {"held_out_loss": 3.25, "held_out_accuracy": 0.42, "pseudo_perplexity": 17.5}
    unigram = {"unigram_loss": 7.5, "unigram_accuracy": 0.05}
    evil = "<script>alert('&')</script>"
    path = write_pretraining_report(
        tmp_path,
        "demo",
        {**metrics, **unigram},
        [(f"a [MASK] {evil}", "cat", [(evil, 0.75), ("dog", 0.2)])],
        facts={"tokens": 4_096_000, "corpus <x>": "docstrings"},
        recipe={"optimizer": {"lr": 1e-3}},
        config={"hidden_size": 64},
    )
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert not page.links
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in text
    words = " ".join(page.words)
    for expected in ("3.25", "7.5", "0.42", "0.05", "17.5", evil, "cat", "4,096,000", "optimizer.lr", "hidden_size"):
        assert expected in words, expected


def test_callers_can_add_sections_to_a_report(tmp_path: Path) -> None:
    matrix = heat_map("Confusion", ["cat", "dog"], ["cat", "dog"], [[3, 1], [0, 4]], "true", "predicted")
    path = write_report(
        tmp_path,
        "Fine-tuning: <pets>",
        [ReportSection("Labels & scores", table(["label", "F1"], [["cat", 0.86], ["dog", True]]))],
        [ReportSection("Mistakes", matrix, is_folded=True)],
        note="no metrics.jsonl here",
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert {"Labels & scores", "Confusion", "Fine-tuning: <pets>", "0.86", "True"} <= set(page.words)
    assert "details" in page.tags
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("value", "shown"), [(1234567, "1,234,567"), (0.123456, "0.1235"), (None, "None"), ("a", "a")])
def test_cells_are_formatted_by_type(value: Any, shown: Any) -> None:
    assert f">{shown}</td>" in table(["x"], [[value]])
