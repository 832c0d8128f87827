"""One record of every HTTP request, for the log, the metrics and the traces; and its id.

The record takes tokens and stage timings from the headers of the answer, so the routes need not know who reads them.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertblocks.serve.answers import answer_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("bertblocks.serve")
#: Ids that clients may choose; others are replaced, so that nobody can write lines into the log.
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")
#: The id of the request that the running code works for.
REQUEST_ID: ContextVar[str | None] = ContextVar("REQUEST_ID", default=None)
#: The headers of an answer that hold milliseconds, by the stage they measure.
STAGE_HEADERS = {
    b"x-tokenization-time": "tokenize",
    b"x-queue-time": "queue",
    b"x-inference-time": "inference",
}
#: The status of a request whose client left before it was answered, as nginx logs it.
CLIENT_CLOSED = 499


@dataclass(frozen=True)
class RequestRecord:
    """What is known about a request that ended; never its texts."""

    id: str
    method: str
    #: The route's pattern, "unmatched" if the path has none.
    route: str
    status: int
    #: When it began, in seconds since 1970, and how long it took.
    began: float
    seconds: float
    tokens: int | None
    #: Seconds by stage: tokenize, queue, inference.
    stages: dict[str, float]
    client: str
    #: The header `traceparent`, if the client sent one.
    trace_parent: str | None


class RequestRecorder:
    """ASGI middleware, the outermost: gives requests ids, records how they end, and turns exceptions into 500s."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Callable[[RequestRecord], None]]) -> None:
        self.app = app
        self.sinks = sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, start = time.time(), time.perf_counter()
        given = _find_header(scope, b"x-request-id")
        request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        REQUEST_ID.set(request_id.decode())
        status = CLIENT_CLOSED
        answer_headers: list[tuple[bytes, bytes]] = []

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
                answer_headers.extend(headers)
                message = {**message, "headers": [*headers, (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed")
            if status == CLIENT_CLOSED:
                text = f"The server failed; its log has the details under request {request_id.decode()}."
                await answer_error(scope, send_with_id, 500, text)
        finally:
            self._record(scope, request_id.decode(), status, began, time.perf_counter() - start, answer_headers)

    def _record(
        self,
        scope: Scope,
        request_id: str,
        status: int,
        began: float,
        seconds: float,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        values = {name.lower(): value for name, value in headers}
        tokens = values.get(b"x-compute-tokens")
        parent = _find_header(scope, b"traceparent")
        record = RequestRecord(
            request_id,
            scope["method"],
            getattr(scope.get("route"), "path", "unmatched"),
            status,
            began,
            seconds,
            int(tokens) if tokens is not None else None,
            {stage: float(values[name]) / 1000 for name, stage in STAGE_HEADERS.items() if name in values},
            (scope.get("client") or ("",))[0],
            parent.decode("latin-1") if parent is not None else None,
        )
        for sink in self.sinks:
            sink(record)


def _find_header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
