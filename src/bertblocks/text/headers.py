"""Names of columns in common data sets, and whether the first row of a table is a header."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

#: Names that columns have in common data sets, best first, by role.
KNOWN_NAMES = {
    "text": [
        *("text", "sentence1", "text1", "premise", "question1", "query", "anchor", "question", "sentence"),
        *("review", "utterance", "comment", "tweet", "content"),
    ],
    "text_pair": [
        *("text_pair", "sentence2", "text2", "hypothesis", "question2", "positive", "passage", "sentence"),
        *("document", "positives", "pos"),
    ],
    "negative": ["negative", "hard_negative"],
    "query": ["query", "question", "anchor", "text", "sentence1", "text1", "sentence"],
    "document": [
        *("document", "documents", "passage", "positive", "positives", "pos", "text_pair", "sentence2", "text2"),
        *("answer", "response", "context", "text", "sentence"),
    ],
    "label": [
        *("label", "labels", "category", "class", "intent", "score", "target", "similarity", "sentiment", "stars"),
        *("relevance", "scores", "teacher_scores", "margin"),
    ],
    "words": ["words", "tokens"],
    "tags": ["tags", "ner_tags", "pos_tags", "labels"],
    "spans": ["spans", "entities"],
    "id": ["id"],
    "question": ["question"],
    "context": ["context", "passage"],
    "answers": ["answers", "answer"],
}
#: A first row with one of these words, or with two known names, is a header whatever the rows below look like.
HEADER_WORDS = {
    "text",
    "label",
    "labels",
    "category",
    "class",
    "score",
    "target",
    "question",
    "answer",
    "context",
    "id",
}
#: How many rows below the first one decide whether it is a header.
HEADER_ROWS = 100


def is_header(rows: Sequence[Sequence[Any]], expected: Collection[str] = ()) -> bool:
    """Whether the first row names the columns.

    It does if it has a name in `expected`, known names, or words above a column of numbers.
    """
    first, rest = [str(cell).strip().lower() for cell in rows[0]], rows[1 : HEADER_ROWS + 1]
    words = set(first)
    if words & {name.lower() for name in expected} or words & HEADER_WORDS:
        return True
    if len(words & {name for names in KNOWN_NAMES.values() for name in names}) > 1:
        return True
    if any(is_number(cell) or not cell for cell in first) or not rest:
        return False
    return any(all(len(row) > index and is_number(row[index]) for row in rest) for index in range(len(first)))


def is_number(value: Any) -> bool:
    """Whether a cell holds a finite number.

    Example:
        >>> is_number("4.5"), is_number("nan"), is_number("four"), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
