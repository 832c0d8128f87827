"""A run that was killed, stopped or damaged ends with the weights of an uninterrupted run."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertblocks.core.metrics_file import read_metrics
from bertblocks.training.loop import Trainer
from bertblocks.training.optimizer_state import OPTIMIZER
from bertblocks.training.prefetch import PreparedStep
from bertblocks.training.step_results import StepResult
from tests.helpers import expect_log
from tests.training.helpers import make_trainer, train


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def assert_same_run(folder: Path, other: Path) -> None:
    """Checks that weights, moments and metrics are equal to the bit; only times and memory may differ."""
    for name in ("model.safetensors", OPTIMIZER):
        ours, theirs = (load_file(last_checkpoint(run) / name) for run in (folder, other))
        assert set(ours) == set(theirs)
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    timeless = [
        [
            {key: line[key] for key in line if "second" not in key and not key.startswith(("memory", "data_wait"))}
            for line in read_metrics(path)
        ]
        for path in (folder / "metrics.jsonl", other / "metrics.jsonl")
    ]
    assert timeless[0] == timeless[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with dropout."""
    folder = tmp_path_factory.mktemp("straight")
    train(folder, dropout=0.1)
    return folder


@pytest.mark.parametrize("kills", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_runs_killed_at_random_and_during_saves_end_with_the_same_weights(
    tmp_path: Path, kills: int, warm_python: list[str]
) -> None:
    command = [*warm_python, "-m", "tests.training.kill_worker", str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 + 20 * kills)
    assert done.returncode == 0, done.stderr
    killed, torn = map(int, done.stdout.split())
    assert killed >= kills - 2
    assert torn >= 1, "no kill left half a checkpoint behind"
    assert_same_run(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_a_signal_continues(tmp_path: Path, straight: Any, number: Any) -> None:
    trainer = make_trainer(tmp_path, dropout=0.1)

    def send() -> None:
        os.kill(os.getpid(), number)
        if number == signal.SIGTERM:  # a cluster and torchrun both pass it on
            os.kill(os.getpid(), number)

    timer = threading.Timer(0.2, send)
    timer.start()
    outcome = trainer.train()
    timer.join()
    assert outcome.signal == number
    assert 0 < outcome.state.step < 24
    assert last_checkpoint(tmp_path).name == f"step-{outcome.state.step:08d}"
    train(tmp_path, dropout=0.1)
    assert_same_run(tmp_path, straight)


def test_resuming_skips_a_damaged_checkpoint_and_logs_its_name(tmp_path: Path, straight: Any) -> None:
    train(tmp_path, dropout=0.1)
    newest = last_checkpoint(tmp_path)
    weights = newest / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-100] ^= 1
    weights.write_bytes(damaged)
    found = make_trainer(tmp_path).checkpoints.find_latest()
    assert found.path is not None
    assert found.path.name == "step-00000020"
    assert found.problems == [f"{newest} is damaged: model.safetensors has changed since it was written"]
    with expect_log(r"step-00000024 is damaged: .*; resuming from the previous one\.$"):
        train(tmp_path, dropout=0.1)
    assert_same_run(tmp_path, straight)


def test_gradient_accumulation_may_change_when_a_run_continues(tmp_path: Path) -> None:
    """Another split into micro-batches changes only rounding."""
    train(tmp_path / "whole")
    state = train(tmp_path / "split", "phases.0.duration=24", "run.micro_batch_tokens=64").state
    assert state.step == 24
    whole, split = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("whole", "split")
    )
    assert split == pytest.approx(whole, rel=1e-5)
    assert len(split) == 24


def test_metrics_after_the_checkpoint_are_removed(tmp_path: Path, straight: Any) -> None:
    train(tmp_path, dropout=0.1)
    newest = last_checkpoint(tmp_path)
    (newest / "complete.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "lo')
    train(tmp_path, dropout=0.1)
    assert_same_run(tmp_path, straight)


def test_state_is_plain_json(straight: Any) -> None:
    state = json.loads((last_checkpoint(straight) / "state.json").read_text())
    assert state["step"] == 24
    assert state["random"] == {"seed": 0, "step": 24}
    assert state["position"].keys() == {"phase", "pool", "row"}
    names = {path.suffix for path in last_checkpoint(straight).iterdir()}
    assert names == {".json", ".safetensors"}


class Clock:
    """A clock that advances by half a second whenever it is read: a step reads it three times, and takes one second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def test_a_run_ends_at_its_time_budget_and_resumes_with_the_elapsed_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.training.loop.time.perf_counter", Clock())
    settings = ["phases.0.duration=1000", "schedule={kind: linear, budget: 10 seconds}"]
    straight = train(tmp_path / "straight", *settings)
    assert (straight.state.step, straight.state.seconds) == (10, 10.0)
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "straight/metrics.jsonl") if "loss" in line]
    assert rates == pytest.approx([2e-3 * (1 - second / 10) for second in range(10)])
    trainer = make_trainer(tmp_path / "stopped", *settings)
    stop_after(trainer, 6)
    assert trainer.train().state.seconds == 7.0
    train(tmp_path / "stopped", *settings)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    assert train(tmp_path / "stopped", *settings).state.step == 10


def stop_after(trainer: Trainer, last: int) -> None:
    """Stops a run after a step as a signal would."""
    take_step = trainer._step

    def step(prepared: PreparedStep) -> StepResult:
        result = take_step(prepared)
        if prepared.step == last:
            trainer._signal = signal.SIGTERM
        return result

    trainer._step = step  # type: ignore[method-assign]


def test_a_gradual_theta_resumes_where_it_was(tmp_path: Path) -> None:
    settings = ["phases.0.duration=8", "phases.0.rope_theta={start: 1000.0, end: 8000.0}"]
    train(tmp_path / "straight", *settings)
    trainer = make_trainer(tmp_path / "stopped", *settings)
    stop_after(trainer, 4)
    trainer.train()
    assert trainer.model.config.rope_theta == 5000.0
    resumed = make_trainer(tmp_path / "stopped", *settings)
    resumed.train()
    assert resumed.model.config.rope_theta == 8000.0
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
