"""Several processes, launched by torchrun, train the same weights as one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertblocks.core.metrics_file import read_metrics
from tests.training.helpers import make_experts, train

#: Two processes on one CPU wait for each other at every step.
SHORT = "phases.0.duration=12"
NUMBERS = ("loss", "gradient_norm", "held_out_loss", "tokens")
MUON = ["optimizer.kind=muon", "optimizer.qk_clip=0.01", "run.ema=0.9"]
STABLE = ["optimizer.kind=stable_adamw", "optimizer.weight_decay=0.001"]
#: What one process does, and what two do in its place.
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "ddp": ([], []),
    "fsdp": ([], ["run.parallel=fsdp"]),
    "fsdp with accumulation": ([], ["run.parallel=fsdp", "run.micro_batch_tokens=64"]),
    "ddp with accumulation": ([], ["run.micro_batch_tokens=64"]),
    "muon": (MUON, [*MUON, "run.parallel=fsdp"]),
    "stable adamw": (STABLE, [*STABLE, "run.parallel=fsdp"]),
    "ddp with experts": ([], []),
    "fsdp with experts": ([], ["run.parallel=fsdp"]),
    "ddp after one process": ([], []),
    "fsdp after one process": ([], ["run.parallel=fsdp"]),
}


def home(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-")


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def take_back(folder: Path) -> None:
    """Makes the last checkpoint incomplete."""
    (last_checkpoint(folder) / "complete.json").unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    """All runs of two processes, in one launch."""
    folder = tmp_path_factory.mktemp("processes")
    runs = []
    for name, (_, overrides) in RUNS.items():
        if "after" in name:
            train(home(folder, name), SHORT, "run.checkpoints.every=6")
            take_back(home(folder, name))
        runs.append(" ".join([str(home(folder, name)), SHORT, *overrides]))
    launch(warm_python, " -- ".join(runs).split())
    return folder


def launch(python: list[str], arguments: list[str], *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    done = subprocess.run(
        [*command, "--no-python", *python, "-m", "tests.training.helpers", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def curve(folder: Path) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line[key] for line in lines for key in NUMBERS if key in line]


def assert_same(folder: Path, alone: Path) -> None:
    assert curve(folder) == pytest.approx(curve(alone), rel=1e-4)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(last_checkpoint(run) / name) for run in (folder, alone))
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_weights_of_one(folder: Any, tmp_path: Path, name: Any) -> None:
    train(tmp_path, SHORT, *RUNS[name][0], model=make_experts(home(folder, name)))
    assert_same(home(folder, name), tmp_path)


def test_a_sharded_run_continues_on_one_process(folder: Any, tmp_path: Path) -> None:
    train(tmp_path, SHORT)
    sharded = home(folder, "fsdp with accumulation")
    take_back(sharded)
    train(sharded, SHORT)
    assert_same(sharded, tmp_path)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_run_continues(tmp_path: Path) -> None:
    """torchrun restarts all processes if one dies; they continue from the latest checkpoint."""
    train(tmp_path / "alone")
    launch([sys.executable], [str(tmp_path / "killed")], "--max-restarts=1", DIE_AT_STEP="10")
    assert_same(tmp_path / "killed", tmp_path / "alone")
    assert [line["step"] for line in read_metrics(tmp_path / "killed" / "metrics.jsonl") if "loss" in line] == [
        *range(1, 25)
    ]
