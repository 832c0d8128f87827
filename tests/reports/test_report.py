"""Pages show what a run recorded, are made from its files alone, and escape all text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bertblocks.core.storage import lock_folder
from bertblocks.reports import charts
from bertblocks.reports.page import Html, embed_json, section, table, write_page
from bertblocks.reports.prediction_parts import label_scores
from bertblocks.reports.report import REFRESH_SECONDS, write_report, write_report_if_possible
from bertblocks.reports.runs import differing_settings, find_runs, read_run
from tests.helpers import expect_log
from tests.reports.sample_runs import (
    EVIL,
    HEBREW,
    answer_records,
    class_records,
    multi_records,
    number_records,
    pair_records,
    retrieval_records,
    tag_records,
    write_finetuning,
    write_pretraining,
)

VOID = {"meta", "link", "br", "input"}


class Page(HTMLParser):
    """Collects tags, text and the data of charts, and checks that every tag is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.charts: list[Any] = []
        self.links: list[Any] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href") or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag if tag != "script" else f"script {dict(attributes)['type']}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().split()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script application/json":
            self.charts.append(json.loads(data))
        elif self.open and self.open[-1] not in ("script module", "style"):
            self.words.append(data)

    def values(self, part: str) -> list[Any]:
        """The rows of the chart whose description begins with `part`."""
        chart = next(chart for chart in self.charts if chart.get("description", "").startswith(part))
        return chart["data"]["values"]


def page_of(folder: Path) -> Page:
    return Page(write_report([read_run(folder)]))


