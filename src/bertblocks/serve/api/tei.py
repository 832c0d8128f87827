"""The routes of Text Embeddings Inference (TEI)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import SparseEncoderSettings
from bertblocks.serve.api import cohere
from bertblocks.serve.api.endpoint import Call, Endpoint
from bertblocks.serve.api.errors import BadRequest
from bertblocks.serve.api.openai import LabelScore
from bertblocks.serve.api.schemas import (
    Answer,
    Body,
    IdLists,
    PredictInputs,
    TextList,
    Texts,
    TextsOrIds,
    as_list,
    given,
)
from bertblocks.serve.api.scores import score_labels, sigmoid
from bertblocks.serve.models import ServedModel
from bertblocks.tasks.rerank.predictions import Ranked


def _check_direction(value: Any) -> Any:
    if value not in ("right", "Right"):
        raise ValueError("it must be 'right', because long texts are cut at their end")
    return value


Direction = Annotated[str, PlainValidator(_check_direction), WithJsonSchema({"enum": ["right", "Right"]})]


class Truncation(BaseModel):
    """What requests say about long texts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    truncate: bool | None = Field(
        default=None, description="Whether long texts are cut (true) or errors (false); by default the task decides."
    )
    truncation_direction: Direction = "right"


class TEIBody(Truncation, Body):
    """A request of TEI that runs a model."""


class EmbedRequest(TEIBody):
    inputs: TextsOrIds
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float"] = "float"


class EmbedAllRequest(TEIBody):
    inputs: TextsOrIds
    prompt_name: str | None = None


class EmbedSparseRequest(TEIBody):
    inputs: Texts
    prompt_name: Literal["query", "document"] | None = None


