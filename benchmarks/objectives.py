"""Replaced token detection compared with masked language modeling in equal time: `python -m benchmarks.objectives`.

For each seed two processes pretrain the demo's model on the demo's corpus at the same time, each with half of the CPUs
and the same time budget, one for each objective. Both models are then fine-tuned with default settings on the same
examples of two tasks. Finished runs are kept in `--folder`, so the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.inputs import data_folder
from benchmarks.tasks_by_size import PARTS, cut
from bertblocks import finetune
from bertblocks.core.storage import read_json, write_json
from bertblocks.training.finetune import FinetuneResult

OBJECTIVES = {
    "masked LM": "{kind: masked_lm, rate: 0.3}",
    "RTD": "{kind: replaced_tokens}",
}
#: The data sets, and how many examples per label each is cut to.
TASKS: dict[str, int | None] = {"banking77": 32, "ud-ewt": 64}
#: More steps than any budget allows.
MAX_STEPS = 1_000_000


def pretrain(folder: Path, seed: int, minutes: float) -> None:
    """Pretrains with both objectives at once and waits for both."""
    threads = max(1, (os.cpu_count() or 1) // len(OBJECTIVES))
    schedule = f"{{kind: wsd, warmup: 5%, decay: 30%, shape: sqrt, budget: {minutes:g} minutes}}"
    processes: list[tuple[list[str], subprocess.Popen[bytes]]] = []
    for name, objective in OBJECTIVES.items():
        options = [f"run.folder={run_folder(folder, name, seed)}", f"run.seed={seed}", f"objective={objective}"]
        options += [f"schedule={schedule}", f"phases.0.duration={MAX_STEPS} steps"]
        command = [sys.executable, "-m", "bertblocks", "pretrain", "demo", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        processes.append((command, subprocess.Popen(command, env=environment)))
    for command, process in processes:
        if process.wait() != 0:
            raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}.")


def run_folder(folder: Path, objective: str, seed: int) -> Path:
    return folder / f"{objective.replace(' ', '-')}-{seed}"


def finetune_on(name: str, data: Path, folder: Path, objective: str, seed: int) -> FinetuneResult:
    """Fine-tunes one pretrained model; seeds draw the same training examples for both objectives."""
    part, run = PARTS[name](data), run_folder(folder, objective, seed)
    train = part.write(cut(part, TASKS[name], seed), run / f"{name}-train")
    test = part.write(part.test, run / f"{name}-test")
    return finetune(part.task, run / "model", train, output=run / name, test=test, seed=seed)


def measure(data: Path, folder: Path, seeds: int, minutes: float) -> dict[str, Any]:
    """Test scores by task, objective and seed, from the result file as far as it has them."""
    results = folder / "results.json"
    known: dict[str, Any] = read_json(results) if results.is_file() else {}
    for seed in range(seeds):
        keys = {f"{name}/{objective}/{seed}": (name, objective) for name in TASKS for objective in OBJECTIVES}
        if keys.keys() <= known.keys():
            continue
        pretrain(folder, seed, minutes)
        for key, (name, objective) in keys.items():
            if key not in known:
                done = finetune_on(name, data, folder, objective, seed)
                known[key] = {"metric": done.metric, "score": done.test[done.metric]}
                write_json(results, known)
    return known


def make_table(known: dict[str, Any], seeds: int, minutes: float) -> Table:
    """Means over seeds, and the difference between the objectives with its 95 % interval by Student's t."""
    table = Table(title=f"Fine-tuning after {minutes:g} minutes of pretraining on the demo corpus, {seeds} seeds")
    for column in ("data", "metric", *OBJECTIVES, "difference", "95 % interval"):
        table.add_column(column)
    for name in TASKS:
        scores = {
            objective: np.array([known[f"{name}/{objective}/{seed}"]["score"] for seed in range(seeds)])
            for objective in OBJECTIVES
        }
        first, second = scores.values()
        low, high = interval(second - first)
        cells = [f"{values.mean():.4f} ± {values.std(ddof=1):.4f}" for values in scores.values()]
        metric = known[f"{name}/{next(iter(OBJECTIVES))}/0"]["metric"]
        table.add_row(name, metric, *cells, f"{(second - first).mean():+.4f}", f"{low:+.4f} to {high:+.4f}")
    return table


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean of a few paired differences.

    Example:
        >>> [round(float(bound), 3) for bound in interval(np.array([0.1, 0.2, 0.3]))]
        [-0.048, 0.448]
    """
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    return differences.mean() - half, differences.mean() + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with banking77/ and ud-ewt/")
    parser.add_argument("--folder", type=Path, default=Path("runs/objectives"), help="where runs and results go")
    parser.add_argument("--minutes", type=float, default=4.0, help="time of each pretraining run")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = data_folder(options.data)
    if data is None:
        raise SystemExit("--data is missing: a folder with banking77/ and ud-ewt/.")
    known = measure(data, options.folder, options.seeds, options.minutes)
    Console(width=140).print(make_table(known, options.seeds, options.minutes))


if __name__ == "__main__":
    main()
