"""Several processes, launched by torchrun, train the same weights as one process."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from bertblocks.cli.main import app
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


def launch(python: list[str], arguments: list[str], *options: str, processes: int = 2, **environment: str) -> str:
    """Returns what the processes wrote to stderr."""
    number = f"--nproc-per-node={processes}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", number, *options]
    done = subprocess.run(
        [*command, "--no-python", *python, "-m", "tests.training.helpers", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def curve(folder: Path) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line[key] for line in lines for key in NUMBERS if key in line]


def assert_same(folder: Path, alone: Path) -> None:
    assert curve(folder) == pytest.approx(curve(alone), rel=1e-4)
    assert_same_values(folder, alone)


def assert_same_values(folder: Path, alone: Path) -> None:
    ours, theirs = (read_state(last_checkpoint(run)) for run in (folder, alone))
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4)


def read_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, put together by hand if each process wrote its parts."""
    if not (checkpoint / "shards").is_dir():
        files = {"model": "model", "optimizer": "optimizer", "ema": "ema"}
        found = {kind: checkpoint / f"{name}.safetensors" for kind, name in files.items()}
        return {
            f"{kind}/{name}": value
            for kind, path in found.items()
            if path.is_file()
            for name, value in load_file(path).items()
        }
    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for path in (checkpoint / "shards").iterdir():
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                parts.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    # FSDP2 divides the first dimension
    assert not any(any(offset[1:]) for placed in parts.values() for offset, _ in placed)
    ordered = {name: [part for _, part in sorted(placed, key=lambda entry: entry[0])] for name, placed in parts.items()}
    return {name: torch.cat(joined) if len(joined) > 1 else joined[0] for name, joined in ordered.items()}


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


#: Runs of four processes; the last one continues in two.
FOUR = {
    "ddp": ["run.parallel=ddp"],
    "fsdp": ["run.parallel=fsdp", "run.ema=0.9"],
    "hybrid": ["run.parallel=hybrid", "run.shard_over=2", "run.ema=0.9"],
    "muon hybrid": [*MUON, "run.parallel=hybrid", "run.shard_over=2"],
}


@pytest.mark.slow
def test_four_processes_give_the_weights_of_one_and_two_continue_them(tmp_path: Path) -> None:
    runs = [" ".join([str(home(tmp_path, name)), SHORT, "run.checkpoints.every=6", *FOUR[name]]) for name in FOUR]
    launch([sys.executable], " -- ".join(runs).split(), processes=4)
    for name, overrides in FOUR.items():
        alone = home(tmp_path, f"alone {name}")
        train(alone, SHORT, *[text for text in overrides if "parallel" not in text and "shard_over" not in text])
        assert_same(home(tmp_path, name), alone)
        take_back(home(tmp_path, name))
    launch([sys.executable], " -- ".join(runs).split(), processes=2)
    for name in FOUR:
        assert_same(home(tmp_path, name), home(tmp_path, f"alone {name}"))


def test_a_process_writes_only_its_parts_and_convert_puts_them_together(folder: Any, tmp_path: Path) -> None:
    checkpoint = last_checkpoint(home(folder, "fsdp"))
    files = sorted((checkpoint / "shards").iterdir())
    sizes = [sum(load_file(file)[name].numel() for name in load_file(file)) for file in files]
    assert len(files) == 2
    assert max(sizes) < 1.1 * min(sizes)
    assert not list(checkpoint.glob("*.safetensors"))
    marked = json.loads((checkpoint / "complete.json").read_text())["sha256"]
    assert {f"shards/{file.name}" for file in files} < set(marked)
    assert marked[f"shards/{files[1].name}"] == hashlib.sha256(files[1].read_bytes()).hexdigest()
    assert {path.suffix for path in checkpoint.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    done = CliRunner().invoke(app, ["convert", str(checkpoint), str(tmp_path / "whole")])
    assert done.exit_code == 0, done.output
    whole, state = load_file(tmp_path / "whole" / "model.safetensors"), read_state(checkpoint)
    assert all(torch.equal(value, state[f"model/{name}"]) for name, value in whole.items())


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_run_continues(tmp_path: Path) -> None:
    """torchrun restarts all processes if one dies; they continue from the latest checkpoint."""
    train(tmp_path / "alone")
    launch([sys.executable], [str(tmp_path / "killed")], "--max-restarts=1", DIE_AT_STEP="10")
    assert_same(tmp_path / "killed", tmp_path / "alone")
    assert [line["step"] for line in read_metrics(tmp_path / "killed" / "metrics.jsonl") if "loss" in line] == [
        *range(1, 25)
    ]


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_node(folder: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """One of one to two nodes, each with a process. The first is the one that the others meet at."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    rendezvous += [f"--rdzv-conf=last_call_timeout=2,is_host={int(log.stem == 'first')}"]
    nodes = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=20", "--local-addr=127.0.0.1", *rendezvous]
    arguments = [str(folder), "phases.0.duration=48", "run.parallel=fsdp", "run.checkpoints.every=4"]
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "STEP_SECONDS": "0.3"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *nodes, "-m", "tests.training.helpers", *arguments],
            env={**os.environ, **own}, stderr=file,
        )  # fmt: skip


def kill_node(node: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            process.kill()
    node.wait()


@pytest.mark.slow
def test_nodes_that_are_lost_and_added_continue_the_run(tmp_path: Path) -> None:
    """The second node is killed and comes back; the run goes on with one process, then with two again."""
    train(tmp_path / "alone", "phases.0.duration=48")
    folder, port = tmp_path / "elastic", find_port()

    def wait_for_step(step: int, patience: float = 240) -> None:
        end = time.monotonic() + patience
        while max((line["step"] for line in read_metrics(folder / "metrics.jsonl")), default=0) < step:
            assert time.monotonic() < end, (tmp_path / "first.log").read_text()[-3000:]
            time.sleep(0.2)

    nodes = [start_node(folder, port, tmp_path / "first.log"), start_node(folder, port, tmp_path / "second.log")]
    try:
        wait_for_step(8)
        kill_node(nodes[1])
        wait_for_step(16)
        nodes.append(start_node(folder, port, tmp_path / "third.log"))
        assert nodes[0].wait(300) == 0, (tmp_path / "first.log").read_text()[-3000:]
    finally:
        for node in nodes:
            kill_node(node)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 49)]
    waited_on = ["data_wait_process" in line for line in lines if "loss" in line]  # only lines of several processes
    assert waited_on[:4] == [True] * 4
    assert False in waited_on
    assert waited_on[-1]
    assert_same_values(folder, tmp_path / "alone")
