"""Losses that are not finite or much higher than before."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertblocks.core.metrics_file import read_metrics
from bertblocks.training.anomalies import Anomalies, find_anomaly
from bertblocks.training.loop import NonFiniteError, Trainer
from bertblocks.training.state import TrainState
from tests.training.helpers import make_trainer, train

BASE = ("phases.0.duration=16", "run.checkpoints.every=4", "run.checkpoints.keep=all", "run.log_every=1")
#: The step, counted from 0, whose loss is bad.
BAD = 9


def spoil(trainer: Trainer, factor: float, *steps: int) -> Trainer:
    real = trainer.task.losses

    def losses(model: Any, batch: Any) -> Any:
        scale = factor if trainer.state.step in steps else 1.0
        return {key: value * scale for key, value in real(model, batch).items()}

    trainer.task.losses = losses  # type: ignore[method-assign]
    return trainer


def weights(folder: Path, step: int = 16) -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / f"step-{step:08d}"
    return {**load_file(path / "model.safetensors"), **load_file(path / "optimizer.safetensors")}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def continue_from(folder: Path, source: Path, checkpoint: int, step: int) -> None:
    """A run whose newest checkpoint has the tensors of an earlier step and the counters of a later one."""
    target = folder / "checkpoints" / f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / f"step-{checkpoint:08d}", target)
    state = json.loads((target / "state.json").read_text())
    trainer = make_trainer(folder, *BASE)
    position = trainer.task.initial_position()
    for number in range(step):
        _, position = trainer.task.next_items(number, position)
    (target / "state.json").write_text(json.dumps({**state, "step": step, "position": position}))
    marker = json.loads((target / "complete.json").read_text())
    del marker["sha256"]["state.json"]
    (target / "complete.json").write_text(json.dumps(marker))


def test_a_skipped_step_leaves_the_weights_and_the_run_goes_on(tmp_path: Path) -> None:
    policy = "run.anomalies.non_finite=skip"
    spoil(make_trainer(tmp_path / "bad", *BASE, policy, "run.checkpoints.every=1"), math.nan, BAD).train()
    assert_equal(weights(tmp_path / "bad", BAD + 1), weights(tmp_path / "bad", BAD))
    continue_from(tmp_path / "good", tmp_path / "bad", BAD, BAD + 1)
    train(tmp_path / "good", *BASE)
    assert_equal(weights(tmp_path / "bad"), weights(tmp_path / "good"))
    lines = [line for line in read_metrics(tmp_path / "bad" / "metrics.jsonl") if "tokens" in line]
    assert [line["step"] for line in lines if "skipped_steps" in line] == [BAD + 1]
    assert all(math.isfinite(line.get("loss", 0.0)) and 0 <= line["data_wait"] <= 1 for line in lines)


@pytest.mark.parametrize("stop_at", [None, 8, 12])
def test_a_rewound_run_has_the_weights_of_the_checkpoint_before_and_later_data(
    tmp_path: Path, stop_at: int | None
) -> None:
    """Also if the run is interrupted before or after."""
    options = [*BASE, "run.anomalies.non_finite=rewind"]
    if stop_at is not None:
        with pytest.raises(KeyboardInterrupt):
            interrupt(spoil(make_trainer(tmp_path / "bad", *options), math.inf, BAD), stop_at).train()
    spoil(make_trainer(tmp_path / "bad", *options), math.inf, BAD).train()
    continue_from(tmp_path / "good", tmp_path / "bad", 8, BAD + 1)
    train(tmp_path / "good", *BASE)
    assert_equal(weights(tmp_path / "bad"), weights(tmp_path / "good"))


def interrupt(trainer: Trainer, step: int) -> Trainer:
    take = trainer._step

    def run(prepared: Any) -> Any:
        if prepared.step == step:
            raise KeyboardInterrupt
        return take(prepared)

    trainer._step = run  # type: ignore[method-assign]
    return trainer


def test_a_spike_is_found_by_its_distance_from_the_mean(tmp_path: Path) -> None:
    options = [*BASE, "run.anomalies={spike_factor: 3.0, window: 4, spike: stop}"]
    with pytest.raises(NonFiniteError, match=r"The loss of step 10 is .*, and the mean of steps before it"):
        spoil(make_trainer(tmp_path, *options), 5.0, BAD).train()


def test_the_mean_is_exponential_and_leaves_spikes_out() -> None:
    settings, state = Anomalies(spike_factor=2.0, window=4), TrainState()
    expected = 0.0
    for step, loss in enumerate([4.0, 2.0, 3.0, 3.0, 6.1, 5.9, 1.0]):
        found = find_anomaly(loss, 1.0, step, state, settings)
        is_spike = step >= 4 and loss > 2 * expected
        assert (found is not None) == is_spike == (loss == 6.1)
        if not is_spike:
            seen = min(state.loss_steps, 4)
            expected += (loss - expected) / seen
        assert state.loss_mean == pytest.approx(expected)
    assert find_anomaly(1.0, math.inf, 7, state, settings) == ("stop", "The gradient norm of step 8 is inf")


def test_too_many_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, *BASE, "run.anomalies={non_finite: skip, limit: 2}")
    with pytest.raises(NonFiniteError, match=r"loss of step 8 is nan.*Already 2 steps were skipped"):
        spoil(trainer, math.nan, 3, 5, 7, 9).train()
