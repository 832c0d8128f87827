"""Masked language modelling (Devlin et al., 2018), with whole words and spans (Joshi et al., 2019) on request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import UInt64, combine, draw, uniform
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import (
    Objective,
    RateSchedule,
    SequenceTokens,
    count_within,
    enclose,
    offsets,
)
from bertblocks.text.vocabulary import Vocabulary

#: SpanBERT's lengths: geometric, each further word with probability 0.8, cut at ten.
SPAN_STOP = 0.2
SPAN_MAX = 10


class MaskedLanguageModeling(Objective):
    """Hides a share of the tokens; of those chosen some become [MASK], some a random token, the rest stay.

    Every token that is not special is chosen with the probability `rate`: alone, with its whole word, or in spans (of
    words, if `whole_word` says so) of SpanBERT's lengths.
    """

    overhead = 2

    def __init__(
        self,
        vocabulary: Vocabulary,
        rate: float | RateSchedule = 0.3,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        whole_word: bool = False,
        spans: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self.rate = RateSchedule(rate, rate) if isinstance(rate, (int, float)) else rate
        for value in (self.rate.start, self.rate.end):
            if not 0 < value <= 1:
                raise ValueError(f"The masking rate is {value}; it must be above 0 and at most 1.")
        if mask_share < 0 or random_share < 0 or mask_share + random_share > 1:
            raise ValueError(
                f"mask_share is {mask_share} and random_share {random_share}; neither may be below 0, nor their sum "
                "above 1."
            )
        if whole_word and vocabulary.starts_word is None:
            raise ValueError("whole_word is true, and the tokenizer does not mark where words begin.")
        self.mask_share, self.random_share = mask_share, random_share
        self.whole_word, self.spans = whole_word, spans

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        tokens = SequenceTokens.of(rows, seed)
        ids, labels = self.hide(tokens, progress)
        lengths, vocabulary = tokens.lengths, self.vocabulary
        return FlatBatch(
            input_ids=torch.from_numpy(enclose(ids, lengths, vocabulary.cls, vocabulary.sep)),
            cu_seqlens=offsets(lengths + self.overhead),
            counts={"masked_lm": int((labels != IGNORE).sum())},
            labels=torch.from_numpy(enclose(labels, lengths, IGNORE, IGNORE)),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            labels=batch.labels,
            num_items_in_batch=1,
            return_logits=False,
        )
        return {"masked_lm": out.loss}

    def hide(self, tokens: SequenceTokens, progress: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids that the model sees, and the labels of those that were chosen."""
        chosen = self._choose(tokens, self.rate.at(progress)) & ~self.vocabulary.is_special[tokens.ids]
        kind = uniform(draw(tokens.token_keys("replace"), tokens.positions))
        ordinary = self.vocabulary.ordinary
        random = ordinary[draw(tokens.token_keys("random"), tokens.positions) % np.uint64(len(ordinary))]
        changed = np.where(kind < self.mask_share, self.vocabulary.mask, random)
        is_changed = chosen & (kind < self.mask_share + self.random_share)
        return np.where(is_changed, changed, tokens.ids), np.where(chosen, tokens.ids, IGNORE)

    def _choose(self, tokens: SequenceTokens, rate: float) -> NDArray[np.bool_]:
        is_main = tokens.positions == 0
        starts_unit = np.ones_like(is_main)
        if self.whole_word and self.vocabulary.starts_word is not None:
            starts_unit = self.vocabulary.starts_word[tokens.ids] | is_main
        unit = np.cumsum(starts_unit) - 1  # the word, or the token, that each token belongs to
        units = np.add.reduceat(starts_unit, tokens.starts, dtype=np.int64)  # in each piece
        keys = combine(tokens.keys, "choose")
        if self.spans:
            return _in_spans(keys, units, rate)[unit]
        return (uniform(draw(np.repeat(keys, units), count_within(units))) < rate)[unit]


def _in_spans(keys: UInt64, units: NDArray[np.int64], rate: float) -> NDArray[np.bool_]:
    """Which units lie in a span.

    A span may start at every unit, and at those that would stand before the piece, with the one probability that
    covers each unit with probability `rate` exactly; so neither the ends of a piece nor overlaps change the rate.
    """
    widths = units + SPAN_MAX - 1
    number = count_within(widths)
    repeated = np.repeat(keys, widths)
    starts = uniform(draw(repeated, 2 * number)) < _start_probability(rate)
    # a geometric length by its inverse distribution
    tail = 1 - uniform(draw(repeated, 2 * number + 1))
    lengths = np.minimum(1 + np.floor(np.log(tail) / np.log(1 - SPAN_STOP)), SPAN_MAX).astype(np.int64)
    places = np.arange(len(number))
    # the units before the next piece are as many as a span can reach beyond the end of this one
    covered = np.maximum.accumulate(places + np.where(starts, lengths, 0)) > places
    return covered[number >= SPAN_MAX - 1]


def _start_probability(rate: float) -> float:
    """q of 1 - prod over k (1 - q P(length > k)) = rate, by bisection."""
    longer = (1 - SPAN_STOP) ** np.arange(SPAN_MAX)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - np.prod(1 - middle * longer) < rate else (low, middle)
    return high
