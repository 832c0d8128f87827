"""Pages in headless Chromium: no error, no request, nothing wider than the window, and controls that work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bertblocks.reports.report import write_report
from bertblocks.reports.runs import read_run
from tests.reports.browser import CHROMIUM, Browser, open_browser
from tests.reports.sample_runs import (
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

pytest.importorskip("websocket")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind, with 2 and 77 labels and 1 and 50 evaluations."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {
        "two": write_finetuning(folder / "two", "classify", class_records(2), evaluations=1),
        "many": write_finetuning(folder / "many", "classify", class_records(77, 1500), evaluations=50),
        "tag": write_finetuning(folder / "tag", "tag", tag_records(), "f1"),
        "answer": write_finetuning(folder / "answer", "answer", answer_records(), "f1"),
        "pairs": write_finetuning(folder / "pairs", "embed", pair_records(), "spearman"),
        "retrieval": write_finetuning(folder / "retrieval", "embed", retrieval_records(), "ndcg@10"),
        "multi": write_finetuning(folder / "multi", "classify", multi_records(), "f1_micro"),
        "numbers": write_finetuning(folder / "numbers", "classify", number_records(), "spearman"),
        "pretrain": write_pretraining(folder / "pretrain"),
        "going": write_finetuning(folder / "going", "classify", [], is_finished=False),
    }
    made = {name: write_report([read_run(path)]) for name, path in runs.items()}
    made["both"] = write_report([read_run(runs["two"]), read_run(runs["many"])], folder / "both.html")
    return made


NAMES = ("two", "many", "tag", "answer", "pairs", "retrieval", "multi", "numbers", "pretrain", "going", "both")


@pytest.mark.parametrize(("width", "mode"), [(1400, "light"), (400, "dark")])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_problem(browser: Browser, pages: dict[str, Path], name: str, width: int, mode: str) -> None:
    assert browser.open(pages[name], width, mode) == []
    assert browser.evaluate("[...document.querySelectorAll('figure .view')].every((view) => view.querySelector('svg'))")
    assert browser.evaluate("document.querySelectorAll('figure').length") > 3
    ink = {"light": "rgb(28, 30, 33)", "dark": "rgb(228, 230, 235)"}[mode]
    assert browser.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill") == ink
    assert browser.evaluate("document.querySelectorAll('script:not([type])').length") == 0


def test_search_and_filters_hide_rows(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    script = """(() => {
      const block = [...document.querySelectorAll('.searchable')].at(-2).querySelector('select')
        ? [...document.querySelectorAll('.searchable')].at(-2) : [...document.querySelectorAll('.searchable')].find(
          (b) => b.querySelector('select'));
      const shown = () => [...block.querySelectorAll('tbody tr')].filter((row) => !row.hidden);
      const set = (control, value) => { control.value = value; control.dispatchEvent(new Event('input')); };
      const all = shown().length;
      set(block.querySelector('select'), 'wrong');
      const wrong = shown();
      const onlyWrong = wrong.every((row) => row.cells[0].textContent === 'wrong');
      set(block.querySelector('input'), 'no such text');
      return [all, wrong.length, onlyWrong, shown().length];
    })()"""
    everything, wrong, only_wrong, none = browser.evaluate(script)
    assert everything > wrong > 0
    assert (only_wrong, none) == (True, 0)


def test_a_click_on_a_heading_sorts(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["many"])
    script = """(() => {
      const table = [...document.querySelectorAll('table')].find((t) => t.textContent.startsWith('labelprecision'));
      table.tHead.rows[0].cells[4].querySelector('button').click();
      return [...table.tBodies[0].rows].map((row) => Number(row.cells[4].dataset.value));
    })()"""
    counts = browser.evaluate(script)
    assert len(counts) == 77
    assert counts == sorted(counts)


def test_log_scale_smoothing_and_units_redraw_a_chart(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    script = """(async () => {
      const figure = document.querySelectorAll('figure')[1];
      const line = () => figure.querySelector('.mark-line path').getAttribute('d');
      const wait = () => new Promise((done) => setTimeout(done, 400));
      const first = line();
      const set = async (name, change) => {
        const control = figure.querySelector(`[name=${name}]`);
        change(control);
        control.dispatchEvent(new Event('input'));
        await wait();
      };
      await set('log', (control) => { control.checked = true; });
      const logged = line();
      await set('smooth', (control) => { control.value = 20; });
      const smoothed = line();
      const matrix = [...document.querySelectorAll('figure')].find((f) => f.querySelector('[type=radio]'));
      const texts = () => matrix.querySelector('.mark-text').textContent;
      const share = texts();
      matrix.querySelectorAll('[type=radio]')[1].click();
      await wait();
      return [new Set([first, logged, smoothed]).size, figure.querySelectorAll('.mark-line path').length,
              share.includes('%'), texts().includes('%')];
    })()"""
    assert browser.evaluate(script) == [3, 2, True, False]
    assert browser.problems(pages["two"]) == []


def test_a_printed_page_is_light_and_complete(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["pretrain"], mode="dark")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=dark)
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.call("Emulation.setEmulatedMedia", media="", features=dark)
    assert paper == "rgb(255, 255, 255)"
