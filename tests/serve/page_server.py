"""A server without models behind the page: answers that a test can compute itself, in the formats of `/v1/{task}`.

`python -m tests.serve.page_server` runs it on port 8123, to look at the page.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bertblocks.serve.page import page_routes

SIZE = 96
MODELS: list[dict[str, Any]] = [
    {"name": "small-embedder", "tasks": ["embed"], "precision": "int8", "max_length": 512, "parameters": 22_713_216},
    {
        "name": "prompted-embedder",
        "tasks": ["embed"],
        "precision": "bfloat16",
        "max_length": 8192,
        "parameters": 149_014_272,
        "prompts": {"query": "query: ", "document": "passage: "},
    },
    {"name": "reranker", "tasks": ["rerank"], "precision": "float32", "max_length": 512, "parameters": 33_360_000},
    {"name": "reviews", "tasks": ["classify"], "precision": "float32", "labels": ["negative", "neutral", "positive"]},
    {"name": "entities", "tasks": ["tag"], "precision": "float32", "labels": ["NAME", "NUMBER"]},
    {"name": "squad", "tasks": ["answer"], "precision": "float32"},
    {"name": "pretrained", "tasks": ["fill-mask", "sparse"], "precision": "float32", "mask_token": "<mask>"},
    {"name": "colbert", "tasks": ["multi"], "precision": "float32"},
]


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def embed(text: str) -> np.ndarray:
    """Counts of words, by their hashes."""
    vector = np.full(SIZE, 0.2)
    for word in words(text.lower()):
        vector[zlib.crc32(word.encode()) % SIZE] += 1
    return vector / np.linalg.norm(vector)


def token_vectors(text: str) -> tuple[list[str], np.ndarray]:
    tokens = ["[CLS]", *words(text.lower()), "[SEP]"]
    return tokens, np.stack([embed(token) for token in tokens])


def overlap(query: str, document: str) -> float:
    """The share of a document's words that the query has."""
    asked, said = set(words(query.lower())), set(words(document.lower()))
    return len(asked & said) / len(said)


def tag(text: str) -> list[dict[str, Any]]:
    spans = re.finditer(r"[A-Z]\w+(?: [A-Z]\w+)*|\d+", text)
    kinds = ((match, "NUMBER" if match[0].isdigit() else "NAME") for match in spans)
    return [
        {"label": kind, "start": match.start(), "end": match.end(), "text": match[0], "score": 0.97}
        for match, kind in kinds
    ]


def answer(pair: dict[str, str]) -> dict[str, Any]:
    """Numbers of the context, the first one best."""
    best = [
        {"text": match[0], "start": match.start(), "end": match.end(), "score": 9.5 - rank}
        for rank, match in enumerate(re.finditer(r"\d+", pair["context"]))
    ][:5]
    first = best[0] if best else {"text": "", "start": 0, "end": 0, "score": -3.25}
    return {**first, "no_answer_score": -1.5, "best": best}


def classify(item: str | list[str]) -> dict[str, Any]:
    scores = {"positive": 0.75, "neutral": 0.2, "negative": 0.05}
    if not isinstance(item, str):
        scores = {"entailment": 0.9, "contradiction": 0.1}
    return {"labels": [max(scores, key=scores.__getitem__)], "scores": scores}


def fill(text: str) -> list[list[dict[str, Any]]]:
    found = [("paris", 0.625), ("lyon", 0.25), (" ", 0.125)]
    return [[{"token": t, "id": i, "score": s} for i, (t, s) in enumerate(found)] for _ in range(text.count("<mask>"))]


def sparse(text: str) -> dict[str, Any]:
    tokens = sorted(set(words(text.lower())))
    return {
        "indices": list(range(len(tokens))),
        "values": [len(token) / 4 for token in tokens],
        "tokens": tokens,
    }


def tokenize(text: str) -> list[dict[str, Any]]:
    inner = [
        {"id": 100 + match.start(), "token": match[0], "start": match.start(), "end": match.end(), "special": False}
        for match in re.finditer(r"\w+|[^\w\s]", text)
    ]
    edge = {"start": 0, "end": 0, "special": True}
    return [{"id": 1, "token": "[CLS]", **edge}, *inner, {"id": 2, "token": "[SEP]", **edge}]


