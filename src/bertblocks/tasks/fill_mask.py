"""Tokens for the masks of a text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bertblocks.inference.job import Job, SegmentBatch, Work, check_text
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.numerics import upcast
from bertblocks.tasks.results import Filling

#: Rows of the vocabulary's scores that are held at once.
ROWS = 512


class FillingJob(Job[list[list[Filling]]]):
    """For each mask, in order, its likeliest tokens. Only masks reach the decoder."""

    def __init__(self, model: LanguageModel, fitter: SequenceSplitter, top_k: int = 5) -> None:
        super().__init__(model, fitter)
        if not 1 <= top_k <= model.config.vocab_size:
            raise ValueError(f"top_k is {top_k}; it must be from 1 to the vocabulary's {model.config.vocab_size}.")
        self.top_k = top_k
        self.tokenizer = fitter.tokenizer.tokenizer
        if self.tokenizer.mask_token_id is None:
            raise ValueError("This tokenizer has no mask token, and so there is nothing to fill.")

    def prepare(self, items: Sequence[Any], first: int) -> list[Work]:
        texts = [check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        works = []
        for index, tokens in enumerate(self.tokenize(texts, first), start=first):
            masks = [place for place, token in enumerate(tokens.ids) if token == self.tokenizer.mask_token_id]
            if not masks:
                raise ValueError(f"Text {index} holds no {self.tokenizer.mask_token} to fill.")
            pieces = []
            for piece in self.fitter.fit(tokens, index):
                window = piece.window
                own = [mask for mask in masks if window.core_start <= mask < window.core_stop]
                if own:
                    rows = [piece.framed.start + mask - window.start for mask in own]
                    pieces.append(replace(piece, rows=rows))
            if sum(len(piece.rows or []) for piece in pieces) < len(masks):
                raise ValueError(f"Text {index} has a {self.tokenizer.mask_token} in the part that is truncated.")
            works.append(Work(pieces))
        return works

    def run(self, batch: SegmentBatch) -> Sequence[list[list[Filling]]]:
        model = cast(LanguageModel, self.model)
        own_rows = [piece.rows or [] for piece in batch.pieces]
        starts = zip(batch.starts, own_rows, strict=False)
        rows = torch.tensor([int(start) + row for start, own in starts for row in own], device=model.device)
        hidden = model.base_model.encode(**batch.inputs, token_indices=lambda _: rows).hidden
        fillings = [filling for part in hidden.split(ROWS) for filling in self._fill(model.logits(part))]
        ends = torch.tensor([0, *map(len, own_rows)]).cumsum(0).tolist()
        return [fillings[start:end] for start, end in itertools.pairwise(ends)]

    def _fill(self, logits: Tensor) -> list[list[Filling]]:
        scores, ids = upcast(logits).softmax(dim=-1).topk(self.top_k)
        return [
            [Filling(self._write(token), token, score) for token, score in zip(*row, strict=True)]
            for row in zip(ids.tolist(), scores.tolist(), strict=True)
        ]

    def _write(self, token: int) -> str:
        return self.tokenizer.decode([token]).strip()

    def read(self, work: Work) -> list[list[Filling]]:
        return [mask for output in work.outputs for mask in output]
