"""Processes that are regularly slower than the others in their own work are named."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertblocks.core.metrics_file import read_metrics
from bertblocks.training.distributed import World
from bertblocks.training.process_times import LINES, SLOW, ProcessTimes
from tests.helpers import expect_log
from tests.training.helpers import make_model
from tests.training.test_distributed import launch


def compare(times: ProcessTimes, step: int, computed: list[float], waited: list[float] | None = None) -> dict[str, Any]:
    """What process 0 of three says after all have told these times."""
    told = list(zip(waited or [0.0] * 3, computed, ("node-1", "node-1", "node-2"), strict=True))
    times.world = SimpleNamespace(size=3, is_main=True, device=torch.device("cpu"), gather=lambda _: told)  # type: ignore[assignment]
    return times.compare(step, 10.0)


@pytest.fixture
def times() -> ProcessTimes:
    return ProcessTimes(torch.nn.Linear(1, 1), World(0, 3, torch.device("cpu")))


def test_the_slowest_process_is_measured_and_named_after_some_lines(times: ProcessTimes) -> None:
    with expect_log(None):
        for step in range(1, LINES):
            assert compare(times, step, [4.0, 2.0, 5.0], [1.0, 5.0, 0.0]) == {
                "data_wait": 0.5,
                "data_wait_process": 1,
                "slowdown": 1.25,
                "slowdown_process": 2,
            }
    with expect_log(r"Process 2 on node-2 is slow: at step 30, its layers took 1\.50 times as long"):
        compare(times, 30, [4.0, 2.0, 6.0])
    with expect_log(None):
        compare(times, 40, [4.0, 2.0, 6.0])  # it is named once


def test_a_process_that_is_slow_now_and_then_is_not_named(times: ProcessTimes) -> None:
    with expect_log(None):
        for step in range(4 * LINES):
            is_slow = step % LINES != 0
            compare(times, step, [9.0 if is_slow else 4.0, 4.0, 4.9])


def test_layers_are_timed_in_training_only_and_hooks_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    for layer in model.model.encoder.layers:
        layer.attention.register_forward_hook(lambda *_: time.sleep(0.01))
    inputs = {"input_ids": torch.tensor([[1, 5, 6, 2]])}
    times = ProcessTimes(model, World(0, 2, torch.device("cpu")))
    with times:
        model.eval()(**inputs)
        times.add_step(0.0)
        assert times._computed == 0.0
        model.train()(**inputs)
        times.add_step(0.0)
        assert times._computed >= 0.02
    before = times._computed
    model(**inputs)
    times.add_step(0.0)
    assert times._computed == before


@pytest.mark.slow
def test_a_slow_process_is_named_and_one_that_waits_for_it_is_not(tmp_path: Path, warm_python: list[str]) -> None:
    """Two processes, one of which has slow layers: under DDP and FSDP2 the other waits for it in every step."""
    runs = [f"{tmp_path / kind} phases.0.duration=8 run.parallel={kind}" for kind in ("ddp", "fsdp")]
    log = launch(warm_python, " -- ".join(runs).split(), LAYER_SECONDS="0.1")
    assert log.count(f"Process 1 on {socket.gethostname()} is slow: at step {LINES}, its layers took") == 2
    assert "Process 0" not in log
    for kind in ("ddp", "fsdp"):
        lines = [line for line in read_metrics(tmp_path / kind / "metrics.jsonl") if "loss" in line]
        assert [line["slowdown_process"] for line in lines] == [1] * 8
        assert min(line["slowdown"] for line in lines) > SLOW
