"""Fill-mask: the most probable tokens for each mask of a text."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.numerics import upcast

#: Masks whose scores over the whole vocabulary are in memory at once.
MASKS_AT_ONCE = 512


@dataclass(frozen=True)
class Filling:
    """A token for a mask, and its probability."""

    token: str
    id: int
    score: float


class FillMaskPipeline(Pipeline[list[list[Filling]]]):
    """Predicts the `top_k` most probable tokens for each mask, in order. Only masks reach the decoder."""

    def __init__(self, model: LanguageModel, splitter: SequenceSplitter, top_k: int = 5) -> None:
        super().__init__(model, splitter)
        if not 1 <= top_k <= model.config.vocab_size:
            raise ValueError(
                f"top_k is {top_k}; it must be between 1 and the vocabulary size, {model.config.vocab_size}."
            )
        self.top_k = top_k
        self.tokenizer = splitter.tokenizer.tokenizer
        if self.tokenizer.mask_token_id is None:
            raise ValueError("This tokenizer does not have a mask token, so there is nothing to fill.")

    @property
    def batch_key(self) -> Hashable:
        return type(self), self.top_k

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        texts = [check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        requests = []
        for index, (text, tokens) in enumerate(zip(texts, self.tokenize(texts), strict=True), start=first):
            masks = [position for position, token in enumerate(tokens.ids) if token == self.tokenizer.mask_token_id]
            is_cut = self.tokenizer.mask_token in text[len(self.splitter.shorten(text)) :]
            if not masks and not is_cut:
                raise ValueError(f"Text {index} does not contain {self.tokenizer.mask_token}.")
            segments = []
            for segment in self.splitter.split(tokens, index):
                window = segment.window
                own_masks = [mask for mask in masks if window.core_start <= mask < window.core_stop]
                if own_masks:
                    indices = [segment.sequence.start + mask - window.start for mask in own_masks]
                    segments.append(replace(segment, token_indices=indices))
            if is_cut or sum(len(segment.token_indices or []) for segment in segments) < len(masks):
                raise ValueError(f"Text {index} has a {self.tokenizer.mask_token} in the part that is truncated.")
            requests.append(Request(segments))
        return requests

    def forward(self, batch: SegmentBatch) -> Sequence[list[list[Filling]]]:
        model = cast(LanguageModel, self.model)
        masks = [segment.token_indices or [] for segment in batch.segments]
        starts = zip(batch.starts[:-1], masks, strict=True)
        indices = torch.tensor([int(start) + mask for start, own in starts for mask in own], device=model.device)
        hidden = model.base_model.encode(**batch.inputs, token_indices=lambda _: indices).hidden  # [masks, hidden]
        fillings = [filling for part in hidden.split(MASKS_AT_ONCE) for filling in self._fill(model.logits(part))]
        ends = torch.tensor([0, *map(len, masks)]).cumsum(0).tolist()
        return [fillings[start:end] for start, end in itertools.pairwise(ends)]

    def _fill(self, logits: Tensor) -> list[list[Filling]]:
        scores, ids = upcast(logits).softmax(dim=-1).topk(self.top_k)
        return [
            [Filling(self._decode(token), token, score) for token, score in zip(*row, strict=True)]
            for row in zip(ids.tolist(), scores.tolist(), strict=True)
        ]

    def _decode(self, token: int) -> str:
        return cast(str, self.tokenizer.decode([token])).strip()

    def postprocess(self, request: Request) -> list[list[Filling]]:
        masks = [mask for output in request.outputs for mask in output]
        self.warn_if_not_finite(np.array([filling.score for mask in masks for filling in mask]), request)
        return masks
