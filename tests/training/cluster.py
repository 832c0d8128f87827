"""`FOLDER --seconds S --steps N`: four processes train in peace, and again while they are killed, stopped and cut off.

torchrun's agent starts the processes in a network namespace of their own and starts them again when one ends; they are
forked, so that a restart does not import torch again. While the second run lasts, and for at most S seconds, a random
process gets SIGKILL or SIGSTOP, or the network goes down for some seconds. Then the weights, the optimizer and the
averages of both runs must be equal, bit by bit. The long version:

    python -m tests.training.cluster /tmp/cluster --seconds 600 --steps 600
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from bertblocks.core.metrics_file import read_metrics
from bertblocks.training.distributed import join
from tests.training import helpers
from tests.training.test_distributed import last_checkpoint, read_state

PROCESSES = 4
OPTIONS = ["run.parallel=hybrid", "run.shard_over=2", "run.ema=0.9", "run.checkpoints.every=5", "run.hang_after=8"]
#: Seconds that a step takes at least, so that events find the processes in their steps.
STEP_SECONDS = 0.05


def work(folder: Path, steps: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    helpers.delay_steps(STEP_SECONDS)
    helpers.train(folder, f"phases.0.duration={steps}", *OPTIONS, dropout=0.1, world=join("cpu"))


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """The agent in a network namespace of its own."""
    script = 'ip link set lo up && exec "$@"'
    command = [sys.executable, "-m", "tests.training.cluster", str(folder), "--launch", f"--steps={steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            ["unshare", "--map-root-user", "--net", "sh", "-c", script, "sh", *command], env=environment, stderr=log
        )


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children()
    return []


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_metrics(folder / "metrics.jsonl")), default=0)


def disturb(process: subprocess.Popen[bytes], chance: random.Random, event: str) -> bool:
    """Whether the event has happened: a process may be gone before it."""
    if event == "cut":
        for state in ("down", "up"):
            enter = ["nsenter", f"--target={process.pid}", "--user", "--preserve-credentials", "--net"]
            subprocess.run([*enter, "ip", "link", "set", "lo", state], check=True)
            time.sleep(chance.uniform(1, 12) if state == "down" else 0)
        return True
    victims = workers_of(process)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        victim = chance.choice(victims)
        if event == "kill":
            victim.kill()
            return True
        victim.suspend()
        time.sleep(chance.uniform(1, 12))
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()
        return True
    return False


def run_disturbed(folder: Path, steps: int, seconds: float, seed: int) -> dict[str, int]:
    """How many events of each kind there were."""
    chance, counts = random.Random(seed), dict.fromkeys(("kill", "stop", "cut"), 0)
    process, begun = start(folder, steps), 0.0
    try:
        while process.poll() is None:
            known = last_step(folder) if folder.exists() else 0
            goal = known + chance.randint(1, 12)
            while process.poll() is None and (step := last_step(folder)) < min(goal, steps):
                time.sleep(0.1)
            begun = begun or time.monotonic()  # of the first step
            passed = time.monotonic() - begun
            if process.poll() is None and passed < seconds and step < steps - 5:
                event = min(counts, key=lambda name: (counts[name], chance.random()))
                print(f"{passed:.0f} s, step {step}: {event}", flush=True)
                counts[event] += disturb(process, chance, event)
        assert process.returncode == 0, f"torchrun ended with {process.returncode}; see {folder.with_suffix('.log')}"
    finally:
        if process.poll() is None:
            for child in [*workers_of(process), psutil.Process(process.pid)]:
                child.send_signal(signal.SIGKILL)
        process.wait()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launch", action="store_true")
    arguments = parser.parse_args()
    if arguments.launch:
        helpers.launch_forked(work, arguments.folder, arguments.steps, processes=PROCESSES, restarts=10_000)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    peace, war = arguments.folder / "peace", arguments.folder / "war"
    assert start(peace, arguments.steps).wait() == 0
    counts = run_disturbed(war, arguments.steps, arguments.seconds, arguments.seed)
    ours, theirs = (read_state(last_checkpoint(folder)) for folder in (war, peace))
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(theirs)} tensors differ, such as {different[0]}"
    print(counts, len(theirs), "tensors are equal after", last_step(war), "steps")


if __name__ == "__main__":
    main()
