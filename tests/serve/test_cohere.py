"""Cohere's rerank, compared with transformers on the same weights."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.live import Live, theirs_hidden, theirs_logits

QUERY, DOCUMENTS = "plain words", ["words are here", "two leading trailing", "plain"]


def theirs(live: Live) -> list[tuple[int, float]]:
    scores = [float(theirs_logits(live, "reranker", QUERY, text).sigmoid()) for text in DOCUMENTS]
    return sorted(enumerate(scores), key=lambda item: -item[1])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_equals_transformers(http: httpx.Client, live: Live, path: str) -> None:
    answer = http.post(path, json={"model": "reranker", "query": QUERY, "documents": DOCUMENTS}).json()
    expected = theirs(live)
    assert [result["index"] for result in answer["results"]] == [index for index, _ in expected]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-5)
    assert all(set(result) == {"index", "relevance_score"} for result in answer["results"])
    assert answer["meta"]["api_version"]["version"] == ("2" if path.startswith("/v2") else "1")
    tokens = sum(len(live.tokenizer(QUERY, text)["input_ids"]) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_top_n_and_documents(http: httpx.Client, live: Live) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    results = http.post("/v2/rerank", json=body).json()["results"]
    best = [index for index, _ in theirs(live)][:2]
    assert [result["index"] for result in results] == best
    assert [result["document"] for result in results] == [{"text": DOCUMENTS[index]} for index in best]


def test_documents_may_be_objects(http: httpx.Client, live: Live) -> None:
    objects = [{"text": text, "title": "two"} for text in DOCUMENTS]
    plain = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
    found = http.post("/v1/rerank", json={"query": QUERY, "documents": objects}).json()
    assert found["results"] == plain["results"]
    body = {"query": QUERY, "documents": objects[:1], "rank_fields": ["title", "text"], "return_documents": True}
    joined = http.post("/v1/rerank", json=body).json()["results"][0]
    assert joined["document"]["text"] == f"two {DOCUMENTS[0]}"
    expected = theirs_logits(live, "reranker", QUERY, f"two {DOCUMENTS[0]}").sigmoid()
    assert joined["relevance_score"] == pytest.approx(float(expected), abs=1e-5)


def test_multi_vector_models_score_by_maxsim(http: httpx.Client, live: Live) -> None:
    query = theirs_hidden(live, QUERY, "tokens")
    expected = [float((query @ theirs_hidden(live, text, "tokens").T).amax(dim=1).sum()) for text in DOCUMENTS]
    body = {"model": "tokens", "query": QUERY, "documents": DOCUMENTS}
    results = http.post("/v1/rerank", json=body).json()["results"]
    found = {result["index"]: result["relevance_score"] for result in results}
    np.testing.assert_allclose([found[index] for index in range(3)], expected, rtol=1e-4)
    tei = http.post("/rerank", json={"model": "tokens", "query": QUERY, "texts": DOCUMENTS}).json()
    assert [item["score"] for item in tei] == pytest.approx([result["relevance_score"] for result in results])


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "nobody"}, 404, "There is no model 'nobody'"),
        ({"model": "embedder"}, 422, "embedder cannot do rerank"),
        ({"query": ""}, 422, "Query 0 is empty"),
        ({"documents": []}, 422, "documents is []; it must be a list of texts, or of objects with texts."),
        ({"documents": [{"title": "two"}]}, 422, "Document 0 does not have the text 'text'"),
        ({"documents": ["plain"] * 9}, 413, "The request has 9 inputs"),
        ({"top_n": 0}, 422, "top_n is 0; input should be greater than or equal to 1."),
        ({"topn": 1}, 422, "'topn' is not a key of this request (did you mean 'top_n'?)."),
    ],
)
def test_errors_have_the_form_of_cohere(http: httpx.Client, change: dict[str, Any], status: int, message: str) -> None:
    answer = http.post("/v2/rerank", json={"query": QUERY, "documents": DOCUMENTS, **change})
    assert answer.status_code == status
    assert set(answer.json()) == {"message"}
    assert message in answer.json()["message"]
