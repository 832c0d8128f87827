"""Answers as spans of a text: characters to tokens for training, and scores to characters for prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bertblocks.text.alignment import Span


def tokens_of_span(offsets: Sequence[Span], start: int, end: int) -> tuple[int, int] | None:
    """The first and last token of the characters from `start` up to `end`; None if tokens do not cover all of them.

    A window with only a part of an answer does not contain the answer.

    Example:
        >>> tokens_of_span([(0, 3), (4, 6), (6, 9)], 4, 9), tokens_of_span([(0, 3), (4, 6)], 4, 9)
        ((1, 2), None)
    """
    touching = [index for index, (left, right) in enumerate(offsets) if left < end and right > start and left < right]
    if not touching or offsets[touching[0]][0] > start or offsets[touching[-1]][1] < end:
        return None
    return touching[0], touching[-1]


def best_spans(
    start_scores: np.ndarray, end_scores: np.ndarray, n_best: int, max_tokens: int
) -> list[tuple[int, int, float]]:
    """The `n_best` spans of at most `max_tokens` tokens by the sum of both scores: first token, last token, sum.

    The search is exact. No span starts or ends at a token with a score of -inf.

    Example:
        >>> best_spans(np.array([0.0, 2.0, 1.0]), np.array([3.0, 0.0, 1.0]), n_best=2, max_tokens=2)
        [(0, 0, 3.0), (1, 2, 3.0)]
    """
    length = len(start_scores)
    if length == 0 or n_best < 1 or max_tokens < 1:
        return []
    width = min(max_tokens, length)
    padded = np.concatenate([end_scores, np.full(width - 1, -np.inf)])
    sums = start_scores[:, None] + np.lib.stride_tricks.sliding_window_view(padded, width)  # [first, last - first]
    flat = sums.ravel()
    count = min(n_best, int(np.isfinite(flat).sum()))
    if count == 0:
        return []
    # all candidates that tie with the last one are sorted too, so that the choice does not depend on the partition
    threshold = np.partition(flat, len(flat) - count)[len(flat) - count]
    candidates = np.flatnonzero(flat >= threshold)
    chosen = candidates[np.argsort(-flat[candidates], kind="stable")][:count]
    return [(int(i // width), int(i // width + i % width), float(flat[i])) for i in chosen]


@dataclass(frozen=True)
class ScoredSpan:
    """The characters of a context from `start` up to `end`, with the sum of their start and end scores."""

    start: int
    end: int
    score: float


def best_answers(
    windows: Iterable[tuple[np.ndarray, np.ndarray, Sequence[Span]]], n_best: int = 20, max_tokens: int = 30
) -> list[ScoredSpan]:
    """The best answers over the windows of a context, each given by start scores, end scores and token offsets.

    A span that occurs in several windows counts once, with its highest score.

    Example:
        >>> offsets = [(0, 2), (3, 5)]
        >>> best_answers([(np.array([1.0, 0.0]), np.array([0.0, 2.0]), offsets)], n_best=1)
        [ScoredSpan(start=0, end=5, score=3.0)]
    """
    best: dict[Span, float] = {}
    for start_scores, end_scores, offsets in windows:
        has_text = np.array([start < end for start, end in offsets], dtype=bool)
        starts = np.where(has_text, start_scores, -np.inf)
        ends = np.where(has_text, end_scores, -np.inf)
        # several tokens can share a character, as the bytes of an emoji do, and then give the same span repeatedly
        repeats = _most_common(start for start, _ in offsets) * _most_common(end for _, end in offsets)
        for first, last, score in best_spans(starts, ends, n_best * repeats, max_tokens):
            span = (offsets[first][0], offsets[last][1])
            if span[0] < span[1] and score > best.get(span, -np.inf):
                best[span] = score
    ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))
    return [ScoredSpan(start, end, score) for (start, end), score in ranked[:n_best]]


def _most_common(values: Iterable[int]) -> int:
    """How often the most frequent value occurs."""
    return max(Counter(values).values(), default=0)
