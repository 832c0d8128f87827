"""What a predictor gives back. All are plain dataclasses: `dataclasses.asdict` makes them JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Classification:
    """What a classifier says of a text.

    `labels` holds the likeliest one, or for multi-label models those at or above the threshold. `scores` are
    probabilities, highest first; of a regression they are its numbers, and there are no labels.
    """

    labels: list[str]
    scores: dict[str, float]
    is_regression: bool = False


@dataclass(frozen=True)
class Tagged:
    """A stretch of the input with a label.

    `start` and `end` count characters of a text, or words where words were given. `text` is what lies between.
    """

    label: str
    start: int
    end: int
    text: str
    score: float


@dataclass(frozen=True)
class Answer:
    """Characters `start` to `end` of the context. The score is the sum of the start's and the end's logits."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Answers:
    """The best answer to a question, those that were nearly as good, and the score of there being none.

    Where there is no answer `text` is empty, and `start` and `end` are 0.
    """

    text: str
    start: int
    end: int
    score: float
    no_answer_score: float
    best: list[Answer]


@dataclass(frozen=True)
class Filling:
    """A token for a mask, and its probability."""

    token: str
    id: int
    score: float
