"""Maskings: which tokens a masked language model has to predict.

A masking is a function of the tokens, the rate, the vocabulary and options of its own, and returns which tokens are
selected. Special tokens are never masked, whatever it returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertblocks.core.registry import Registry, nearest
from bertblocks.data.hashing import UInt64, combine, draw, uniform
from bertblocks.objectives.base import ChunkTokens, count_within
from bertblocks.text.vocabulary import Vocabulary

#: Span lengths of SpanBERT: geometric with p = 0.2, at most ten.
SPAN_STOP = 0.2
SPAN_MAX = 10

Masking = Callable[[ChunkTokens, float, Vocabulary], NDArray[np.bool_]]
#: Maskings by the name that `objective.masking` can hold. They may have keyword-only arguments: `masking_options`.
MASKINGS: Registry[Callable[..., NDArray[np.bool_]]] = Registry("objective.masking")
register_masking = MASKINGS.register


@register_masking("token")
def mask_tokens(tokens: ChunkTokens, rate: float, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Each token alone (Devlin et al., 2018)."""
    return uniform(draw(tokens.token_keys("choose"), tokens.positions)) < rate


@register_masking("word")
def mask_words(tokens: ChunkTokens, rate: float, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """All tokens of a word together."""
    unit, units = _words(tokens, vocabulary)
    return (uniform(draw(np.repeat(combine(tokens.keys, "choose"), units), count_within(units))) < rate)[unit]


@register_masking("span")
def mask_spans(tokens: ChunkTokens, rate: float, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Spans of tokens (Joshi et al., 2019)."""
    return _in_spans(combine(tokens.keys, "choose"), tokens.lengths, rate)


@register_masking("word_span")
def mask_word_spans(tokens: ChunkTokens, rate: float, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Spans of whole words."""
    unit, units = _words(tokens, vocabulary)
    return _in_spans(combine(tokens.keys, "choose"), units, rate)[unit]


def get_masking(name: str, options: Mapping[str, Any]) -> Masking:
    check_options(name, options)
    return partial(MASKINGS[name], **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises unless the options are those of the masking."""
    parameters = inspect.signature(MASKINGS[name]).parameters.values()
    own = {entry.name: entry for entry in parameters if entry.kind is inspect.Parameter.KEYWORD_ONLY}
    for option in options:
        if option not in own:
            known = f"its options are {', '.join(own)}" if own else "it has no options"
            raise ValueError(f"has masking_options.{option}{nearest(option, own)}, but of masking {name!r} {known}")
    for option, entry in own.items():
        if entry.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"lacks masking_options.{option}, which masking {name!r} needs")


def _words(tokens: ChunkTokens, vocabulary: Vocabulary) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The word that each token belongs to, and the number of words in each chunk."""
    if vocabulary.starts_word is None:
        raise ValueError("The masking selects words, but the tokenizer does not mark where words begin.")
    starts = vocabulary.starts_word[tokens.ids] | (tokens.positions == 0)
    return np.cumsum(starts) - 1, np.add.reduceat(starts, tokens.starts, dtype=np.int64)


def _in_spans(keys: UInt64, units: NDArray[np.int64], rate: float) -> NDArray[np.bool_]:
    """Which units are in a span.

    A span may start at every unit, and at imaginary units before the chunk, with the one probability that covers each
    unit with probability `rate`. So neither the ends of a chunk nor overlaps change the rate.
    """
    widths = units + SPAN_MAX - 1
    number = count_within(widths)
    repeated = np.repeat(keys, widths)
    starts = uniform(draw(repeated, 2 * number)) < _start_probability(rate)
    # geometric lengths by inversion
    tail = 1 - uniform(draw(repeated, 2 * number + 1))
    lengths = np.minimum(1 + np.floor(np.log(tail) / np.log(1 - SPAN_STOP)), SPAN_MAX).astype(np.int64)
    index = np.arange(len(number))
    # the next chunk has as many imaginary units as a span can reach beyond the end of this one
    covered = np.maximum.accumulate(index + np.where(starts, lengths, 0)) > index
    return covered[number >= SPAN_MAX - 1]


def _start_probability(rate: float) -> float:
    """The q for which 1 - prod over k of (1 - q P(length > k)) is `rate`, by bisection."""
    longer = (1 - SPAN_STOP) ** np.arange(SPAN_MAX)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - np.prod(1 - middle * longer) < rate else (low, middle)
    return high
