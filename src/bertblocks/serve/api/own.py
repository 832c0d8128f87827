"""Our own routes, one for each task: `inputs` in, a list of `results` out."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bertblocks.serve.api.endpoint import Call, Endpoint
from bertblocks.serve.api.schemas import (
    Answer,
    Body,
    TextList,
    Texts,
    TextsOrIds,
    TextsOrPairs,
    TextsOrWords,
    as_list,
    given,
)
from bertblocks.serve.api.vectors import Encoding, encode, int8_range, raw, store
from bertblocks.serve.models import ServedModel
from bertblocks.tasks.embed.vectors import Precision
from bertblocks.tasks.tag.predictions import Level


class OwnBody(Body):
    truncate: bool | None = Field(
        None, description="Whether long texts are cut (true) or errors (false); by default the task decides."
    )


class EmbedRequest(OwnBody):
    inputs: TextsOrIds
    prompt: str | None = Field(None, description="Put in front of every text.")
    prompt_name: str | None = Field(None, description="One of the model's prompts, such as query or document.")
    dimensions: int | None = Field(None, ge=1, description="How many leading dimensions to keep.")
    normalize: bool = Field(True, description="Whether vectors have length 1.")
    precision: Precision = Field("float32", description="The numbers of the vectors.")
    encoding: Encoding = Field("float", description="base64 is that of the little-endian numbers.")


class SparseRequest(OwnBody):
    inputs: Texts
    role: Literal["query", "document"] | None = None
    top_k: int | None = Field(None, ge=1, description="How many of the largest entries to keep.")


class MultiRequest(OwnBody):
    inputs: Texts
    role: Literal["query", "document"] | None = None
    pool_factor: float | None = Field(None, ge=1, le=1000, description="Merges tokens into a share of 1/factor.")


class ClassifyRequest(OwnBody):
    inputs: TextsOrPairs
    top_k: int | None = Field(None, ge=1, description="How many labels to return.")
    threshold: float = Field(0.5, ge=0, le=1, description="The least score of a label, for multi-label models.")
    raw_scores: bool = Field(False, description="Whether scores are logits.")


class TagRequest(OwnBody):
    inputs: TextsOrWords
    level: Level | None = Field(None, description="What gets labels; by default what the model's labels mark.")


class Question(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    question: str
    context: str


class AnswerRequest(OwnBody):
    inputs: Question | list[Question] = Field(json_schema_extra={"minItems": 1})
    n_best: int = Field(5, ge=1, le=1000, description="How many candidates to return.")
    max_answer_tokens: int = Field(30, ge=1, le=1000)
    no_answer_threshold: float | None = Field(
        None, description="By how much the score of no answer must exceed the best answer's."
    )


class FillMaskRequest(OwnBody):
    inputs: Texts
    top_k: int = Field(5, ge=1, le=1000, description="How many tokens to return for each mask.")


class TokenizeRequest(Body):
    inputs: Texts
    special: bool = Field(True, description="Whether special tokens are added.")


class SimilarityRequest(OwnBody):
    inputs: TextList
    others: TextList | None = Field(None, description="What the inputs are compared with, by default themselves.")
    prompt_name: str | None = None


class TokenUsage(Answer):
    tokens: int


class OwnAnswer(Answer):
    model: str
    usage: TokenUsage


class EmbedAnswer(OwnAnswer):
    results: list[list[float] | str]
    dtype: Precision
    #: int8 covers the numbers between -range and range in steps of equal width.
    range: float | None = None


class SparseItem(Answer):
    indices: list[int]
    values: list[float]
    tokens: list[str]


class SparseAnswer(OwnAnswer):
    results: list[SparseItem]


class MultiAnswer(OwnAnswer):
    results: list[list[list[float]]]


class ClassifyItem(Answer):
    labels: list[str]
    scores: dict[str, float]


class ClassifyAnswer(OwnAnswer):
    results: list[ClassifyItem]


class TagItem(Answer):
    label: str
    start: int
    end: int
    text: str
    score: float


class TagAnswer(OwnAnswer):
    results: list[list[TagItem]]


class AnswerCandidate(Answer):
    text: str
    start: int
    end: int
    score: float


class AnswerItem(AnswerCandidate):
    no_answer_score: float
    best: list[AnswerCandidate]


class AnswerAnswer(OwnAnswer):
    results: list[AnswerItem]


class FillMaskItem(Answer):
    token: str
    id: int
    score: float


class FillMaskAnswer(OwnAnswer):
    results: list[list[list[FillMaskItem]]]


class TokenItem(Answer):
    id: int
    token: str
    start: int | None
    end: int | None
    special: bool


class TokenizeAnswer(OwnAnswer):
    results: list[list[TokenItem]]


class SimilarityAnswer(OwnAnswer):
    results: list[list[float]]


def _answer(model: ServedModel, results: Any, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": model.name, "results": results, "usage": {"tokens": tokens}, **more}


async def embed(call: Call, body: EmbedRequest) -> Any:
    if body.precision == "int8" and not body.normalize:
        raise ValueError("precision is 'int8' and normalize is false; int8 needs vectors of length 1.")
    model = call.find(body.model, "embed")
    options = given(
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        normalize=None if body.normalize else False,
    )
    found = await call.run(model, "encode", as_list(body.inputs), options, body.truncate)
    vectors = store(np.stack(found), body.precision)
    limit = int8_range(found[0].shape[-1])
    if call.is_raw:
        if body.precision == "int8":
            call.headers.append((b"x-range", repr(limit).encode()))
        return raw(vectors)
    more = {"range": limit} if body.precision == "int8" else {}
    results = [encode(vector, body.encoding) for vector in vectors]
    return _answer(model, results, call.tokens, dtype=body.precision, **more)


async def sparse(call: Call, body: SparseRequest) -> Any:
    model = call.find(body.model, "sparse")
    options = given(role=body.role, top_k=body.top_k)
    vectors = await call.run(model, "encode_sparse", as_list(body.inputs), options, body.truncate)
    to_tokens = model.predictor.tokenizer.convert_ids_to_tokens
    results = [
        {
            "indices": vector.indices,
            "values": vector.values,
            # a model's vocabulary may be larger than its tokenizer's
            "tokens": [token or "" for token in to_tokens(vector.indices.tolist())],
        }
        for vector in vectors
    ]
    return _answer(model, results, call.tokens)


async def multi(call: Call, body: MultiRequest) -> Any:
    model = call.find(body.model, "multi")
    options = given(role=body.role, pool_factor=body.pool_factor)
    found = await call.run(model, "encode_multi", as_list(body.inputs), options, body.truncate)
    if call.is_raw:
        return raw(store(np.concatenate(found), "float32"), [len(vectors) for vectors in found])
    return _answer(model, [np.ascontiguousarray(vectors) for vectors in found], call.tokens)


async def classify(call: Call, body: ClassifyRequest) -> Any:
    model = call.find(body.model, "classify")
    items = [tuple(item) if isinstance(item, list) else item for item in as_list(body.inputs)]
    options = given(
        top_k=body.top_k,
        threshold=None if body.threshold == 0.5 else body.threshold,
        raw_scores=body.raw_scores or None,
    )
    results = await call.run(model, "classify", items, options, body.truncate)
    shown = [{"labels": result.labels, "scores": result.scores} for result in results]
    return _answer(model, shown, call.tokens)


async def tag(call: Call, body: TagRequest) -> Any:
    model = call.find(body.model, "tag")
    results = await call.run(model, "tag", as_list(body.inputs), given(level=body.level), body.truncate)
    return _answer(model, results, call.tokens)


async def answer(call: Call, body: AnswerRequest) -> Any:
    model = call.find(body.model, "answer")
    questions = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    if not questions:
        raise ValueError("inputs is []; give at least one question with its context.")
    options = {
        "n_best": body.n_best,
        "max_answer_tokens": body.max_answer_tokens,
        **given(no_answer_threshold=body.no_answer_threshold),
    }
    items = [(item.question, item.context) for item in questions]
    return _answer(model, await call.run(model, "answer", items, options, body.truncate), call.tokens)


async def fill_mask(call: Call, body: FillMaskRequest) -> Any:
    model = call.find(body.model, "fill-mask")
    results = await call.run(model, "fill_mask", as_list(body.inputs), {"top_k": body.top_k}, body.truncate)
    return _answer(model, results, call.tokens)


async def tokenize(call: Call, body: TokenizeRequest) -> Any:
    model = call.find_any(body.model)
    texts = as_list(body.inputs)
    call.check_number(len(texts))
    results = await call.in_thread(model.predictor.text_tokenizer.list_tokens, texts, body.special)
    return _answer(model, results, sum(map(len, results)))


async def similarity(call: Call, body: SimilarityRequest) -> Any:
    model = call.find(body.model, "embed")
    texts = [*body.inputs, *(body.others or [])]
    vectors = np.stack(await call.run(model, "encode", texts, given(prompt_name=body.prompt_name), body.truncate))
    count = len(body.inputs)
    others = vectors[count:] if body.others else vectors
    return _answer(model, vectors[:count] @ others.T, call.tokens)


_TEXTS = {"inputs": ["A text.", "Another text."]}
_QUESTION = {"question": "Who wrote it?", "context": "Ada wrote it."}
ENDPOINTS = [
    Endpoint("/v1/embed", embed, EmbedRequest, EmbedAnswer, "Computes embeddings.", _TEXTS, "embed", has_raw=True),
    Endpoint("/v1/sparse", sparse, SparseRequest, SparseAnswer, "Computes sparse vectors (SPLADE).", _TEXTS, "sparse"),
    Endpoint(
        "/v1/multi",
        multi,
        MultiRequest,
        MultiAnswer,
        "Computes a vector for each token (ColBERT).",
        _TEXTS,
        "multi",
        has_raw=True,
    ),
    Endpoint(
        "/v1/classify",
        classify,
        ClassifyRequest,
        ClassifyAnswer,
        "Classifies texts or pairs.",
        {"inputs": ["A text.", ["One text of a pair.", "The other one."]]},
        "classify",
    ),
    Endpoint("/v1/tag", tag, TagRequest, TagAnswer, "Finds entities, or labels words or tokens.", _TEXTS, "tag"),
    Endpoint(
        "/v1/answer",
        answer,
        AnswerRequest,
        AnswerAnswer,
        "Answers questions by spans of a text.",
        {"inputs": [_QUESTION]},
        "answer",
    ),
    Endpoint(
        "/v1/fill-mask",
        fill_mask,
        FillMaskRequest,
        FillMaskAnswer,
        "Fills masks in texts.",
        {"inputs": ["A [MASK] text."]},
        "fill-mask",
    ),
    Endpoint("/v1/tokenize", tokenize, TokenizeRequest, TokenizeAnswer, "Splits texts into tokens.", _TEXTS),
    Endpoint(
        "/v1/similarity",
        similarity,
        SimilarityRequest,
        SimilarityAnswer,
        "Compares texts by the cosine.",
        _TEXTS,
        "embed",
    ),
]
