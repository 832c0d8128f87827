"""The OpenAPI document: complete, true to the server, and shown without help from elsewhere."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.serve.live import Live
from tests.serve.schema_cases import run_cases


def test_the_document_lists_every_route_and_model(http: httpx.Client, live: Live) -> None:
    document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    tasks = {"embed", "sparse", "multi", "classify", "tag", "answer", "fill-mask", "tokenize", "similarity"}
    tei = {"/", "/embed", "/embed_all", "/embed_sparse", "/rerank", "/predict", "/similarity", "/tokenize", "/decode"}
    others = {"/v1/embeddings", "/embeddings", "/classify", "/v1/rerank", "/v2/rerank"}
    assert posts == {f"/v1/{task}" for task in tasks} | tei | others
    body = document["paths"]["/v1/tag"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["model"]["enum"] == ["tagger", "", None]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', http.get("/openapi.json").text))
    assert references <= set(document["components"]["schemas"])


def test_the_page_shows_every_route_and_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs")
    for path in http.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in page.text
    assert not re.search(r"https?://|<script", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    (style,) = re.findall(r'rel="stylesheet" href="([^"]+)"', page.text)
    assert http.get(f"/{style}").headers["content-type"].startswith("text/css")


def test_the_example_of_every_route_works(http: httpx.Client) -> None:
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        if "post" in methods:
            body = methods["post"]["requestBody"]["content"]["application/json"]["example"]
            assert http.post(path, json=body).status_code == 200, path


def test_answers_are_as_the_document_says(live: Live) -> None:
    statuses = run_cases(live.url, 120)
    assert statuses[200] > 10


@pytest.mark.slow
def test_ten_thousand_answers_are_as_the_document_says(live: Live) -> None:
    assert sum(run_cases(live.url, 10_000).values()) >= 10_000
