"""Cohere's rerank, which Jina, infinity and vLLM follow."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, PlainValidator, WithJsonSchema

from bertblocks.serve.api.endpoint import Call, Endpoint
from bertblocks.serve.api.openai import Usage, usage
from bertblocks.serve.api.schemas import Answer, Body, given
from bertblocks.tasks.rerank.predictions import Ranked


def _check_documents(documents: Any) -> Any:
    is_list = isinstance(documents, list) and documents
    if not is_list or not all(isinstance(document, (str, dict)) for document in documents):
        raise ValueError("it must be a list of texts, or of objects with texts")
    return documents


_FIELDS = {"type": "object"}
Documents = Annotated[
    list[str | dict[str, str]],
    PlainValidator(_check_documents),
    WithJsonSchema({"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _FIELDS]}}),
]


class RerankOptions(Body):
    """What requests for a ranking have in common."""

    query: str
    top_n: int | None = Field(None, ge=1, description="How many documents to return, by default all.")
    return_documents: bool = Field(False, description="Whether results have the documents' texts.")
    raw_scores: bool = Field(False, description="Whether scores are logits, as in TEI and infinity.")


class RerankRequest(RerankOptions):
    documents: Documents
    rank_fields: list[str] | None = Field(
        None, min_length=1, description="The fields of documents that are objects, by default `text`."
    )
    max_chunks_per_doc: int | None = Field(None, ge=1, description="Accepted; the model's own length applies.")
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Accepted; the model's own length applies.")
    priority: int | None = Field(None, description="Accepted; requests are served by length and age.")


class RankedText(Answer):
    text: str


class RankedDocument(Answer):
    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankMeta(Answer):
    api_version: dict[str, str]
    billed_units: dict[str, int]


class RerankAnswer(Answer):
    id: str
    object: str
    model: str
    results: list[RankedDocument]
    meta: RerankMeta
    usage: Usage


async def rerank(call: Call, body: RerankRequest) -> Any:
    model = call.find(body.model, "rerank")
    fields = body.rank_fields or ["text"]
    texts = [_read_text(document, fields, index) for index, document in enumerate(body.documents)]
    call.check_number(len(texts))
    options = given(top_k=body.top_n, raw_scores=body.raw_scores or None)
    ranked: list[Ranked] = (await call.run(model, "rerank", [(body.query, texts)], options))[0]
    results: list[dict[str, Any]] = [{"index": item.index, "relevance_score": item.score} for item in ranked]
    if body.return_documents:
        results = [{**result, "document": {"text": item.text}} for result, item in zip(results, ranked, strict=True)]
    version = "2" if call.path.startswith("/v2/") else "1"
    return {
        "id": uuid4().hex,
        "object": "rerank",
        "model": model.name,
        "results": results,
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
        "usage": usage(call.tokens),
    }


def _read_text(document: str | dict[str, str], fields: list[str], index: int) -> str:
    if isinstance(document, str):
        return document
    for name in fields:
        if not isinstance(document.get(name), str):
            raise ValueError(f"Document {index} does not have the text {name!r}; name its texts in rank_fields.")
    return " ".join(document[name] for name in fields)


ENDPOINTS = [
    Endpoint(
        path,
        rerank,
        RerankRequest,
        RerankAnswer,
        "Orders documents by relevance, as Cohere does.",
        {"query": "What is it about?", "documents": ["A text.", "Another text."], "top_n": 1},
        "rerank",
    )
    for path in ("/v1/rerank", "/v2/rerank")
]
