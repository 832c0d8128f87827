"""Related texts: pairs, with or without negatives, scored pairs, and single texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bertblocks.tasks.retrieval.examples import read_texts
from bertblocks.text.headers import is_number
from bertblocks.text.tables import DataError, Records


@dataclass(frozen=True)
class EmbeddingExample:
    """A text, a related text and any number of unrelated ones; or a pair with a similarity score; or a single text."""

    texts: list[str]
    score: float | None
    place: str
    #: The cosine that `loss=cosine` trains for.
    cosine: float | None = None


def read_examples(records: Records, columns: Mapping[str, str], negatives: Sequence[str]) -> list[EmbeddingExample]:
    """Reads the examples of a table. The second text and negatives may be lists; each second text gives an example."""
    examples = []
    for index, row in enumerate(records.rows):
        place = records.place(index)
        first = row[columns["text"]]
        if not isinstance(first, str):
            raise DataError(f"{place}: the text is {first!r}; it must be a string.")
        seconds = read_texts(row[columns["text_pair"]], "text", place) if "text_pair" in columns else []
        others = [text for column in negatives for text in read_texts(row[column], column, place, is_needed=False)]
        score = row[columns["label"]] if "label" in columns else None
        if "label" in columns and not is_number(score):
            raise DataError(f"{place}: the score is {score!r}; it must be a number.")
        number = None if score is None else float(score)
        for texts in [[first, second, *others] for second in seconds] or [[first]]:
            examples.append(EmbeddingExample(texts, number, place))
    return examples


def scale_scores(
    examples: Sequence[EmbeddingExample], source: str | Path
) -> tuple[list[EmbeddingExample], tuple[float, float]]:
    """Gives examples the cosines of their scores: from 0 for the lowest to 1 for the highest, or unchanged.

    Returns the lowest and highest score too, or (0, 1) if all scores could be cosines.
    """
    scores = [example.score for example in examples if example.score is not None]
    if min(scores) == max(scores):
        raise DataError(f"{source}: all scores are {scores[0]:g}; loss=cosine needs scores that differ.")
    low, high = (0.0, 1.0) if min(scores) >= -1 and max(scores) <= 1 else (min(scores), max(scores))
    scaled = zip(examples, scores, strict=True)
    return [replace(example, cosine=(score - low) / (high - low)) for example, score in scaled], (low, high)
