"""Trackers contain what was logged: tensorboard and trackio for real, wandb through a replacement."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bertblocks.training.trackers import get_trackers

CONFIG = {"name": "tiny", "optimizer": {"lr": 1e-3}}


def test_tensorboard_contains_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def logged() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    (tracker,) = get_trackers(["tensorboard"], tmp_path, "tiny")
    tracker.start(CONFIG)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 10.0 - step, "lr": 0.1})
    tracker.close()
    assert logged() == [(1, 9.0), (2, 8.0), (3, 7.0)]
    # a run that was stopped after its last checkpoint, at step 2, repeats step 3
    (tracker,) = get_trackers(["tensorboard"], tmp_path, "tiny")
    tracker.start(CONFIG, step=2)
    tracker.log(3, {"loss": 5.0})
    tracker.close()
    assert logged() == [(1, 9.0), (2, 8.0), (3, 5.0)]


def test_trackio_contains_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (tracker,) = get_trackers(["trackio"], tmp_path, "tiny")
    tracker.start(CONFIG)
    for step in (1, 2):
        tracker.log(step, {"loss": 10.0 - step})
    tracker.close()
    logged = SQLiteStorage.get_logs("bertblocks", "tiny")
    assert [(line["step"], line["loss"]) for line in logged if "loss" in line] == [(1, 9.0), (2, 8.0)]


class Run:
    """The parts of what wandb.init returns that we use."""

    def __init__(self, **options: Any) -> None:
        self.options, self.finished = options, False
        self.lines: list[tuple[int, dict]] = []

    def log(self, metrics: dict, step: int) -> None:
        self.lines.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


def test_wandb_is_called_correctly_and_a_restart_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []

    def init(**options: Any) -> Run:
        runs.append(Run(**options))
        return runs[-1]

    module: Any = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for folder in ("a", "a", "b"):
        (tracker,) = get_trackers(["wandb"], tmp_path / folder, "tiny")
        tracker.start(CONFIG)
        tracker.log(7, {"loss": 2.0})
        tracker.close()
    assert runs[0].lines == [(7, {"loss": 2.0})]
    assert runs[0].finished
    assert runs[0].options["config"] == CONFIG
    assert runs[0].options["resume"] == "allow"
    first, second, other = (run.options["id"] for run in runs)
    assert first == second != other


def test_a_missing_tracker_package_raises_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"trackers needs wandb, .*pip install 'bertblocks\[trackers\]'"):
        get_trackers(["wandb"], tmp_path, "tiny")


def test_only_requested_trackers_are_imported(tmp_path: Path) -> None:
    import subprocess

    code = "import sys, bertblocks.training.trackers; print({'tensorboard', 'wandb', 'trackio'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