@pytest.fixture(autouse=True)
def bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the drawing library, whose 900 kB nothing here reads."""
    monkeypatch.setattr("bertblocks.reports.page.javascript", lambda: "")


def test_a_page_of_classes_begins_with_the_verdict(tmp_path: Path) -> None:
    page = page_of(write_finetuning(tmp_path / "films", "classify", class_records(3)))
    text = page.text
    verdict = "classify with minilm on train.csv · accuracy 0.93 (95% 0.9 to 0.96) against start 0.1"
    assert text.index("Fine-tuning: films") < text.index(verdict) < text.index("Learning curve")
    order = ["Learning curve", "Quality by label", "Confusion matrix", "Calibration", "Examples", "Reproduce"]
    assert [text.index(name) for name in order] == sorted(text.index(name) for name in order)
    for expected in ("linear probe", "2026-11-18", "epochs=3", "torch", "2.13.0", "ab" * 32, "2.5e-4", "bf16", EVIL):
        assert expected.replace("2.5e-4", "0.00025") in text, expected
    assert HEBREW in text


def test_the_learning_curve_begins_at_step_0_and_marks_the_best_checkpoint(tmp_path: Path) -> None:
    page = page_of(write_finetuning(tmp_path / "run", "classify", class_records(2), evaluations=1))
    assert [row["x"] for row in page.values("Accuracy from step 0")] == [0, 200]
    chart = next(chart for chart in page.charts if chart.get("description", "").startswith("Accuracy from step 0"))
    assert chart["layer"][-1]["data"]["values"][0]["x"] == 200
    assert {row["name"] for row in chart["layer"][-2]["data"]["values"]} == {"majority", "linear probe"}
    loss = page.values("Training loss")
    assert (len(loss), {row["dense"] for row in loss}) == (200, {True})
    titles = " ".join(chart.get("description", "") for chart in page.charts)
    for name in ("Learning rate", "Gradient norm", "Tokens per second", "Share of slots", "Peak memory"):
        assert name in titles
    assert "epoch" not in titles.lower()


def test_other_values_of_steps_have_charts_too(tmp_path: Path) -> None:
    folder = write_pretraining(tmp_path / "demo")
    line = {"step": 201, "tokens": 9, "learning_rate": 0.1, "loss": 1.0, "router_entropy": 0.5, "phase": "second"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    page = page_of(folder)
    assert [row["y"] for row in page.values("Router entropy")] == [0.5]
    assert "Phase" not in " ".join(chart.get("description", "") for chart in page.charts)


def test_label_scores_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import precision_recall_fscore_support

    records = class_records(5)
    gold, predicted = ([record[side] for record in records] for side in ("gold", "predicted"))
    rows = {row["label"]: row for row in label_scores([{g} for g in gold], [{p} for p in predicted])}
    labels = sorted(rows)
    expected = precision_recall_fscore_support(gold, predicted, labels=labels, zero_division=0)
    for name, values in zip(("precision", "recall", "F1", "examples"), expected, strict=True):
        assert [rows[label][name] for label in labels] == pytest.approx(values.tolist())
    assert [row["F1"] for row in label_scores([{g} for g in gold], [{p} for p in predicted])] == sorted(
        row["F1"] for row in rows.values()
    )


def test_calibration_compares_confidence_with_accuracy(tmp_path: Path) -> None:
    records = [
        {"text": "x", "gold": "a", "predicted": "a" if n % 4 else "b", "probability": 0.75, "gold_probability": 0.5}
        for n in range(40)
    ]
    page = page_of(write_finetuning(tmp_path / "run", "classify", records))
    points = page.values("Calibration")
    assert sum(point["accuracy"] * point["examples"] for point in points) == 30
    assert {round(point["confidence"], 6) for point in points} == {0.75}
    assert "Expected calibration error" in page.text


@pytest.mark.parametrize(
    ("task", "records", "metric", "expected"),
    [
        ("tag", tag_records, "f1", ["F1 by label", "Confusion matrix of spans", "Error rate by length"]),
        ("answer", answer_records, "f1", ["Questions by result", "Lost f1 by length"]),
        ("embed", pair_records, "spearman", ["Cosine against the gold score", "Difference of ranks by length"]),
        ("embed", retrieval_records, "ndcg@10", ["Rank of the right text", "Cosine of the right text"]),
        ("classify", multi_records, "f1_micro", ["F1 by label", "Error rate by length"]),
        ("classify", number_records, "spearman", ["Predicted against gold", "Error, relative"]),
    ],
)
def test_every_task_has_its_charts_and_examples(
    tmp_path: Path, task: str, records: Callable[[], list[dict[str, Any]]], metric: str, expected: list[str]
) -> None:
    page = page_of(write_finetuning(tmp_path / "run", task, records(), metric))
    titles = [chart.get("description", "") for chart in page.charts]
    for name in expected:
        assert any(title.startswith(name) for title in titles), (name, titles)
    assert EVIL in page.text
    assert not [link for link in page.links if link != "data:,"]


def test_entities_are_marked_in_their_sentence(tmp_path: Path) -> None:
    html = write_report([read_run(write_finetuning(tmp_path / "run", "tag", tag_records(), "f1"))]).read_text()
    assert "<mark class=gold>Anna Berg<sup>PER</sup></mark>" in html
    assert "<mark class=predicted>Anna<sup>PER</sup></mark>" in html


def test_passages_show_the_gold_and_the_predicted_span(tmp_path: Path) -> None:
    html = write_report([read_run(write_finetuning(tmp_path / "run", "answer", answer_records(), "f1"))]).read_text()
    assert "Anna lives <mark class=gold>in </mark><mark class=right>Oslo</mark>" in html
    assert "(no answer)" in html


def test_a_pretraining_page_shows_what_the_run_recorded(tmp_path: Path) -> None:
    page = page_of(write_pretraining(tmp_path / "demo"))
    assert page.tags.count("script") == len(page.charts) + 2  # the library and the page's own
    words = page.text
    expected = ("3.25", "7.5", "0.42", "0.05", EVIL, "cat", "4,096,000", "optimizer.lr", "hidden_size", "unigram 7.5")
    for text in expected:
        assert text in words, text
    assert [row["value"] for row in page.values("Loss by frequency")] == [7.5, 4.25]
    assert page.values("Loss by position")
    assert page.values("Held out loss from step 0")[0]["x"] == 0


def test_several_runs_share_charts_and_show_the_settings_that_differ(tmp_path: Path) -> None:
    first = write_finetuning(tmp_path / "a" / "run", "classify", [], settings={"seed": 1})
    second = write_finetuning(tmp_path / "b" / "run", "classify", [], settings={"seed": 2}, score=0.5, evaluations=5)
    path = write_report([read_run(first), read_run(second)], tmp_path / "both.html")
    page = Page(path)
    assert f"{first} is best: accuracy 0.93 against {second} 0.5" in page.text  # equal names get their folders
    curve = page.values("Accuracy on the evaluation examples")
    assert {row["series"] for row in curve} == {str(first), str(second)}
    assert len(curve) == 11 + 6
    assert differing_settings([read_run(first), read_run(second)]) == {"seed": [1, 2]}
    assert "seed 1 2" in page.text


def test_a_run_that_is_going_has_a_page_that_refreshes_itself(tmp_path: Path) -> None:
    folder = write_finetuning(tmp_path / "run", "classify", [], is_finished=False)
    assert read_run(folder).state == "stopped"
    lock = lock_folder(folder)
    import os

    try:
        html = write_report([read_run(folder)]).read_text()
    finally:
        os.close(lock)
    assert f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' in html
    assert "best so far: accuracy" in html
    assert 'http-equiv="refresh"' not in write_report([read_run(folder)]).read_text()


def test_seeds_share_a_page(tmp_path: Path) -> None:
    folder = write_finetuning(tmp_path / "run", "classify", [])
    for seed in (0, 1):
        write_finetuning(folder / f"seed-{seed}", "classify", [])
        (folder / f"seed-{seed}" / "finetune.json").unlink()
    run = read_run(folder)
    assert [seed.settings["seed"] for seed in run.seeds] == [0, 1]
    assert {row["series"] for row in page_of(folder).values("Accuracy on")} == {"seed-0", "seed-1"}
    assert [found.folder for found in find_runs([tmp_path])] == [folder]
    assert read_run(folder / "seed-1").settings["seed"] == 1


def test_a_missing_library_for_charts_costs_a_note_but_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.reports.page.javascript", charts.javascript.__wrapped__)
    monkeypatch.setattr("bertblocks.core.requirements._is_installed", lambda name: False)
    run = read_run(write_finetuning(tmp_path / "run", "classify", []))
    with expect_log(r"needs vl-convert-python.*pip install 'bertblocks\[training\]'.*bertblocks report"):
        write_report_if_possible(run)
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_run_is_complete_if_the_engine_of_the_charts_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where address space is short, the JavaScript engine of the library ends its process with a signal."""
    monkeypatch.setattr("bertblocks.reports.page.javascript", charts.javascript.__wrapped__)
    run = read_run(write_finetuning(tmp_path / "run", "classify", class_records(2)))
    monkeypatch.setattr(charts.sys, "executable", "/bin/false")
    with expect_log(r"vl-convert-python, which draws the charts, ended with 1: .* bertblocks report "):
        write_report_if_possible(run)
    assert not (tmp_path / "run" / "report.html").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write_finetuning(tmp_path / "run", "classify", class_records(2))
    (folder / "predictions.jsonl").write_text('{"gold": 1}\n{"go')
    with pytest.raises(ValueError, match=r"predictions.jsonl, line 2, is not valid JSON"):
        write_report([read_run(folder)])
    with pytest.raises(ValueError, match=r"does not hold a run: it has none of the files finetune\.json"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize(("value", "shown"), [(1234567, "1,234,567"), (0.123456, "0.1235"), (None, ""), ("a", "a")])
def test_cells_are_formatted_by_type(value: Any, shown: Any) -> None:
    assert f">{shown}</td>" in table(["x"], [[value]])


def test_no_text_can_end_its_element(tmp_path: Path) -> None:
    hostile = "</script><!-- \u2028 & <b>"
    html = embed_json({"x": hostile})
    assert "</script><!--" not in html
    assert json.loads(re.search(r">(.*)<", html)[1])["x"] == hostile
    path = write_page(tmp_path / "page.html", hostile, section(hostile, table([hostile], [[hostile]], True, [hostile])))
    page = Page(path)
    assert page.tags.count("script") == 3
    assert "b" not in page.tags
    assert isinstance(section("empty"), Html)
    assert section("empty") == ""
