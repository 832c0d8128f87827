"""Scores of masked language models: of words at a mask, and of spans whose tokens are masked one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.tasks.predictor import Predictor
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from bertblocks.training.held_out import pseudo_losses


def load_language_model(model: str | Path, int8: bool = False) -> Predictor:
    """Loads a model, which must have a masked-LM head."""
    predictor = Predictor(model, int8=int8, dtype=torch.float32)
    if not isinstance(predictor.model, LanguageModel):
        raise ValueError(f"{model} does not have a masked-lm head; it is a {type(predictor.model).__name__}.")
    return predictor


def mask_id(predictor: Predictor) -> int:
    """The id of the mask token."""
    mask = predictor.tokenizer.mask_token_id
    if mask is None:
        raise ValueError("The tokenizer has no mask token.")
    return int(mask)


class SpanScorer:
    """Scores words and spans in their context with a masked language model."""

    def __init__(self, model: str | Path) -> None:
        predictor = load_language_model(model)
        self.model: Any = predictor.model
        self.mask = mask_id(predictor)
        self.tokenizer = TextTokenizer(predictor.tokenizer)
        #: Tokens of a text, without special tokens.
        self.capacity = predictor.max_length - self.tokenizer.num_special()

    @flushed_denormals()
    @torch.inference_mode()
    def mask_logits(self, ids: Sequence[int]) -> Tensor:
        """The logits `[vocabulary]` of a mask after the last of the tokens; tokens at the start are cut if needed."""
        sequence = self.tokenizer.add_special_tokens([*ids[max(0, len(ids) + 1 - self.capacity) :], self.mask])
        position = sequence.start + min(len(ids), self.capacity - 1)
        cu_seqlens = torch.tensor([0, len(sequence.ids)], dtype=torch.int32)
        inputs = {"input_ids": torch.tensor(sequence.ids), "cu_seqlens": cu_seqlens}
        device = self.model.device
        hidden = self.model.model(**{name: value.to(device) for name, value in inputs.items()}).last_hidden_state
        return upcast(self.model.logits(hidden[[position]])[0])

    @flushed_denormals()
    def log_likelihoods(self, text: str, start: int = 0, end: int | None = None) -> Tensor:
        """Log-probabilities of the tokens of characters `start` to `end`, each with that token alone masked.

        Their sum over a text is its pseudo-log-likelihood (Salazar et al., 2020). The start of a long text is cut.
        """
        end = len(text) if end is None else end
        tokens = self.tokenizer.tokenize([text], offsets=True)[0]
        cut = max(0, len(tokens.ids) - self.capacity)
        inside = [i - cut for i, (a, b) in enumerate(tokens.offsets) if a < end and b > start and i >= cut]
        if not inside:
            raise DataError(f"{text[start:end]!r} has no tokens in this vocabulary.")
        sequence = self.tokenizer.add_special_tokens(tokens.ids[cut:])
        positions = torch.tensor(inside) + sequence.start
        return -pseudo_losses(self.model, torch.tensor(sequence.ids), positions, self.mask)
