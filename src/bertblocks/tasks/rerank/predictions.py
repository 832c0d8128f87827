"""Reranking: documents ordered by the scores of a cross-encoder."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text, is_pair, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.numerics import upcast


@dataclass(frozen=True)
class Ranked:
    """A document, its position in the input, and its score."""

    index: int
    score: float
    text: str


class RerankPipeline(Pipeline[list[Ranked]]):
    """Scores each document of a query, and puts the best first.

    The score of a document that is split into windows is that of its best window. `head` makes logits from token
    vectors; without it they are a classifier's. Documents with the same score are ordered by their logits, because an
    activation such as the sigmoid rounds large ones to 1. With `raw_scores`, logits are the scores.
    """

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        splitter: SequenceSplitter,
        head: EmbeddingHead | None,
        activation: nn.Module,
        prompt: str = "",
        top_k: int | None = None,
        raw_scores: bool = False,
    ) -> None:
        super().__init__(model, splitter)
        self.head = head
        self.activation = activation
        self.prompt = prompt
        self.top_k = check_top_k(top_k)
        self.raw_scores = raw_scores

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        checked = [check_item(item, index) for index, item in enumerate(items, start=first)]
        queries = [self.prompt + query for query, _ in checked]
        texts = list(dict.fromkeys([*queries, *(text for _, documents in checked for text in documents)]))
        tokens = dict(zip(texts, self.tokenize(texts), strict=True))
        requests = []
        for index, (query, (_, documents)) in enumerate(zip(queries, checked, strict=True), start=first):
            left = tokens[query]
            parts = [self.splitter.split_pair(left, tokens[document], index) for document in documents]
            segments = [segment for part in parts for segment in part]
            starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            requests.append(Request(segments, (documents, starts)))
        return requests

    def forward(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        if self.head is None:
            logits = self.model(**batch.inputs).logits
        else:
            encoded = self.model.base_model.encode(**batch.inputs, token_indices=self.head.token_indices)
            logits = self.head(encoded.hidden, encoded.layout, encoded.token_indices)
        logits = upcast(logits)
        return list(to_numpy(torch.cat((self.activation(logits), logits), dim=1)))

    def postprocess(self, request: Request) -> list[Ranked]:
        documents, starts = request.context
        outputs = np.stack(request.outputs)
        self.warn_if_not_finite(outputs, request)
        scores, logits = np.maximum.reduceat(outputs, starts).T
        order = np.lexsort((-logits, -scores))[: self.top_k].tolist()
        if self.raw_scores:
            scores = logits
        return [Ranked(index, float(scores[index]), documents[index]) for index in order]


def check_item(item: Any, index: int) -> tuple[str, list[str]]:
    """Returns a query and its documents, or says what is wrong with input number `index`."""
    if not is_pair(item) or isinstance(item[1], (str, bytes)) or not isinstance(item[1], Sequence):
        raise TypeError(f"Input {index} is {reprlib.repr(item)}; it must be a query and a list of documents.")
    query, documents = check_text(item[0], f"Query {index}"), list(item[1])
    if not query.strip():
        raise ValueError(f"Query {index} is empty; it must be a text.")
    if not documents:
        raise ValueError(f"Query {index} has no documents; give at least one.")
    for number, document in enumerate(documents):
        check_text(document, f"Document {number} of query {index}")
    return query, documents


def check_top_k(top_k: int | None) -> int | None:
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1.")
    return top_k
