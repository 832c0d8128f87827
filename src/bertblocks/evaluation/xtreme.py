"""Tagging and question answering of XTREME (Hu et al., 2020): trained on English, scored on every language."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertblocks.core.requirements import require_packages
from bertblocks.core.storage import write_json_lines
from bertblocks.evaluation.mlqa import ARTICLES, answer_scores
from bertblocks.evaluation.suite import SuiteResult, choose, finetune_once, require_file
from bertblocks.tasks.answer.metrics import answering_scores
from bertblocks.tasks.base import Scores
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.tag.metrics import tagging_scores
from bertblocks.text.files import read_text
from bertblocks.text.squad import Question, read_questions
from bertblocks.text.tables import DataError
from bertblocks.text.tag_schemes import find_scheme, to_bio
from bertblocks.training.finetune import TASKS as KINDS


@dataclass(frozen=True)
class Tagged:
    """A sentence: its words and their tags."""

    words: list[str]
    tags: list[str]


def read_tags(path: Path, language: str) -> list[Tagged]:
    """Reads lines of a word, a tab and a tag, with blank lines between sentences; WikiAnn's words begin with `xx:`."""
    sentences: list[Tagged] = []
    current = Tagged([], [])
    for number, line in enumerate([*read_text(path).split("\n"), ""], start=1):
        cells = line.rstrip("\r").split("\t")
        if not line.strip():
            if current.words:
                sentences.append(current)
            current = Tagged([], [])
            continue
        if len(cells) != 2 or not cells[1].strip():
            raise DataError(
                f"{path} line {number}: {line[:80]!r} is not a word, a tab and a tag; XTREME's own test files have no "
                "tags, so take WikiAnn's and Universal Dependencies', or split=dev."
            )
        current.words.append(cells[0].removeprefix(f"{language}:"))
        current.tags.append(cells[1].strip())
    if not sentences:
        raise DataError(f"{path}: the file has no sentences.")
    return sentences


# ---------------------------------------------------------------------- scores


def entity_scores(predictor: Predictor, sentences: Sequence[Tagged], language: str) -> Scores:
    """Precision, recall and F1 of whole entities."""
    labels = list((predictor.model.config.id2label or {}).values())
    predicted = [to_bio(tags, find_scheme([labels]))[0] for tags in _predict_tags(predictor, sentences)]
    return tagging_scores([sentence.tags for sentence in sentences], predicted, has_entities=True)


def word_scores(predictor: Predictor, sentences: Sequence[Tagged], language: str) -> Scores:
    """Accuracy of words, and precision, recall and F1 as XTREME computes them for plain tags."""
    return plain_tag_scores([sentence.tags for sentence in sentences], _predict_tags(predictor, sentences))


def plain_tag_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """XTREME gives plain tags to seqeval, for which neighbours with the same tag are one entity.

    Tags that begin with S (SCONJ, SYM) are entities of one word each, because seqeval takes S for a prefix.

    Example:
        >>> plain_tag_scores([["NOUN", "NOUN", "VERB"]], [["NOUN", "ADJ", "VERB"]])["f1"]
        0.4
    """
    left, right = (
        [[f"{'S' if tag[:1] == 'S' else 'I'}-{tag}" for tag in tags] for tags in side] for side in (gold, predicted)
    )
    return tagging_scores(left, right, has_entities=True)


def _predict_tags(predictor: Predictor, sentences: Sequence[Tagged]) -> list[list[str]]:
    found = predictor.tag([sentence.words for sentence in sentences], level="words")
    return [[word.label for word in words] for words in found]


def squad_scores(predictor: Predictor, questions: Sequence[Question], language: str) -> Scores:
    """SQuAD's exact match and F1, in percent."""
    predicted = _predict_answers(predictor, questions)
    gold = {question.id: [answer.text for answer in question.answers] for question in questions}
    return answering_scores(gold, {q.id: text for q, text in zip(questions, predicted, strict=True)})


def mlqa_scores(predictor: Predictor, questions: Sequence[Question], language: str) -> Scores:
    """MLQA's exact match and F1, in percent."""
    predicted = _predict_answers(predictor, questions)
    pairs = [
        answer_scores([answer.text for answer in question.answers], text, language)
        for question, text in zip(questions, predicted, strict=True)
    ]
    exact, f1 = 100 * np.mean(pairs, axis=0)
    return {"exact_match": float(exact), "f1": float(f1)}


def _predict_answers(predictor: Predictor, questions: Sequence[Question]) -> list[str]:
    return [found.text for found in predictor.answer([(q.question, q.context) for q in questions])]


