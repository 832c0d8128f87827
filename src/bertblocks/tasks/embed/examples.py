"""Related texts: pairs, triplets and scored pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertblocks.text.headers import is_number
from bertblocks.text.tables import DataError, Records


@dataclass(frozen=True)
class EmbeddingExample:
    """A pair of related texts, a triplet whose third text is unrelated, or a pair with a similarity score."""

    texts: list[str]
    score: float | None
    place: str


def read_examples(records: Records, columns: Mapping[str, str]) -> list[EmbeddingExample]:
    """Reads the examples of a table: scored pairs with a label column, triplets with a negative column, else pairs."""
    examples = []
    for index, row in enumerate(records.rows):
        place = records.place(index)
        texts = [row[columns[role]] for role in ("text", "text_pair", "negative") if role in columns]
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"{place}: the text is {text!r}; it must be a string.")
        score = row[columns["label"]] if "label" in columns else None
        if "label" in columns and not is_number(score):
            raise DataError(f"{place}: the score is {score!r}; it must be a number.")
        examples.append(EmbeddingExample(texts, None if score is None else float(score), place))
    return examples


def find_scale(examples: Sequence[EmbeddingExample], source: str | Path) -> tuple[float, float]:
    """Returns the lowest and highest score, or (0, 1) if all scores could be cosines."""
    scores = [example.score for example in examples if example.score is not None]
    if min(scores) == max(scores):
        raise DataError(f"{source}: all scores are {scores[0]:g}; loss=cosine needs scores that differ.")
    return (0, 1) if min(scores) >= -1 and max(scores) <= 1 else (min(scores), max(scores))