METHODS: dict[str, Callable[[Any], Any]] = {
    "embed": lambda text: embed(text).tolist(),
    "classify": classify,
    "tag": tag,
    "answer": answer,
    "fill-mask": fill,
    "sparse": sparse,
    "multi": lambda text: token_vectors(text)[1].tolist(),
    "tokenize": tokenize,
}


class PageServer:
    """The page's routes and canned answers. An input with "fail 429" gets that status; `key` is asked for if set."""

    def __init__(self, models: list[dict[str, Any]] | None = None, key: str | None = None) -> None:
        self.models = MODELS if models is None else models
        self.key = key
        #: Paths and bodies of the requests so far.
        self.seen: list[tuple[str, Any]] = []
        self.polls = 0
        routes = [Route(f"/v1/{task}", self.guard(self.run), methods=["POST"]) for task in METHODS]
        self.app = Starlette(
            routes=[
                *page_routes(),
                *routes,
                Route("/v1/rerank", self.guard(self.rerank), methods=["POST"]),
                Route("/info", self.guard(self.info)),
                Route("/stats", self.guard(self.stats)),
            ]
        )

    def guard(
        self, endpoint: Callable[[Request], Awaitable[JSONResponse]]
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def guarded(request: Request) -> JSONResponse:
            if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "The API key is missing or wrong."}}, 401)
            if request.method == "POST":
                body = await request.json()
                self.seen.append((request.url.path, body))
                if found := re.search(r"fail (\d+)", str(body)):
                    return self.fail(request.url.path, int(found[1]))
            return await endpoint(request)

        return guarded

    def fail(self, path: str, status: int) -> JSONResponse:
        message = f"The text is <b>bad</b>: status {status}."
        body = {"message": message} if path == "/v1/rerank" else {"error": {"message": message, "code": None}}
        return JSONResponse(body, status, {"Retry-After": "3"} if status == 429 else None)

    async def info(self, request: Request) -> JSONResponse:
        return JSONResponse({"model_id": "x", "version": "0", "models": self.models})

    async def stats(self, request: Request) -> JSONResponse:
        self.polls += 1
        wave = 1 + (self.polls * 37 % 17) / 17
        return JSONResponse(
            {
                "requests_per_second": 84.2 * wave,
                "tokens_per_second": 15_321.0 * wave,
                "p50_ms": 4.31 * wave,
                "p99_ms": 18.7 * wave,
                "queue_tokens": int(512 * (wave - 1)),
                "batch_tokens": None if self.polls < 2 else 2048,
            }
        )

    async def run(self, request: Request) -> JSONResponse:
        task = request.url.path.removeprefix("/v1/")
        body = await request.json()
        inputs = body["inputs"]
        content = {"model": body["model"], "results": [METHODS[task](item) for item in inputs], "usage": {"tokens": 9}}
        if task == "multi":
            content["tokens"] = [token_vectors(text)[0] for text in inputs]
        return JSONResponse(content, headers=timing(sum(len(str(item)) for item in inputs)))

    async def rerank(self, request: Request) -> JSONResponse:
        body = await request.json()
        scores = [overlap(body["query"], document) for document in body["documents"]]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [{"index": index, "relevance_score": scores[index]} for index in order]
        return JSONResponse({"id": "1", "results": results}, headers=timing(len(body["query"])))


def timing(characters: int) -> dict[str, str]:
    return {
        "x-compute-characters": str(characters),
        "x-compute-tokens": str(characters // 4),
        "x-total-time": "6.5",
        "x-tokenization-time": "0.21",
        "x-queue-time": "0.08",
        "x-inference-time": "5.9",
    }


@contextlib.contextmanager
def run_server(app: Starlette) -> Iterator[str]:
    """The address of a server on a free port, which ends with the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(10)


if __name__ == "__main__":
    uvicorn.run(PageServer().app, port=8123)
