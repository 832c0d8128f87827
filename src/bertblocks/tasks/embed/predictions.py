"""Embeddings: one vector for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertblocks.inference.job import Job, SegmentBatch, Work, check_text, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.head import keep_firsts, pool
from bertblocks.nn.numerics import upcast


class EmbeddingJob(Job[np.ndarray]):
    """Pools tokens; windows of a long text count by their tokens."""

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        fitter: SequenceSplitter,
        pooling: str,
        prompt: str = "",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> None:
        super().__init__(model, fitter)
        if dimensions is not None and not 1 <= dimensions <= model.config.hidden_size:
            raise ValueError(f"dimensions is {dimensions}; it must be from 1 to {model.config.hidden_size}.")
        self.pooling = pooling
        self.prompt = prompt
        self.normalize = normalize
        self.dimensions = dimensions

    def prepare(self, items: Sequence[Any], first: int) -> list[Work]:
        texts = [self.prompt + check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        tokens = self.tokenize(texts, first)
        return [Work(self.fitter.fit(one, index)) for index, one in enumerate(tokens, start=first)]

    def run(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        if self.pooling == "cls":
            encoded = self.model.base_model.encode(**batch.inputs, token_indices=lambda layout: layout.first_tokens)
            return list(to_numpy(keep_firsts(upcast(encoded.hidden), encoded.layout)))
        encoded = self.model.base_model.encode(**batch.inputs)
        return list(to_numpy(pool(upcast(encoded.hidden), encoded.layout, self.pooling)))

    def read(self, work: Work) -> np.ndarray:
        vector = work.outputs[0]
        if len(work.outputs) > 1:
            tokens = [piece.window.stop - piece.window.start for piece in work.pieces]
            vector = np.average(work.outputs, axis=0, weights=tokens).astype(np.float32)
        vector = vector[: self.dimensions]
        return vector / max(np.linalg.norm(vector), 1e-12) if self.normalize else vector
