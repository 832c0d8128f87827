"""MMLU (Hendrycks et al., 2021) for masked language models: which option has the highest score at a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from bertblocks.core.settings import Section, read_section
from bertblocks.evaluation.language_models import SpanScorer
from bertblocks.evaluation.suite import SuiteResult, choose, require_file
from bertblocks.text.records import ReadOptions
from bertblocks.text.tables import DataError, read_records

LETTERS = "ABCD"


class MmluSettings(Section):
    shots: Annotated[int, Field(ge=0)] = 0
    """Solved questions of the dev file in front of each question. The last are left out if the text gets too long."""
    score: Literal["letter", "text"] = "letter"
    """letter: the options are listed, and a mask stands for the answer's letter. text: the mean log-probability of an
    option's tokens after the question, each masked alone."""
    subjects: list[str] = []
    """Default: all that have a test file."""


@dataclass(frozen=True)
class Problem:
    """A question with its options and the index of the right one."""

    question: str
    options: list[str]
    answer: int

    def write(self, with_options: bool) -> str:
        """The question as the benchmark's own code writes it, up to where the answer follows."""
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=True)]
        return "\n".join([self.question, *(lines if with_options else []), "Answer:"])


def read_problems(path: Path) -> list[Problem]:
    """Reads a csv file without header: the question, four options and the letter of the right one."""
    records = read_records(path, ReadOptions(format="csv", delimiter=",", quote='"', header=False))
    problems = []
    for index, row in enumerate(records.rows):
        cells = [str(cell) for cell in row.values()]
        if len(cells) != 6:
            raise DataError(
                f"{records.place(index)}: the row has {len(cells)} columns; it must have the question, four options "
                "and a letter."
            )
        if cells[5] not in LETTERS or not cells[5]:
            raise DataError(f"{records.place(index)}: the answer is {cells[5]!r}; it must be A, B, C or D.")
        problems.append(Problem(cells[0], cells[1:5], LETTERS.index(cells[5])))
    return problems


def run_mmlu(model: str | Path, data: str | Path, **settings: Any) -> list[SuiteResult]:
    """Scores a masked language model by subject. Two results: the accuracy over questions, which is the benchmark's
    own average, and the mean over subjects."""
    chosen = read_section(MmluSettings, settings, "evaluate mmlu")
    known = sorted(path.name.removesuffix("_test.csv") for path in Path(data, "test").glob("*_test.csv"))
    if not known:
        raise DataError(f"{Path(data, 'test')} has no files like anatomy_test.csv; --data must be MMLU's folder.")
    scorer = SpanScorer(model)
    letters = find_letters(scorer) if chosen.score == "letter" else []
    right: dict[str, list[bool]] = {}
    for subject in choose("subject", chosen.subjects, known):
        problems = read_problems(Path(data, "test", f"{subject}_test.csv"))
        shots: list[Problem] = []
        if chosen.shots:
            path = require_file([Path(data, "dev", f"{subject}_dev.csv")], "MMLU")
            shots = read_problems(path)[: chosen.shots]
            if len(shots) < chosen.shots:
                raise DataError(f"{path} has {len(shots)} questions; shots is {chosen.shots}.")
        right[subject] = [answer(scorer, letters, subject, shots, problem) == problem.answer for problem in problems]
    parts = {
        subject: {"accuracy": float(np.mean(values)), "questions": len(values)} for subject, values in right.items()
    }
    pooled = float(np.mean([value for values in right.values() for value in values]))
    by_subject = float(np.mean([scores["accuracy"] for scores in parts.values()]))
    return [SuiteResult("mmlu", parts, 100 * pooled), SuiteResult("mean over subjects", {}, 100 * by_subject, False)]


def find_letters(scorer: SpanScorer) -> list[int]:
    """The tokens of the letters after `Answer:`."""
    before = scorer.tokenizer.tokenize(["Answer:"])[0].ids
    found = [tokens.ids for tokens in scorer.tokenizer.tokenize([f"Answer: {letter}" for letter in LETTERS])]
    tokens = [ids[-1] for ids in found if ids[:-1] == before]
    if len(set(tokens)) < len(LETTERS):
        raise DataError("The letters A to D are not four different tokens after 'Answer:'; use score=text.")
    return tokens


def answer(scorer: SpanScorer, letters: Sequence[int], subject: str, shots: Sequence[Problem], problem: Problem) -> int:
    """The index of the option with the highest score."""
    by_letter = bool(letters)
    longest = "" if by_letter else max(problem.options, key=len)
    for count in range(len(shots), -1, -1):
        prompt = write_prompt(subject, shots[:count], problem, by_letter)
        ids = scorer.tokenizer.tokenize([f"{prompt} {longest}".strip()])[0].ids
        if len(ids) < scorer.capacity:
            break
    if by_letter:
        logits = scorer.mask_logits(ids)
        return int(logits[list(letters)].argmax())
    scores = [float(scorer.log_likelihoods(f"{prompt} {option}", len(prompt) + 1).mean()) for option in problem.options]
    return int(np.argmax(scores))


def write_prompt(subject: str, shots: Sequence[Problem], problem: Problem, by_letter: bool) -> str:
    """The benchmark's prompt: a heading, solved questions and the question."""
    heading = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
    answers = [LETTERS[shot.answer] if by_letter else shot.options[shot.answer] for shot in shots]
    solved = [f"{shot.write(by_letter)} {text}" for shot, text in zip(shots, answers, strict=True)]
    return "\n\n".join([heading, *solved, problem.write(by_letter)])
