"""A plain embedding service with FastAPI and sentence-transformers: each request is one `encode` in a thread pool.

It runs in an environment of its own (see `serve_peers`): `MODEL=FOLDER uvicorn benchmarks.fastapi_service:app`.
"""

from __future__ import annotations

import os

import torch
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(os.environ["MODEL"], device="cpu", model_kwargs={"dtype": torch.float32})
app = FastAPI()


class Texts(BaseModel):
    input: str | list[str]


class Vector(BaseModel):
    index: int
    embedding: list[float]


class Vectors(BaseModel):
    data: list[Vector]


def encode(texts: list[str]) -> list[list[float]]:
    return model.encode(texts, normalize_embeddings=True, show_progress_bar=False).tolist()


@app.post("/v1/embeddings")
async def embeddings(texts: Texts) -> Vectors:
    inputs = [texts.input] if isinstance(texts.input, str) else texts.input
    vectors = await run_in_threadpool(encode, inputs)
    return Vectors(data=[Vector(index=index, embedding=vector) for index, vector in enumerate(vectors)])
