"""A process that dies while a sharded checkpoint is written leaves the one before, with which the run goes on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from bertblocks.core.metrics_file import read_metrics
from tests.training.test_distributed import last_checkpoint, read_state


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the processes need /proc to know what they flush")
@pytest.mark.parametrize(("parallel", "processes"), [("fsdp", 2), ("hybrid run.shard_over=2", 4)])
def test_a_run_killed_in_sharded_saves_ends_with_the_same_bits(
    tmp_path: Path, warm_python: list[str], parallel: str, processes: int
) -> None:
    worker = [*warm_python, "-m", "tests.training.kill_shards_worker", str(tmp_path)]
    command = [*worker, f"run.parallel={parallel}", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    attempts = [json.loads(line) for line in (tmp_path / "killed.jsonl").read_text().splitlines()]
    assert [attempt["latest"] for attempt in attempts] == [None, *["step-00000004"] * 2, *["step-00000008"] * 2]
    assert attempts[2]["parts"] > 0, "the main process died before its folder had a part"
    assert [len(attempt["problems"]) for attempt in attempts] == [0, 0, 0, 0, 1]
    assert "step-00000012 is incomplete" in attempts[-1]["problems"][0]
    ours, theirs = (read_state(last_checkpoint(tmp_path / name)) for name in ("killed", "straight"))
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    losses, expected = (
        [(line["step"], line["loss"]) for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("killed", "straight")
    )
    assert losses == expected
    assert [step for step, _ in losses] == list(range(1, 17))