# ---------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class XtremeTask:
    """A task: its files, whose names hold `{language}` and `{split}`, and how they are read and scored."""

    name: str
    #: The fine-tuning task.
    kind: str
    files: tuple[str, ...]
    train: tuple[str, ...]
    dev: tuple[str, ...]
    read: Callable[[Path, str], Sequence[Any]]
    score: Callable[[Predictor, Sequence[Any], str], Scores]
    #: The scores whose mean is the task's score, and the factor that makes them percentages.
    metrics: tuple[str, ...]
    percent: float
    languages: tuple[str, ...] | None = None

    @property
    def model_folder(self) -> str:
        """Tasks with the same training data share a model."""
        return self.name if self.kind == "tag" else "squad"

    def find_languages(self, data: Path, split: str) -> dict[str, Path]:
        """The file of each language."""
        found: dict[str, Path] = {}
        for pattern in self.files:
            escaped = re.escape(pattern.format(language="LANGUAGE", split=split))
            name = re.compile(escaped.replace("LANGUAGE", "([a-z]{2,3})", 1).replace("LANGUAGE", r"\1"))
            for path in data.glob(pattern.format(language="*", split=split)):
                match = name.fullmatch(path.relative_to(data).as_posix())
                if match and path.is_file():
                    found.setdefault(match[1], path)
        if not found:
            wanted = ", ".join(pattern.format(language="xx", split=split) for pattern in self.files)
            raise DataError(f"{data} has no files of {self.name}; they are named {wanted}.")
        return dict(sorted(found.items()))


def _tag_files(folder: str, language: str, split: str) -> tuple[str, ...]:
    return (
        f"{folder}/{language}/{split}",
        f"{folder}/{language}/{split}.tsv",
        f"{folder}/{split}-{language}.tsv",
    )


def _tagging(name: str, score: Callable[..., Scores]) -> XtremeTask:
    files = [
        _tag_files(name, language, split)
        for language, split in (("{language}", "{split}"), ("en", "train"), ("en", "dev"))
    ]
    return XtremeTask(name, "tag", files[0], files[1], files[2], read_tags, score, ("f1",), 100.0)


def _answering(
    name: str, files: tuple[str, ...], score: Callable[..., Scores], languages: tuple[str, ...] | None
) -> XtremeTask:
    train, dev = ("squad/train-v1.1.json",), ("squad/dev-v1.1.json",)
    read = _read_questions
    return XtremeTask(name, "answer", files, train, dev, read, score, ("exact_match", "f1"), 1.0, languages)


def _read_questions(path: Path, language: str) -> list[Question]:
    return read_questions(path)


_MLQA = "{split}/{split}-context-{language}-question-{language}.json"
TASKS = {
    task.name: task
    for task in (
        _tagging("panx", entity_scores),
        _tagging("udpos", word_scores),
        _answering("xquad", ("xquad/xquad.{language}.json", "xquad.{language}.json"), squad_scores, None),
        _answering("mlqa", (f"mlqa/MLQA_V1/{_MLQA}", f"mlqa/{_MLQA}"), mlqa_scores, tuple(ARTICLES)),
    )
}


def run_xtreme(
    model: str | Path,
    data: str | Path,
    output: str | Path = "runs/xtreme",
    tasks: Sequence[str] = (),
    languages: Sequence[str] = (),
    split: str = "test",
    train: bool = True,
    progress: bool = False,
    **settings: Any,
) -> list[SuiteResult]:
    """Fine-tunes a model on English and scores it on all languages that have a file.

    A task's score is the mean over languages of F1, or of exact match and F1. Without `train`, the model is scored as
    it is. `settings` are those of fine-tuning; finished tasks are not run again.
    """
    names = choose("XTREME task", tasks, TASKS)
    # a bad file is found before any training
    examples_of = {name: _read_languages(TASKS[name], Path(data), languages, split) for name in names}
    results = []
    for name, examples in examples_of.items():
        task = TASKS[name]
        folder = _train(task, model, Path(data), Path(output), progress, settings) if train else model
        predictor = Predictor(folder, task=KINDS[task.kind].model_task, dtype=torch.float32)
        parts = {language: task.score(predictor, values, language) for language, values in examples.items()}
        score = task.percent * float(np.mean([[scores[key] for key in task.metrics] for scores in parts.values()]))
        results.append(SuiteResult(name, parts, score))
    return results


def _read_languages(task: XtremeTask, data: Path, languages: Sequence[str], split: str) -> dict[str, Sequence[Any]]:
    """The examples of each language."""
    require_packages(KINDS[task.kind].packages, f"evaluate {task.name}")
    files = task.find_languages(data, split)
    chosen = {language: files[language] for language in choose(f"language of {task.name}", languages, files)}
    return {language: task.read(path, language) for language, path in _supported(task, chosen)}


def _supported(task: XtremeTask, files: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    for language, path in files.items():
        if task.languages is not None and language not in task.languages:
            raise DataError(f"{path}: {task.name} has no metric for {language!r}; it has {', '.join(task.languages)}.")
        yield language, path


def _train(
    task: XtremeTask, model: str | Path, data: Path, output: Path, progress: bool, settings: Mapping[str, Any]
) -> Path:
    """Fine-tunes on the English files."""
    sources = [require_file([data / name for name in names], "XTREME") for names in (task.train, task.dev)]
    columns: dict[str, Any] = {}
    if task.kind == "tag":
        targets = [output / "data" / f"{task.name}-{part}.jsonl" for part in ("train", "dev")]
        for source, target in zip(sources, targets, strict=True):
            write_json_lines(target, (vars(sentence) for sentence in read_tags(source, "en")))
        sources, columns = targets, {"words": "words", "tags": "tags"}
    first, second = map(str, sources)
    options = {**columns, **settings}
    return finetune_once(task.kind, model, first, second, output / task.model_folder, progress, **options)
