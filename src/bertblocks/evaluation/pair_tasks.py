"""Tasks that are solved by labelling pairs of texts: inference, multiple choice, and answers to judge or fill in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertblocks.core.requirements import require_packages
from bertblocks.core.storage import write_json_lines
from bertblocks.evaluation.suite import SuiteResult, finetune_once, require_file
from bertblocks.tasks.answer.metrics import answer_f1, exact_match
from bertblocks.tasks.base import Scores
from bertblocks.tasks.classify.metrics import classification_scores
from bertblocks.tasks.classify.predictions import Classification
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.predictor import Predictor
from bertblocks.text.tables import DataError, read_records

#: The labels of a pair that is right or wrong.
TRUE, FALSE = "true", "false"


@dataclass(frozen=True)
class Item:
    """A question: one pair of texts to label, or one for each candidate."""

    place: str
    pairs: list[tuple[str, str]]
    labels: list[str]
    #: The candidates as texts and the accepted answers, for tasks that compare texts.
    candidates: Sequence[str] = ()
    answers: Sequence[str] = ()


#: By item, the predicted label of each pair and its probabilities.
Predictions = Sequence[Sequence[Classification]]


@dataclass(frozen=True)
class PairTask:
    """A task of a suite: its files, how a row becomes an item, and its official metrics."""

    name: str
    #: The file of a split, relative to the suite's folder.
    file: Callable[[str], str]
    read: Callable[[Mapping[str, Any], str], list[Item]]
    score: Callable[[Sequence[Item], Predictions], Scores]
    #: The scores whose mean is the task's score.
    metrics: tuple[str, ...]
    #: A diagnostic set has no training data; the model of this task is scored on it.
    model_of: str | None = None
    evaluated: str = "val"
    #: Raises if the items of a file do not fit together.
    check: Callable[[Sequence[Item]], None] = lambda items: None

    def splits(self, train: bool) -> list[str]:
        """The files that a run reads."""
        return [*(["train"] if train and self.model_of is None else []), self.evaluated]


# ---------------------------------------------------------------------- metrics


def label_scores(items: Sequence[Item], predictions: Predictions) -> Scores:
    """Accuracy, F1 and Matthews correlation of one label per item."""
    gold = [item.labels[0] for item in items]
    predicted = [found[0].labels[0] for found in predictions]
    names = sorted({*gold, *predicted})
    left, right = ([names.index(label) for label in side] for side in (gold, predicted))
    return classification_scores(left, right, classes=max(len(names), 3))


def parity_scores(items: Sequence[Item], predictions: Predictions) -> Scores:
    """Accuracy, and the share of minimal pairs with equal predictions (gender parity; Poliak et al., 2018).

    The two rows of a pair follow each other, as `check_minimal_pairs` requires.
    """
    predicted = [found[0].labels[0] for found in predictions]
    same = [first == second for first, second in zip(predicted[::2], predicted[1::2], strict=True)]
    return {"accuracy": label_scores(items, predictions)["accuracy"], "gender_parity": float(np.mean(same))}


def check_minimal_pairs(items: Sequence[Item]) -> None:
    """Raises if two rows do not form a pair: their hypothesis is the same, and their premises differ in a pronoun."""
    for first, second in zip_longest(items[::2], items[1::2]):
        if second is None or first.pairs[0][1] != second.pairs[0][1]:
            raise DataError(f"{first.place}: the next row must have the same hypothesis, because rows form pairs.")


def choose_candidates(predictions: Predictions) -> list[int]:
    """The index of the candidate that is most probably true, for each item."""
    return [int(np.argmax([pair.scores[TRUE] for pair in found])) for found in predictions]


def choice_scores(items: Sequence[Item], predictions: Predictions) -> Scores:
    """How often the most probable candidate is the right one."""
    chosen = choose_candidates(predictions)
    right = [item.labels[index] == TRUE for item, index in zip(items, chosen, strict=True)]
    return {"accuracy": float(np.mean(right))}


def answer_set_scores(items: Sequence[Item], predictions: Predictions) -> Scores:
    """MultiRC's metrics: F1 over all answers (F1a), and questions with every answer judged right (exact match)."""
    from sklearn.metrics import f1_score

    gold = [[label == TRUE for label in item.labels] for item in items]
    predicted = [[pair.labels[0] == TRUE for pair in found] for found in predictions]
    flat = [[value for row in side for value in row] for side in (gold, predicted)]
    return {
        "f1a": float(f1_score(*flat, zero_division=0)),
        "exact_match": float(np.mean([a == b for a, b in zip(gold, predicted, strict=True)])),
    }


