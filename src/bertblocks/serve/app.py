"""Puts the routes together."""

from __future__ import annotations

import time
from importlib import resources

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from bertblocks.serve.api import cohere, openai, own, tei
from bertblocks.serve.api.endpoint import Endpoint, EndpointApp, Server
from bertblocks.serve.api.openapi import make_document, make_page
from bertblocks.serve.api.status import json_response, status_routes
from bertblocks.serve.error_bodies import error_body
from bertblocks.serve.models import ModelSet
from bertblocks.serve.page import page_routes
from bertblocks.serve.scheduler import Scheduler
from bertblocks.serve.settings import ServeSettings


def make_app(models: ModelSet, scheduler: Scheduler, settings: ServeSettings) -> Starlette:
    """The application: every route, and what is around all of them."""
    server = Server(models, scheduler, settings, int(time.time()))
    endpoints = [
        *openai.ENDPOINTS,
        *tei.ENDPOINTS,
        *cohere.ENDPOINTS,
        *own.ENDPOINTS,
        tei.root_endpoint(models[0]),
    ]
    routes = [
        *(Route(endpoint.path, EndpointApp(endpoint, server), methods=["POST"]) for endpoint in endpoints),
        *status_routes(server),
        *page_routes(),
        *(docs_routes(endpoints, models) if settings.docs else []),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _answer_http, Exception: _answer_failure})


def docs_routes(endpoints: list[Endpoint], models: ModelSet) -> list[Route]:
    """`/openapi.json`, and `/docs`, which shows it."""
    document = make_document(endpoints, models)
    content, page = orjson.dumps(document), make_page(document)
    style = resources.files("bertblocks.serve.api").joinpath("docs.css").read_bytes()
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; frame-ancestors 'none'"}

    async def get_document(request: Request) -> Response:
        return Response(content, media_type="application/json")

    async def get_page(request: Request) -> Response:
        return HTMLResponse(page, headers=policy)

    async def get_style(request: Request) -> Response:
        return Response(style, media_type="text/css")

    return [
        Route("/openapi.json", get_document, methods=["GET"]),
        Route("/docs", get_page, methods=["GET"]),
        Route("/docs.css", get_style, methods=["GET"]),
    ]


async def _answer_http(request: Request, error: Exception) -> Response:
    """Answers a wrong path or method in the path's dialect."""
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    messages = {
        404: f"There is no route {path[:200]}; /docs lists them.",
        405: f"{path} does not take {request.method}.",
    }
    response = json_response(error_body(path, status, messages.get(status, error.detail)), status)
    response.headers.update(error.headers or {})
    return response


async def _answer_failure(request: Request, error: Exception) -> Response:
    return json_response(error_body(request.url.path, 500, "The server failed; its log has the details."), 500)
