"""Exact match and F1 of MLQA (Lewis et al., 2020), which know the articles and the writing of its languages."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

from bertblocks.tasks.answer.metrics import word_f1

#: The words or letters that are not compared, by language.
ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "hi": None,
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": "ال",
    "zh": None,
}


def answer_words(text: str, language: str) -> list[str]:
    """The words of an answer that are compared; in Chinese, every Chinese character is a word.

    Example:
        >>> answer_words("Der Fluss, rot!", "de"), answer_words("红河 red", "zh")
        (['fluss', 'rot'], ['红', '河', 'red'])
    """
    kept = "".join(letter for letter in text.lower() if not _is_punctuation(letter))
    if (articles := ARTICLES[language]) is not None:
        kept = re.sub(articles, " ", kept)
    if language == "zh":
        kept = re.sub(r"([\u4e00-\u9fa5])", r" \1 ", kept)
    return kept.split()


def _is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def answer_scores(gold: Sequence[str], predicted: str, language: str) -> tuple[float, float]:
    """Exact match and F1 with the best of the gold answers."""
    right = answer_words(predicted, language)
    exact, f1 = 0.0, 0.0
    for text in gold:
        left = answer_words(text, language)
        exact = max(exact, float(left == right))
        f1 = max(f1, word_f1(left, right))
    return exact, f1