def cloze_scores(items: Sequence[Item], predictions: Predictions) -> Scores:
    """ReCoRD's metrics: SQuAD's F1 and exact match of the most probable candidate with its best answer."""
    scores = []
    for item, index in zip(items, choose_candidates(predictions), strict=True):
        text = item.candidates[index]
        scores.append([max(metric(answer, text) for answer in item.answers) for metric in (answer_f1, exact_match)])
    f1, exact = np.mean(scores, axis=0)
    return {"f1": float(f1), "exact_match": float(exact)}


# ---------------------------------------------------------------------- reading and running


def get(row: Mapping[str, Any], place: str, *path: str | int, kind: type = str) -> Any:
    """A value inside a row; a missing one, or one of another type, is an error that names it."""
    value: Any = row
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            value = None
            break
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {str: "a text", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}
        name = ".".join(map(str, path))
        raise DataError(f"{place}: {name!r} is {str(value)[:100]!r}; it must be {names[kind]}.")
    return value


def get_label(row: Mapping[str, Any], place: str, labels: Sequence[str]) -> str:
    """The label of a row, with booleans written in lower case."""
    value = row.get("label")
    label = str(value).lower() if isinstance(value, bool) else str(value)
    if label not in labels:
        raise DataError(f"{place}: the label is {value!r}; it must be one of {', '.join(labels)}.")
    return label


def run_pair_tasks(
    suite: str,
    tasks: Sequence[PairTask],
    model: str | Path,
    data: str | Path,
    output: Path,
    train: bool,
    progress: bool,
    **settings: Any,
) -> list[SuiteResult]:
    """Fine-tunes the model on each task and scores it; without `train`, the model is scored as it is."""
    require_packages(ClassifyTask.packages, f"evaluate {suite}")
    for task in tasks:
        for split in task.splits(train):
            read_items(task, data, split, suite)  # a bad file is found before any training
    results = []
    for task in tasks:
        items = read_items(task, data, task.evaluated, suite)
        folder = Path(model)
        if train:
            folder = output / (task.model_of or task.name)
            if task.model_of is None:
                first, second = (output / "data" / f"{task.name}-{split}.jsonl" for split in ("train", task.evaluated))
                write_items(first, read_items(task, data, "train", suite))
                write_items(second, items)
                columns = {"text": "text", "text_pair": "text_pair", "label": "label"}
                finetune_once("classify", model, str(first), str(second), folder, progress, **{**columns, **settings})
        predictor = Predictor(folder if train else model, task=ClassifyTask.model_task, dtype=torch.float32)
        scores = task.score(items, predict(predictor, items))
        score = 100 * sum(scores[name] for name in task.metrics) / len(task.metrics)
        results.append(SuiteResult(task.name, {task.evaluated: scores}, score, in_mean=task.model_of is None))
    return results


def read_items(task: PairTask, data: str | Path, split: str, suite: str) -> list[Item]:
    """The items of a split."""
    records = read_records(require_file([Path(data) / task.file(split)], suite))
    items = [item for index, row in enumerate(records.rows) for item in task.read(row, records.place(index))]
    task.check(items)
    return items


def write_items(path: Path, items: Sequence[Item]) -> None:
    """Writes every pair with its label, as fine-tuning reads them."""
    write_json_lines(
        path,
        (
            {"text": text, "text_pair": pair, "label": label}
            for item in items
            for (text, pair), label in zip(item.pairs, item.labels, strict=True)
        ),
    )


def predict(predictor: Predictor, items: Sequence[Item]) -> list[list[Classification]]:
    """Labels every pair of every item."""
    known = list((predictor.model.config.id2label or {}).values())
    for item in items:
        for label in item.labels:
            if label not in known:
                raise DataError(f"{item.place}: the label {label!r} is not one of the model's: {', '.join(known)}.")
    found = iter(predictor.classify([pair for item in items for pair in item.pairs]))
    return [[next(found) for _ in item.pairs] for item in items]
