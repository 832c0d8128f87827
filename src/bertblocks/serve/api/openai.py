"""OpenAI's routes, and those of infinity that follow them."""

from __future__ import annotations

from typing import Any, Literal, cast
from uuid import uuid4

from pydantic import Field

from bertblocks.serve.api.endpoint import Call, Endpoint, Server
from bertblocks.serve.api.schemas import Answer, Body, Texts, TextsOrIds, as_list, given
from bertblocks.serve.api.scores import score_labels
from bertblocks.serve.api.vectors import Encoding, encode
from bertblocks.serve.models import ServedModel


class EmbeddingRequest(Body):
    input: TextsOrIds = Field(description="A text, token ids without special tokens, or a list of either.")
    encoding_format: Encoding = Field("float", description="base64 is that of little-endian float32 numbers.")
    dimensions: int | None = Field(None, ge=1, description="How many leading dimensions to keep.")
    user: str | None = Field(None, description="Accepted, as OpenAI does, and not used.")
    modality: Literal["text"] = Field("text", description="infinity's key.")


class Usage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Answer):
    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: Usage


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    tasks: list[str]
    max_length: int
    dimensions: int | None
    precision: str
    parameters: int
    labels: list[str] | None
    mask_token: str | None
    prompts: dict[str, str]


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class ClassifyRequest(Body):
    input: Texts
    raw_scores: bool = Field(False, description="Whether scores are logits.")


class LabelScore(Answer):
    label: str
    score: float


class ClassifyAnswer(Answer):
    object: Literal["classify"]
    id: str
    model: str
    data: list[list[LabelScore]]
    usage: Usage


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def embeddings(call: Call, body: EmbeddingRequest) -> Any:
    model = call.find(body.model, "embed")
    vectors = await call.run(model, "encode", as_list(body.input), given(dimensions=body.dimensions))
    return {
        "object": "list",
        "model": model.name,
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": usage(call.tokens),
    }


async def classify(call: Call, body: ClassifyRequest) -> Any:
    model = call.find(body.model, "classify")
    results = await call.run(model, "classify", as_list(body.input), given(raw_scores=body.raw_scores or None))
    return {
        "object": "classify",
        "id": uuid4().hex,
        "model": model.name,
        "data": [score_labels(result, body.raw_scores) for result in results],
        "usage": usage(call.tokens),
    }


def describe_model(model: ServedModel, server: Server) -> dict[str, Any]:
    """What `/v1/models` says about a model."""
    predictor = model.predictor
    has_vectors = any(task in model.tasks for task in ("embed", "multi"))
    has_labels = any(task in model.tasks for task in ("classify", "tag"))
    return {
        "id": model.name,
        "object": "model",
        "created": server.started,
        "owned_by": "bertblocks",
        "tasks": list(model.tasks),
        "max_length": predictor.max_length,
        "dimensions": predictor.embedding_size if has_vectors else None,
        "precision": predictor.precision,
        "parameters": predictor.model.num_parameters(),
        "labels": list(cast(dict[int, str], predictor.model.config.id2label).values()) if has_labels else None,
        "mask_token": predictor.tokenizer.mask_token if "fill-mask" in model.tasks else None,
        "prompts": predictor.prompts,
    }


ENDPOINTS = [
    *(
        Endpoint(
            path,
            embeddings,
            EmbeddingRequest,
            EmbeddingAnswer,
            "Computes embeddings, as OpenAI does.",
            {"input": ["A text.", "Another text."], "encoding_format": "float"},
            "embed",
        )
        for path in ("/v1/embeddings", "/embeddings")
    ),
    Endpoint(
        "/classify",
        classify,
        ClassifyRequest,
        ClassifyAnswer,
        "Classifies texts, as infinity does.",
        {"input": ["A text."]},
        "classify",
    ),
]
