"""Aligns words and tokens by their characters, in the same way for WordPiece, byte-level BPE and SentencePiece.

Lists of words are joined by spaces and tokenized as running text. So a BPE model sees the space before every word, as
in pretraining, and tokenizers do not need `add_prefix_space`.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

#: The characters of a text from `start` up to `end`, which is exclusive.
Span = tuple[int, int]

#: Scripts written without spaces: Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese.
_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3041-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_WORDS_AND_SYMBOLS = re.compile(rf"(?P<letters>[^\W{_UNSPACED}]+)|\S")
_JOINER = "\u200d"
_MARKS = ("Mn", "Mc", "Me", "Cf")  # Unicode categories of characters that modify the one before


def words_of(text: str) -> list[Span]:
    """The words of running text: runs of letters and digits, and every other visible character on its own.

    Marks stay with the character they modify and emoji sequences stay whole. In scripts without spaces each character
    is a word.

    Example:
        >>> text = "O'Neill, 北京 cafe\u0301s"
        >>> [text[start:end] for start, end in words_of(text)] == ["O", "'", "Neill", ",", "北", "京", "cafe\u0301s"]
        True
    """
    words: list[Span] = []
    is_open = False  # the last word ends with a mark, so letters right after it continue the word
    for match in _WORDS_AND_SYMBOLS.finditer(text):
        start, end = match.span()
        touches = bool(words) and words[-1][1] == start
        is_mark = not match["letters"] and _is_mark(text[start])
        goes_on = is_open and (text[start - 1] == _JOINER or (match["letters"] and text[words[-1][0]].isalnum()))
        if touches and (is_mark or goes_on):
            words[-1] = (words[-1][0], end)
        else:
            words.append((start, end))
        is_open = is_mark and touches
    return words


def _is_mark(character: str) -> bool:
    is_skin_tone = "\U0001f3fb" <= character <= "\U0001f3ff"
    return is_skin_tone or unicodedata.category(character) in _MARKS


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """Joins words with spaces and returns the span of each in the result.

    Example:
        >>> join_words(["New York", "", "!"])
        ('New York  !', [(0, 8), (9, 9), (10, 11)])
    """
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), spans


def trim(text: str, span: Span) -> Span:
    """A span without the whitespace at its ends, which byte-level BPE and SentencePiece include in tokens.

    Example:
        >>> trim("to  be", (2, 6)), trim("a  b", (1, 3))
        ((4, 6), (3, 3))
    """
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


@dataclass(frozen=True)
class Alignment:
    """Which tokens belong to which words."""

    #: For every token the first word that it overlaps; None if it overlaps none, such as a second space.
    token_words: list[int | None]
    #: For every word the token that represents it: the first that starts in it, else one that covers it. None for a
    #: word without tokens, such as an empty one or one of control characters.
    word_tokens: list[int | None]


def align(words: Sequence[Span], offsets: Sequence[Span]) -> Alignment:
    """Aligns words, which are in order and do not overlap, with the tokens of the same text.

    Example:
        >>> align([(0, 2), (2, 5), (6, 6), (7, 8)], [(0, 1), (1, 3), (3, 5), (7, 8)])
        Alignment(token_words=[0, 0, 1, 3], word_tokens=[0, 2, None, 3])
    """
    ends = [end for _, end in words]
    token_words: list[int | None] = []
    covering: list[int | None] = [None] * len(words)
    own: list[int | None] = [None] * len(words)
    for token, (start, end) in enumerate(offsets):
        first = None
        for word in range(bisect_right(ends, start), len(words)):
            if words[word][0] >= max(end, start + 1):  # a lone space right before a word is its first token
                break
            if words[word][0] == words[word][1]:
                continue
            if first is None:
                first = word
                own[word] = token if own[word] is None else own[word]
            elif covering[word] is None:
                covering[word] = token
        token_words.append(first)
    return Alignment(token_words, [other if mine is None else mine for mine, other in zip(own, covering, strict=True)])


def spread_labels(
    alignment: Alignment, labels: Sequence[int], every_piece: bool = False, ignore: int = -100
) -> list[int]:
    """Turns labels of words into labels of tokens: of the token that represents a word, or of every token of it.

    Example:
        >>> alignment = align([(0, 4), (5, 6)], [(0, 2), (2, 4), (5, 6)])
        >>> spread_labels(alignment, [7, 8]), spread_labels(alignment, [7, 8], every_piece=True)
        ([7, -100, 8], [7, 7, 8])
    """
    if every_piece:
        return [ignore if word is None else labels[word] for word in alignment.token_words]
    spread = [ignore] * len(alignment.token_words)
    for word, token in enumerate(alignment.word_tokens):
        if token is not None and alignment.token_words[token] == word:
            spread[token] = labels[word]
    return spread
