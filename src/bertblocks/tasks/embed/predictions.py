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
from bertblocks.text.encoding import TokenizedText


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
        return split_texts(self, items, first, self.prompt)

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


class TokenVectorsPipeline(Pipeline[np.ndarray]):
    """Makes the encoder's vector of every token; those of a long text's windows follow each other."""

    def __init__(self, model: BertBlocksPreTrainedModel, splitter: SequenceSplitter, prompt: str = "") -> None:
        super().__init__(model, splitter)
        self.prompt = prompt

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        return split_texts(self, items, first, self.prompt)

    def forward(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        vectors = to_numpy(self.model.base_model.encode(**batch.inputs).hidden)
        return np.split(vectors, batch.starts[1:-1])

    def postprocess(self, request: Request) -> np.ndarray:
        vectors = np.concatenate(request.outputs)
        self.warn_if_not_finite(vectors, request)
        return vectors


def split_texts(pipeline: Pipeline[Any], items: Sequence[Any], first: int, prompt: str) -> list[Request]:
    """Makes requests of texts, or of lists of token ids without special tokens, with a prompt in front."""
    texts = [
        prompt if _is_ids(item) else prompt + check_text(item, f"Text {index}")
        for index, item in enumerate(items, start=first)
    ]
    requests = []
    for index, (item, tokens) in enumerate(zip(items, pipeline.tokenize(texts), strict=True), start=first):
        if _is_ids(item):
            tokens = TokenizedText([*tokens.ids, *_check_ids(item, index, pipeline.model.config.vocab_size)])
        requests.append(Request(pipeline.splitter.split(tokens, index)))
    return requests


def _is_ids(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and bool(item) and all(type(token) is int for token in item)


def _check_ids(ids: Sequence[int], index: int, vocab_size: int) -> Sequence[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"Text {index} has the token id {token}; ids are between 0 and {vocab_size - 1}.")
    return ids
