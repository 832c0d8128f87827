"""Questions about passages: SQuAD's JSON, versions 1 and 2, and tables with the same fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertblocks.core.messages import short_repr
from bertblocks.text.columns import choose_columns
from bertblocks.text.files import bad_characters, format_by_name
from bertblocks.text.json_files import load_json
from bertblocks.text.records import DataError
from bertblocks.text.tables import Records, read_records


@dataclass(frozen=True)
class GoldAnswer:
    """An annotated answer and the character at which it starts in the passage."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    """A question about a passage, with its annotated answers."""

    id: str
    question: str
    context: str
    #: Empty for a question that the passage does not answer.
    answers: list[GoldAnswer]
    place: str


def read_questions(source: str | Path, given: Mapping[str, str] | None = None) -> list[Question]:
    """Reads the questions of a SQuAD file, or of a table with the columns question, context and answers.

    Answers of a table are SQuAD's `{"text": [...], "answer_start": [...]}` or a list of `{"text", "answer_start"}`.
    The context must have every answer at its offset.
    """
    questions = read_squad(source)
    if questions is None:
        records = read_records(source)
        columns = choose_columns(records, ["question", "context", "answers"], ["id"], given or {})
        questions = _checked([_read_row(records, index, columns) for index in range(len(records))], source)
    return questions


def read_squad(source: str | Path) -> list[Question] | None:
    """The questions of a file in SQuAD's own format, articles with paragraphs; None for any other file."""
    path = Path(source)
    content = load_json(path) if format_by_name(path) == "json" and path.is_file() else None
    articles = content.get("data") if isinstance(content, dict) else None
    if not isinstance(articles, list) or not all(isinstance(a, dict) and "paragraphs" in a for a in articles):
        return None
    numbered = enumerate(articles, start=1)
    questions = [question for number, article in numbered for question in _read_article(path, number, article)]
    return _checked(questions, source)


def _checked(questions: list[Question], source: str | Path) -> list[Question]:
    if not questions:
        raise DataError(f"{source}: the file has no questions.")
    seen: set[str] = set()
    for question in questions:
        _check(question)
        if question.id in seen:
            raise DataError(f"{question.place}: the id {short_repr(question.id)} occurs twice.")
        seen.add(question.id)
    return questions


def _read_article(path: Path, number: int, article: dict[str, Any]) -> list[Question]:
    questions = []
    for position, paragraph in enumerate(_objects(article, "paragraphs", f"{path} article {number}"), start=1):
        for entry in _objects(paragraph, "qas", f"{path} article {number} paragraph {position}"):
            place = f"{path} article {number} paragraph {position} question {short_repr(entry.get('id'))}"
            for key, holder in (("id", entry), ("question", entry), ("context", paragraph)):
                if not isinstance(holder.get(key), str):
                    raise DataError(f"{place}: {key!r} is {short_repr(holder.get(key))}; it must be a text.")
            answers = [] if entry.get("is_impossible") else entry.get("answers", [])
            questions.append(
                Question(entry["id"], entry["question"], paragraph["context"], _read_answers(answers, place), place)
            )
    return questions


def _objects(holder: dict[str, Any], key: str, place: str) -> list[dict[str, Any]]:
    values = holder.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise DataError(f"{place}: {key!r} is {short_repr(values)}; it must be a list of objects.")
    return values


def _read_row(records: Records, index: int, columns: Mapping[str, str]) -> Question:
    row, place = records.rows[index], records.place(index)
    for role in ("question", "context"):
        if not isinstance(row[columns[role]], str):
            raise DataError(f"{place}: {columns[role]!r} is {short_repr(row[columns[role]])}; it must be a text.")
    identity = str(row[columns["id"]]) if "id" in columns else str(records.numbers[index])
    answers = _read_answers(row[columns["answers"]] or [], place)
    return Question(identity, row[columns["question"]], row[columns["context"]], answers, place)


def _read_answers(answers: Any, place: str) -> list[GoldAnswer]:
    if isinstance(answers, dict) and isinstance(answers.get("text"), list):
        texts, starts = answers["text"], answers.get("answer_start") or []
        if not isinstance(starts, list):
            raise DataError(f"{place}: answer_start is {short_repr(starts)}; it must be a list of whole numbers.")
        if len(texts) != len(starts):
            raise DataError(f"{place}: there are {len(texts)} answers and {len(starts)} answer_start; each needs one.")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    elif isinstance(answers, dict):
        answers = [answers]
    if not isinstance(answers, list):
        raise DataError(
            f"{place}: the answers are {short_repr(answers)}; they must be a list of texts with answer_start."
        )
    for answer in answers:
        right = isinstance(answer, dict) and isinstance(answer.get("text"), str)
        if not right or not isinstance(answer.get("answer_start"), int):
            raise DataError(
                f"{place}: the answer {short_repr(answer)} must have a text and a whole number answer_start."
            )
    return [GoldAnswer(answer["text"], answer["answer_start"]) for answer in answers]


def _check(question: Question) -> None:
    for text in (question.question, question.context):
        if problem := bad_characters(text):
            raise DataError(f"{question.place}: {problem}.")
    for answer in question.answers:
        found = question.context[answer.start : answer.end]
        if answer.start < 0 or found != answer.text:
            raise DataError(
                f"{question.place}: the answer {short_repr(answer.text)} is not at answer_start {answer.start}, where "
                f"the context has {short_repr(found)}."
            )
