"""Replaced token detection compared with masked language modeling at equal cost: `python -m benchmarks.objectives`.

The cost of pretraining is its CPU time, which other work on the machine changes little. Short runs measure the CPU
time of a step of each objective, and each objective then gets the number of steps that fits the same budget. For each
seed two processes pretrain the demo's model on the demo's corpus at the same time, one for each objective, and both
models are fine-tuned with default settings on the same examples of two tasks. Finished runs are kept in `--folder`, so
the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.inputs import data_folder
from benchmarks.tasks_by_size import PARTS, cut
from bertblocks import finetune, pretrain, read_recipe
from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.storage import read_json, write_json

#: The options of each objective. The demo's learning rate suits masked language modeling; with it the discriminator of
#: RTD never detects a token, so RTD has that of ELECTRA-small.
OBJECTIVES = {
    "masked LM": ["objective={kind: masked_lm, rate: 0.3}", "optimizer.lr=2e-3"],
    "RTD": ["objective={kind: replaced_tokens}", "optimizer.lr=5e-4"],
}
#: The data sets, and how many examples per label each is cut to.
TASKS: dict[str, int | None] = {"banking77": 32, "ud-ewt": 64}
#: Steps of the runs that measure the CPU time of a step, and how many each measurement covers.
CALIBRATION_STEPS, CALIBRATION_WINDOW = 60, 5
#: The measured CPU seconds of a step, in the folder of a run.
SECONDS = "seconds.json"


def train(corpus: Path, folder: Path, seed: int, run: tuple[str, int]) -> float:
    """Pretrains with an objective for some steps. Returns the CPU seconds of a step: the median of several windows."""
    objective, steps = run
    own = run_folder(folder, objective, seed)
    times: list[tuple[int, float]] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            times.append((event["step"], time.process_time()))
        if len(times) > 1:
            costs = [(after - before) / (end - start) for (start, before), (end, after) in itertools.pairwise(times)]
            write_json(own / SECONDS, {"median": statistics.median(costs), "mean": statistics.mean(costs)})

    options = [f"run.folder={own}", f"run.seed={seed}", *OBJECTIVES[objective]]
    options += [f"phases.0.duration={steps} steps", f"run.log_every={CALIBRATION_WINDOW}", "run.evaluation.every=null"]
    options += [f"tokenizer={{load: {corpus / 'tokenizer'}}}"]
    options += [f"corpus.sources=[{{name: docstrings, tokens: {corpus / 'docstrings'}}}]"]
    if pretrain(read_recipe("demo", options), on_event=note).signal is not None:
        raise KeyboardInterrupt
    return read_json(own / SECONDS)["median"]


def run_folder(folder: Path, objective: str, seed: int) -> Path:
    return folder / f"{objective.replace(' ', '-')}-{seed}"


def finetune_on(name: str, data: Path, folder: Path, seed: int, objective: str) -> dict[str, Any]:
    """Fine-tunes one pretrained model; seeds draw the same training examples for both objectives."""
    part, run = PARTS[name](data), run_folder(folder, objective, seed)
    examples = part.write(cut(part, TASKS[name], seed), run / f"{name}-train")
    test = part.write(part.test, run / f"{name}-test")
    done = finetune(part.task, run / "model", examples, output=run / name, test=test, seed=seed, overwrite=True)
    return {"metric": done.metric, "score": done.test[done.metric]}


def for_both(work: Callable[[Any], Any], values: list[Any]) -> dict[str, Any]:
    """Calls a function for both objectives at the same time, each in a process with half of the CPUs."""
    threads = max(1, allowed_cpus() // len(OBJECTIVES))
    with ProcessPoolExecutor(len(OBJECTIVES), get_context("spawn"), torch.set_num_threads, (threads,)) as processes:
        return dict(zip(OBJECTIVES, processes.map(work, values), strict=True))


def prepare_corpus(folder: Path) -> Path:
    """The folder of the demo's tokens and tokenizer, which a run of one step writes and all others read."""
    pretrain(read_recipe("demo", [f"run.folder={folder}", "phases.0.duration=1 steps", "run.evaluation.every=null"]))
    return folder / "data"


def calibrate(corpus: Path, folder: Path, minutes: float) -> dict[str, Any]:
    """The CPU seconds of a step and the steps that fit the budget, by objective."""
    runs = [(objective, CALIBRATION_STEPS) for objective in OBJECTIVES]
    seconds = for_both(partial(train, corpus, folder, 0), runs)
    steps = {objective: round(60 * minutes / cost) for objective, cost in seconds.items()}
    return {"minutes": minutes, "seconds": seconds, "steps": steps}


def measure(data: Path, folder: Path, seeds: int, minutes: float) -> dict[str, Any]:
    """The calibration, and test scores by task, objective and seed, from the result file as far as it has them."""
    results = folder / "results.json"
    known: dict[str, Any] = read_json(results) if results.is_file() else {}
    corpus = prepare_corpus(folder / "corpus")
    if "calibration" not in known:
        known["calibration"] = calibrate(corpus, folder / "calibration", minutes)
        write_json(results, known)
    calibration = known["calibration"]
    if calibration["minutes"] != minutes:
        raise SystemExit(f"{folder} holds runs of {calibration['minutes']:g} minutes; set another --folder.")
    for seed in range(seeds):
        wanted = [name for name in TASKS if f"{name}/{seed}" not in known]
        if wanted:
            for_both(partial(train, corpus, folder, seed), list(calibration["steps"].items()))
        for name in wanted:
            known[f"{name}/{seed}"] = for_both(partial(finetune_on, name, data, folder, seed), list(OBJECTIVES))
            write_json(results, known)
    return known


def make_cost_table(known: dict[str, Any], folder: Path, seeds: int) -> Table:
    """What each objective cost: the calibration, and the mean over its runs."""
    calibration = known["calibration"]
    table = Table(title=f"Pretraining of {calibration['minutes']:g} minutes of CPU time")
    for column in ("objective", "seconds per step", "steps", "minutes used"):
        table.add_column(column)
    for objective, steps in calibration["steps"].items():
        costs = [read_json(run_folder(folder, objective, seed) / SECONDS)["mean"] for seed in range(seeds)]
        used = statistics.mean(costs) * steps / 60
        table.add_row(objective, f"{calibration['seconds'][objective]:.3f}", f"{steps:,}", f"{used:.2f}")
    return table


def make_score_table(known: dict[str, Any], seeds: int) -> Table:
    """Means over seeds, and the difference between the objectives with its 95 % interval by Student's t."""
    table = Table(title=f"Fine-tuning afterwards, {seeds} seeds")
    for column in ("data", "metric", *OBJECTIVES, "difference", "95 % interval"):
        table.add_column(column)
    for name in TASKS:
        runs = [known[f"{name}/{seed}"] for seed in range(seeds)]
        scores = [np.array([run[objective]["score"] for run in runs]) for objective in OBJECTIVES]
        first, second = scores
        low, high = interval(second - first)
        cells = [f"{values.mean():.4f} ± {values.std(ddof=1):.4f}" for values in scores]
        metric = runs[0][next(iter(OBJECTIVES))]["metric"]
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
    parser.add_argument("--minutes", type=float, default=4.0, help="CPU time of each pretraining run")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = data_folder(options.data)
    if data is None:
        raise SystemExit("--data is missing: a folder with banking77/ and ud-ewt/.")
    known = measure(data, options.folder, options.seeds, options.minutes)
    console = Console(width=140)
    console.print(make_cost_table(known, options.folder, options.seeds))
    console.print(make_score_table(known, options.seeds))


if __name__ == "__main__":
    main()
