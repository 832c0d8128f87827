"""`run.profile`: the trace holds exactly the chosen steps, and profiling changes no loss."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from tests.training.helpers import train


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_the_trace_holds_the_chosen_steps(tmp_path: Path) -> None:
    short = ["phases.0.duration=6", "run.evaluation.every=null"]
    train(tmp_path / "plain", *short)
    train(tmp_path / "profiled", *short, "run.profile=3")
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    names = [str(event.get("name")) for event in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert sorted({name for name in names if name.startswith("ProfilerStep")}) == [
        "ProfilerStep#2",
        "ProfilerStep#3",
        "ProfilerStep#4",
    ]
    steps = [name for name in names if name.startswith("Optimizer.step#")]
    assert len(steps) == 3
    row = next(line for line in (folder / "table.txt").read_text().splitlines() if "Optimizer.step#" in line)
    assert row.split()[-1] == "3", "the last column counts the calls"
    assert re.search(r"^Self CPU time total: ", (folder / "table.txt").read_text(), re.MULTILINE)


def test_a_run_that_ends_early_writes_what_it_profiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "four", "phases.0.duration=3", "run.evaluation.every=null", "run.profile=9")
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "four" / "profile" / "trace.json").read_text())["traceEvents"]
    }
    assert "ProfilerStep#2" in names
    with caplog.at_level(logging.WARNING, "bertblocks"):
        train(tmp_path / "two", "phases.0.duration=2", "run.evaluation.every=null", "run.profile=9")
    assert "nothing was profiled, because the run took only 2 steps" in caplog.text
    assert not (tmp_path / "two" / "profile").exists()
