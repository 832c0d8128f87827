"""Multi-vector encodings, one vector for each token of a text, and documents ranked by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings, TokenPooling
from bertblocks.core.requirements import require_packages
from bertblocks.inference.pipeline import Pipeline, Request, Result, SegmentBatch, check_text, to_numpy
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.token_head import TokenHead
from bertblocks.tasks.multi.scores import pool_tokens, score_multi
from bertblocks.tasks.multi.sequences import RoleTokenizer, token_vectors
from bertblocks.tasks.rerank.predictions import Ranked, check_item, check_top_k


class TokenPipeline(Pipeline[Result]):
    """Computes the vectors of tokens, for texts of one role or of both."""

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        head: TokenHead,
        settings: MultiVectorSettings,
        tokenizers: Mapping[str, RoleTokenizer],
        pool_factor: float | None = None,
    ) -> None:
        super().__init__(model, next(iter(tokenizers.values())).splitter)
        self.head, self.settings, self.tokenizers = head, settings, tokenizers
        self.pooling = settings.token_pooling
        if pool_factor is not None:
            if pool_factor < 1:
                raise ValueError(f"pool_factor is {pool_factor}; it must be at least 1.")
            self.pooling = replace(self.pooling or TokenPooling(), factor=pool_factor)
        if self.pooling is not None and self.pooling.factor > 1:
            require_packages(["scipy"], "token pooling")

    def forward(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        def run(**inputs: Any) -> Tensor:
            encoded = self.model.base_model.encode(**inputs)
            return self.head(encoded.hidden, encoded.layout)

        segments: Sequence[Any] = batch.segments
        vectors = token_vectors(run, batch.inputs, [segment.seen for segment in segments])
        return [to_numpy(own)[segment.token_indices] for own, segment in zip(vectors, segments, strict=True)]

    def join(self, parts: Sequence[np.ndarray], role: str, request: Request) -> np.ndarray:
        """Joins the vectors of a text's windows, and merges them if the checkpoint or the caller says so."""
        vectors = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.warn_if_not_finite(vectors, request)
        if self.pooling is None or role not in self.pooling.roles:
            return vectors
        return pool_tokens(vectors, self.pooling)


class MultiVectorPipeline(TokenPipeline[np.ndarray]):
    """Makes the vectors of a text's tokens; those of a long text's windows follow each other."""

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        (tokenizer,) = self.tokenizers.values()
        texts = [check_text(item, f"Text {index}") for index, item in enumerate(items, start=first)]
        return [Request(list(segments)) for segments in tokenizer.segments(texts, first)]

    def postprocess(self, request: Request) -> np.ndarray:
        (role,) = self.tokenizers
        return self.join(request.outputs, role, request)


class LateInteractionPipeline(TokenPipeline[list[Ranked]]):
    """Scores the documents of a query by MaxSim, and puts the best first. The scores are raw in any case."""

    def __init__(self, *parts: Any, top_k: int | None = None, raw_scores: bool = False) -> None:
        super().__init__(*parts)
        self.top_k = check_top_k(top_k)

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        checked = [check_item(item, index) for index, item in enumerate(items, start=first)]
        texts = [text for _, documents in checked for text in documents]
        queries = self.tokenizers["query"].segments([query for query, _ in checked], first)
        parts = iter(self.tokenizers["document"].segments(texts))
        requests = []
        for query, (_, documents) in zip(queries, checked, strict=True):
            own = [query, *(next(parts) for _ in documents)]
            segments = [segment for part in own for segment in part]
            requests.append(Request(list(segments), (documents, [len(part) for part in own])))
        return requests

    def postprocess(self, request: Request) -> list[Ranked]:
        documents, sizes = request.context
        outputs = iter(request.outputs)
        query, *others = [[next(outputs) for _ in range(size)] for size in sizes]
        vectors = [self.join(own, "document", request) for own in others]
        is_mean = self.settings.similarity == "meanmaxsim"
        scores = score_multi(self.join(query, "query", request), vectors, mean=is_mean)
        order = np.argsort(-scores, kind="stable")[: self.top_k].tolist()
        return [Ranked(index, float(scores[index]), documents[index]) for index in order]
