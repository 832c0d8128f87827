"""Masked language modeling on the texts of embedding models, as steps between those that compare texts."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine
from bertblocks.objectives.base import ChunkTokens, cumulative_lengths, labelled_indices
from bertblocks.objectives.masked_lm import MaskedLanguageModeling
from bertblocks.tasks.features import Feature
from bertblocks.text.vocabulary import Vocabulary

#: The name of the loss.
TERM = "masked_lm"


class TextMasking:
    """Hides a share of the tokens of texts; which ones follows from the seed, the step and the text alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rate: float, seed: int) -> None:
        self.objective = MaskedLanguageModeling(Vocabulary.from_tokenizer(tokenizer), rate)
        self.seed = seed

    def batch(self, step: int, features: Sequence[Sequence[Feature]]) -> FlatBatch:
        """Joins the different texts of each example, with labels for the hidden tokens."""
        texts = [text for own in features for text in dict.fromkeys(tuple(feature.ids) for feature in own)]
        numbers = [int.from_bytes(blake2b(str(text).encode(), digest_size=8).digest(), "little") for text in texts]
        lengths = np.array([len(text) for text in texts])
        tokens = ChunkTokens(
            ids=np.concatenate([np.array(text, dtype=np.int64) for text in texts]),
            lengths=lengths,
            keys=combine("texts", self.seed, step, np.array(numbers, dtype=np.uint64)),
            stream_indices=np.arange(len(texts)),
        )
        ids, labels = self.objective.mask(tokens, progress=0.0)
        scored_tokens = labelled_indices(labels)
        return FlatBatch(
            input_ids=torch.from_numpy(ids),
            cu_seqlens=cumulative_lengths(lengths),
            labels=torch.from_numpy(labels),
            scored_tokens=scored_tokens,
            counts={TERM: len(scored_tokens)},
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return self.objective.losses(model, batch)
