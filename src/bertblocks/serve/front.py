"""The outer part of the server: probes and metrics, and the middleware around the routes.

It stands before the models are loaded, so that a server is alive at once and ready later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bertblocks.serve.answers import answer, answer_error, answer_json
from bertblocks.serve.auth import BearerKeys
from bertblocks.serve.limits import BodyLimit
from bertblocks.serve.metrics import Metrics
from bertblocks.serve.requests import RequestRecord, RequestRecorder
from bertblocks.serve.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: The type of Prometheus' text format.
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
#: Headers of answers that pages of other origins may read.
EXPOSED = (
    "retry-after",
    "server-timing",
    "x-compute-characters",
    "x-compute-tokens",
    "x-dtype",
    "x-inference-time",
    "x-lengths",
    "x-queue-time",
    "x-request-id",
    "x-shape",
    "x-tokenization-time",
    "x-total-time",
)


class Runs(Protocol):
    """What the server needs of the scheduler."""

    async def start(self) -> None: ...

    async def drain(self, seconds: float) -> object: ...

    @property
    def is_ready(self) -> bool: ...


@dataclass(frozen=True)
class Service:
    """The routes, and the scheduler that runs their models."""

    app: ASGIApp
    scheduler: Runs


@dataclass(frozen=True)
class _Route:
    """A route of this file; the record of a request takes its path."""

    path: str
    answer: Callable[[Scope, Send], Awaitable[None]]


class Front:
    """ASGI application: answers probes from the first moment, and everything else once there is a service."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._service: Service | None = None
        self._is_draining = False
        routes = [
            _Route("/live", self._answer_live),
            _Route("/ready", self._answer_ready),
            _Route("/health", self._answer_ready),
            _Route("/metrics", self._answer_metrics),
            _Route("/stats", self._answer_stats),
        ]
        self._routes: Mapping[str, _Route] = {route.path: route for route in routes}

    def open(self, service: Service) -> None:
        """From now on requests reach the routes."""
        self._service = service

    def drain(self) -> None:
        """From now on the server is not ready; requests that still arrive are answered."""
        self._is_draining = True

    @property
    def _problem(self) -> str | None:
        """Why the server is not ready, or None if it is."""
        if self._is_draining:
            return "The server is shutting down."
        if self._service is None:
            return "The models are being loaded."
        return None if self._service.scheduler.is_ready else "The models are not ready."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = self._routes.get(scope["path"])
        if route is not None and scope["method"] in ("GET", "HEAD"):
            scope["route"] = route
            await route.answer(scope, send)
        elif self._service is None:
            await answer_error(scope, send, 503, "The models are being loaded.", {"retry-after": "1"})
        else:
            with self._metrics.in_progress():
                await self._service.app(scope, receive, send)

    async def _answer_live(self, scope: Scope, send: Send) -> None:
        await answer_json(send, 200, {"status": "ok"})

    async def _answer_ready(self, scope: Scope, send: Send) -> None:
        problem = self._problem
        if problem is None:
            await answer_json(send, 200, {"status": "ok"})
        else:
            await answer_error(scope, send, 503, problem, {"retry-after": "1"})

    async def _answer_metrics(self, scope: Scope, send: Send) -> None:
        self._metrics.set_ready(self._problem is None)
        await answer(send, 200, self._metrics.to_prometheus(), {"content-type": PROMETHEUS})

    async def _answer_stats(self, scope: Scope, send: Send) -> None:
        await answer_json(send, 200, self._metrics.to_stats(), {"cache-control": "no-store"})


def wrap(front: ASGIApp, settings: ServeSettings, sinks: Sequence[Callable[[RequestRecord], None]]) -> ASGIApp:
    """Puts the middleware around the routes, the outermost last."""
    app: ASGIApp = BodyLimit(front, settings)
    app = BearerKeys(app, settings)
    if settings.cors:
        from starlette.middleware.cors import CORSMiddleware

        options: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app = CORSMiddleware(app, allow_origins=settings.cors, expose_headers=EXPOSED, max_age=600, **options)
    return RequestRecorder(app, sinks)
