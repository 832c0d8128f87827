"""Embeddings: one vector for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.tasks.embed.vectors import quantize


class EmbeddingPipeline(Pipeline[np.ndarray]):
    """Makes the embedding of a text; those of a long text's windows are averaged, weighted by their tokens."""

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        splitter: SequenceSplitter,
        head: EmbeddingHead,
        prompt: str = "",
        normalize: bool = True,
        dimensions: int | None = None,
        precision: str = "float32",
        ranges: np.ndarray | None = None,
    ) -> None:
        super().__init__(model, splitter)
        if dimensions is not None and not 1 <= dimensions <= head.size:
            raise ValueError(f"dimensions is {dimensions}; it must be between 1 and {head.size}.")
        self.head = head
        self.prompt = prompt
        self.normalize = normalize
        self.dimensions = dimensions
        self.precision, self.ranges = precision, ranges
        quantize(np.zeros(dimensions or head.size, np.float32), precision, ranges)  # raises if ranges do not fit

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        texts = [self.prompt + check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        tokenized = self.tokenize(texts)
        return [Request(self.splitter.split(tokens, index)) for index, tokens in enumerate(tokenized, start=first)]

    def forward(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        encoded = self.model.base_model.encode(**batch.inputs, token_indices=self.head.token_indices)
        return list(to_numpy(self.head(encoded.hidden, encoded.layout, encoded.token_indices)))

    def postprocess(self, request: Request) -> np.ndarray:
        vector = request.outputs[0]
        if len(request.outputs) > 1:
            tokens = [segment.window.stop - segment.window.start for segment in request.segments]
            vector = np.average(request.outputs, axis=0, weights=tokens).astype(np.float32)
        vector = vector[: self.dimensions]
        self.warn_if_not_finite(vector, request)
        if self.normalize:
            vector = vector / max(np.linalg.norm(vector), 1e-12)
        return vector if self.precision == "float32" else quantize(vector, self.precision, self.ranges)