class PredictParameters(BaseModel):
    """What huggingface_hub's client sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    top_k: int | None = Field(default=None, ge=1)
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None


class PredictRequest(TEIBody):
    inputs: PredictInputs
    raw_scores: bool = False
    parameters: PredictParameters | None = None


class RerankRequest(TEIBody, cohere.RerankOptions):
    """TEI's `texts`, or Cohere's `documents` with its keys."""

    texts: TextList | None = None
    return_text: bool = False
    documents: cohere.Documents | None = None


class SimilarityInputs(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    source_sentence: str
    sentences: TextList


class SimilarityParameters(Truncation):
    prompt_name: str | None = None


class SimilarityRequest(Body):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Body):
    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(Body):
    ids: IdLists
    skip_special_tokens: bool = True


class SparseValue(Answer):
    index: int
    value: float


class Rank(Answer):
    index: int
    score: float
    text: str | None = None


class TEIToken(Answer):
    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


async def embed(call: Call, body: EmbedRequest) -> Any:
    model = call.find(body.model, "embed")
    options = given(
        prompt_name=body.prompt_name, dimensions=body.dimensions, normalize=None if body.normalize else False
    )
    return await call.run(model, "encode", as_list(body.inputs), options, body.truncate)


async def embed_all(call: Call, body: EmbedAllRequest) -> Any:
    model = call.find(body.model, "embed")
    options = given(prompt_name=body.prompt_name)
    found = await call.run(model, "encode_tokens", as_list(body.inputs), options, body.truncate)
    return [np.ascontiguousarray(vectors) for vectors in found]


async def embed_sparse(call: Call, body: EmbedSparseRequest) -> Any:
    model = call.find(body.model, "sparse")
    options = given(role=body.prompt_name)
    vectors = await call.run(model, "encode_sparse", as_list(body.inputs), options, body.truncate)
    return [
        [
            {"index": index, "value": value}
            for index, value in zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
        ]
        for vector in vectors
    ]


async def predict(call: Call, body: PredictRequest) -> Any:
    model = call.find(body.model, "classify")
    is_batch = isinstance(body.inputs, list) and isinstance(body.inputs[0], list)
    items = [_as_item(item) for item in body.inputs] if is_batch else [_as_item(body.inputs)]
    parameters = body.parameters or PredictParameters()
    is_raw = body.raw_scores or parameters.function_to_apply == "none"
    options = given(top_k=parameters.top_k, raw_scores=is_raw or None)
    results = await call.run(model, "classify", items, options, body.truncate)
    labels = [score_labels(result, is_raw) for result in results]
    return labels if is_batch else labels[0]


def _as_item(texts: Any) -> str | tuple[str, str]:
    if isinstance(texts, str):
        return texts
    return (texts[0], texts[1]) if len(texts) == 2 else texts[0]


async def rerank(call: Call, body: RerankRequest) -> Any:
    if (body.texts is None) == (body.documents is None):
        raise BadRequest(422, "Give either texts, as in TEI, or documents, as in Cohere's API.", "texts")
    if body.documents is not None:
        keys = {"model", "query", "documents", "top_n", "return_documents", "raw_scores"} & body.model_fields_set
        own = {key: getattr(body, key) for key in keys}
        return await cohere.rerank(call, cohere.RerankRequest(**own))
    texts = body.texts or []
    call.check_number(len(texts))
    model = call.find(body.model, "rerank")
    # TEI's scores are the logits or their sigmoid, whatever the checkpoint's own activation is
    is_maxsim = isinstance(model.predictor.embedding, MultiVectorSettings)
    options = given(top_k=body.top_n, raw_scores=True)
    ranked: list[Ranked] = (await call.run(model, "rerank", [(body.query, texts)], options, body.truncate))[0]
    is_logit = body.raw_scores or is_maxsim
    return [
        {
            "index": item.index,
            "score": item.score if is_logit else sigmoid(item.score),
            **({"text": item.text} if body.return_text else {}),
        }
        for item in ranked
    ]


async def similarity(call: Call, body: SimilarityRequest) -> Any:
    model = call.find(body.model, "embed")
    parameters = body.parameters or SimilarityParameters()
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    options = given(prompt_name=parameters.prompt_name)
    vectors = np.stack(await call.run(model, "encode", texts, options, parameters.truncate))
    return vectors[1:] @ vectors[0]


async def tokenize(call: Call, body: TokenizeRequest) -> Any:
    model = call.find_any(body.model)
    prompt = model.predictor.embedding.find_prompt(None, body.prompt_name) if body.prompt_name else ""
    texts = [prompt + text for text in as_list(body.inputs)]
    call.check_number(len(texts))
    found = await call.in_thread(model.predictor.text_tokenizer.list_tokens, texts, body.add_special_tokens)
    return [
        [
            {
                "id": token.id,
                "text": token.token if token.start is None else text[token.start : token.end],
                "special": token.special,
                "start": token.start,
                "stop": token.end,
            }
            for token in tokens
        ]
        for text, tokens in zip(texts, found, strict=True)
    ]


async def decode(call: Call, body: DecodeRequest) -> Any:
    model = call.find_any(body.model)
    lists = as_list(body.ids)
    call.check_number(len(lists))
    tokenizer = model.predictor.tokenizer
    size = len(tokenizer)
    for token in (token for ids in lists for token in ids):
        if token >= size:
            raise ValueError(f"ids has the token id {token}; ids are between 0 and {size - 1}.")

    def decode_all() -> list[str]:
        return [str(tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)) for ids in lists]

    return await call.in_thread(decode_all)


_TEXTS = {"inputs": ["A text.", "Another text."]}
EMBED = Endpoint("/embed", embed, EmbedRequest, list[list[float]], "Computes embeddings.", _TEXTS, "embed")
EMBED_SPARSE = Endpoint(
    "/embed_sparse",
    embed_sparse,
    EmbedSparseRequest,
    list[list[SparseValue]],
    "Computes sparse vectors.",
    _TEXTS,
    "sparse",
)
PREDICT = Endpoint(
    "/predict",
    predict,
    PredictRequest,
    list[LabelScore] | list[list[LabelScore]],
    "Classifies texts or pairs of texts.",
    {"inputs": "A text."},
    "classify",
)
RERANK = Endpoint(
    "/rerank",
    rerank,
    RerankRequest,
    list[Rank] | cohere.RerankAnswer,
    "Orders texts by relevance.",
    {"query": "What is it about?", "texts": ["A text.", "Another text."]},
    "rerank",
)
ENDPOINTS = [
    EMBED,
    Endpoint(
        "/embed_all",
        embed_all,
        EmbedAllRequest,
        list[list[list[float]]],
        "Computes the vector of every token, special tokens included.",
        _TEXTS,
        "embed",
    ),
    EMBED_SPARSE,
    PREDICT,
    RERANK,
    Endpoint(
        "/similarity",
        similarity,
        SimilarityRequest,
        list[float],
        "Compares texts by the cosine.",
        {"inputs": {"source_sentence": "A text.", "sentences": ["Another text."]}},
        "embed",
    ),
    Endpoint("/tokenize", tokenize, TokenizeRequest, list[list[TEIToken]], "Splits texts into tokens.", _TEXTS),
    Endpoint("/decode", decode, DecodeRequest, list[str], "Joins tokens to texts.", {"ids": [2, 9, 3]}),
]


def kind_of(model: ServedModel) -> Literal["reranker", "classifier", "sparse", "embedding"]:
    """What TEI calls the type of a model, apart from sparse encoders, which it counts as embedding models."""
    if "classify" in model.tasks:
        return "reranker" if "rerank" in model.tasks else "classifier"
    return "sparse" if isinstance(model.predictor.embedding, SparseEncoderSettings) else "embedding"


def root_endpoint(model: ServedModel) -> Endpoint:
    """What a POST to `/` does: the same as the route for the kind of the first model."""
    routes = {"reranker": RERANK, "classifier": PREDICT, "sparse": EMBED_SPARSE, "embedding": EMBED}
    found = routes[kind_of(model)]
    return replace(found, path="/", summary=f"The same as {found.path}.")
