"""Sparse vectors of texts, from the encoder or, for queries that need none, from the weights of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np

from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.sparse_head import SparseHead
from bertblocks.tasks.sparse.vectors import SparseVector, from_dense, merge

ROLES = ("query", "document")
#: Vectors over the whole vocabulary that are in memory at once.
DENSE_AT_ONCE = 32


class SparsePipeline(Pipeline[SparseVector]):
    """Makes the sparse vector of a text; of a long text's windows, each entry has its largest value."""

    def __init__(
        self,
        model: LanguageModel,
        splitter: SequenceSplitter,
        head: SparseHead,
        prompt: str = "",
        top_k: int | None = None,
    ) -> None:
        super().__init__(model, splitter)
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; it must be at least 1.")
        self.head, self.prompt, self.top_k = head, prompt, top_k

    @property
    def batch_key(self) -> Hashable:
        return type(self), self.top_k

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        texts = [self.prompt + check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        tokenized = self.tokenize(texts)
        return [Request(self.splitter.split(tokens, index)) for index, tokens in enumerate(tokenized, start=first)]

    def forward(self, batch: SegmentBatch) -> Sequence[SparseVector]:
        model = cast(LanguageModel, self.model)
        hidden = model.base_model.encode(**batch.inputs).hidden
        starts = batch.starts.tolist()
        vectors: list[SparseVector] = []
        for first in range(0, len(batch.segments), DENSE_AT_ONCE):
            own = starts[first : first + DENSE_AT_ONCE + 1]
            lengths = [stop - start for start, stop in itertools.pairwise(own)]
            rows = model.sparse_vectors(hidden[own[0] : own[-1]], lengths, self.head)
            # an entry that is among the largest of all windows is among the largest of one
            vectors += [from_dense(row).top(self.top_k) for row in to_numpy(rows)]
        return vectors

    def postprocess(self, request: Request) -> SparseVector:
        vector = merge(request.outputs)
        self.warn_if_not_finite(vector.values, request)
        return vector.top(self.top_k)


class QueryWeightsPipeline(SparsePipeline):
    """Looks up the weight of each different token of a query; the model does not run."""

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        texts = [self.prompt + check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        requests = []
        for index, tokens in enumerate(self.tokenize(texts), start=first):
            if self.splitter.too_long == "error":
                self.splitter.split(tokens, index)  # raises an error if there are too many
            kept = tokens.ids[: self.splitter.max_length] if self.splitter.too_long == "truncate" else tokens.ids
            requests.append(Request([], context=np.unique(np.array(kept, np.int32))))
        return requests

    def postprocess(self, request: Request) -> SparseVector:
        assert self.head.query_weights is not None
        values = to_numpy(self.head.query_weights.detach()[request.context.tolist()])
        is_there = values != 0
        return SparseVector(request.context[is_there], values[is_there]).top(self.top_k)
