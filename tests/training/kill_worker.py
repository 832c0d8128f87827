"""`FOLDER KILLS`: trains once in peace, and once in processes that are killed that many times.

Processes are forked, so that the time it takes to import torch is spent once. Even kills come from outside, a random
time after a random number of further steps; odd ones from inside a save, at one flush after the other.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from bertblocks.core.metrics_file import read_metrics
from tests.training import helpers

DROPOUT = 0.1
STEPS = 60


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_metrics(folder / "metrics.jsonl")), default=0)


def run_in_child(folder: Path, flush: int | None = None, further: int | None = None, seconds: float = 0.0) -> bool:
    """Whether a process finished. It is killed at a flush, or `seconds` after this many further steps."""
    begun = last_step(folder)
    child = os.fork()
    if child == 0:
        if flush is not None:
            helpers.die_at_flush(flush)
        helpers.train(folder, f"phases.0.duration={STEPS}", dropout=DROPOUT)
        os._exit(0)
    if further is not None:
        patience = time.monotonic() + 60
        while last_step(folder) < begun + further and time.monotonic() < patience:
            time.sleep(0.001)
        time.sleep(seconds)
        if last_step(folder) < STEPS:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a process failed by itself"
    return not os.WIFSIGNALED(status)


def main() -> None:
    torch.set_num_threads(1)
    folder, kills = Path(sys.argv[1]) / "killed", int(sys.argv[2])
    assert run_in_child(folder.with_name("straight"))
    chance = random.Random(0)
    killed = torn = 0
    for number in range(kills):
        if number % 2:
            finished = run_in_child(folder, flush=3 + number)
        else:
            finished = run_in_child(folder, further=chance.randint(0, 3), seconds=chance.uniform(0.0, 0.02))
        killed += not finished
        torn += bool(list(folder.glob("checkpoints/.step-*.partial")))
    run_in_child(folder)
    print(killed, torn)


if __name__ == "__main__":
    main()
