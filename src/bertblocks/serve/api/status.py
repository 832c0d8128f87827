"""Routes without a body: what is served. `front.py` answers those that say whether the server is up."""

from __future__ import annotations

from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import bertblocks
from bertblocks.serve.api.endpoint import Server
from bertblocks.serve.api.openai import ModelCard, ModelList, describe_model
from bertblocks.serve.api.schemas import Answer
from bertblocks.serve.api.tei import kind_of
from bertblocks.serve.error_bodies import error_body
from bertblocks.serve.models import ServedModel


class Status(Answer):
    status: str


class Info(Answer):
    """TEI's description of the first model and of the server's limits, and all models."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    models: list[ModelCard]


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def make_info(server: Server) -> dict[str, Any]:
    model: ServedModel = server.models[0]
    predictor = model.predictor
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": predictor.precision,
        "model_type": _describe_type(model),
        # the queue is bounded in tokens, and a request has at least one
        "max_concurrent_requests": server.settings.queue_tokens,
        "max_input_length": predictor.max_length,
        "max_batch_tokens": server.settings.batch_tokens or predictor.token_budget,
        "max_batch_requests": None,
        "max_client_batch_size": server.settings.max_inputs,
        # long texts are not errors unless a request says so
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": bertblocks.__version__,
        "sha": None,
        "docker_label": None,
        "models": [describe_model(served, server) for served in server.models],
    }


def _describe_type(model: ServedModel) -> dict[str, Any]:
    kind = kind_of(model)
    if kind in ("sparse", "embedding"):
        return {"embedding": {"pooling": "splade" if kind == "sparse" else str(model.predictor.pooling)}}
    names = cast(dict[int, str], model.predictor.model.config.id2label)
    labels = {str(index): label for index, label in names.items()}
    return {kind: {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}}


def status_routes(server: Server) -> list[Route]:
    """`/info` and the lists of models."""
    info = make_info(server)

    async def get_info(request: Request) -> Response:
        return json_response(info)

    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": info["models"]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["id"]
        for card in info["models"]:
            if card["id"] == name:
                return json_response(card)
        names = ", ".join(card["id"] for card in info["models"])
        message = f"There is no model {name[:200]!r}; the models are {names}."
        return json_response(error_body(request.url.path, 404, message, "model", "model_not_found"), 404)

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{id:path}", get_model, methods=["GET"]),
        Route("/models", list_models, methods=["GET"]),
        Route("/info", get_info, methods=["GET"]),
    ]


#: By path: the type of the answer, what the route does, and the statuses of its errors.
GET_ROUTES: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "/v1/models": (ModelList, "Lists the models.", (401,)),
    "/v1/models/{id}": (ModelCard, "Describes a model.", (401, 404)),
    "/models": (ModelList, "Lists the models.", (401,)),
    "/info": (Info, "Describes the first model and the limits, as TEI does, and lists the models.", (401,)),
    "/live": (Status, "Says that the process is up.", ()),
    "/ready": (Status, "Says whether models are warm and requests are accepted.", (503,)),
    "/health": (Status, "The same as /ready.", (503,)),
}
