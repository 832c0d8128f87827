"""`bertblocks runs` and `bertblocks report`: tables and pages of runs, from their files."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bertblocks.cli.main import app
from bertblocks.core.storage import lock_folder
from tests.reports.sample_runs import class_records, write_finetuning, write_pretraining


def run(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_finetuning(tmp_path / "runs" / "a_b", "classify", class_records(2), settings={"seed": 1})
    write_finetuning(tmp_path / "runs" / "deep" / "c", "classify", [], settings={"seed": 2}, is_finished=False)
    write_pretraining(tmp_path / "runs" / "demo")
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_with_what_differs(folder: Path) -> None:
    code, text = run("runs", folder)
    assert code == 0
    lines = {Path(line.split()[0]).name: line for line in text.splitlines() if str(folder) in line}
    assert list(lines) == ["a_b", "c", "demo"]
    assert "seed=1" in lines["a_b"]
    for expected in ("classify", "learning_rate=0.00025", "0.93", "0.9 to 0.96", "8333", "22.71M", "finished"):
        assert expected in lines["a_b"], expected
    assert "stopped" in lines["c"]
    assert "held_out_loss" in lines["demo"]


def test_runs_are_printed_for_programs_and_papers(folder: Path) -> None:
    code, text = run("runs", folder, "--json")
    rows = json.loads(text)
    assert code == 0
    assert [(row["settings"].get("seed"), row["state"]) for row in rows] == [
        (1, "finished"), (2, "stopped"), (None, "finished"),
    ]  # fmt: skip
    assert (rows[0]["score"], rows[0]["low"], rows[0]["high"]) == (0.93, 0.9, 0.96)
    _, text = run("runs", folder, "--csv")
    table = list(csv.DictReader(io.StringIO(text)))
    assert [line["seed"] for line in table] == ["1", "2", ""]
    assert float(table[0]["tokens_per_second"]) == pytest.approx(rows[0]["tokens_per_second"])
    _, text = run("runs", folder, "--latex")
    assert text.startswith("\\begin{tabular}{llllrrrrl}\n\\toprule\n")
    assert "a\\_b & classify & seed=1" in text.replace("learning\\_rate=0.00025 ", "")
    assert text.count("\\\\\n") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "nowhere"], "nowhere is not a folder; give folders that hold runs."),
        (["runs", "."], "There are no runs in ."),
        (["runs", ".", "--csv", "--json"], "Give only one of --json, --csv and --latex."),
        (["report", "."], ". does not hold a run: it has none of the files finetune.json, "),
    ],
)
def test_bad_folders_give_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run(*arguments)
    assert code == 1
    assert message in text
    assert "Traceback" not in text


def test_a_report_is_made_again_and_several_runs_share_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run("report", folder / "a_b")
    assert (code, text) == (0, f"Report: {folder / 'a_b' / 'report.html'}\n")
    monkeypatch.chdir(folder)
    code, text = run("report", "a_b", "deep/c", "demo")
    assert (code, text) == (0, "Report: runs.html\n")
    assert "3 runs of different kinds" in Path("runs.html").read_text()


def test_a_report_follows_a_run_until_it_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "deep" / "c"
    lock = lock_folder(path)
    pauses = []

    def end(seconds: float) -> None:
        pauses.append(seconds)
        assert 'http-equiv="refresh"' in (path / "report.html").read_text()
        os.close(lock)

    monkeypatch.setattr("time.sleep", end)
    code, text = run("report", path)
    assert code == 0
    assert "step 200" in text
    assert len(pauses) == 1
    assert 'http-equiv="refresh"' not in (path / "report.html").read_text()


def test_once_does_not_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_folder(folder / "deep" / "c")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    try:
        code, _ = run("report", folder / "deep" / "c", "--once")
    finally:
        os.close(lock)
    assert code == 0
