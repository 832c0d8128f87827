"""Answers that the server gives before, or in place of, a route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Scope, Send

#: Cohere's routes; their errors have one key.
_COHERE = ("/v1/rerank", "/v2/rerank")
#: By status: the type of OpenAI's errors and of TEI's.
_TYPES = {
    400: ("invalid_request_error", "Validation"),
    401: ("authentication_error", "Unauthorized"),
    408: ("invalid_request_error", "Timeout"),
    413: ("invalid_request_error", "Validation"),
    429: ("rate_limit_error", "Overloaded"),
    500: ("server_error", "Backend"),
    503: ("server_error", "Unhealthy"),
}


async def answer_json(send: Send, status: int, body: Any, headers: Mapping[str, str] = {}) -> None:
    await answer(send, status, json.dumps(body).encode(), {"content-type": "application/json", **headers})


async def answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Sends a whole answer."""
    await send_start(send, status, body, headers)
    await send({"type": "http.response.body", "body": body})


async def send_start(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*pairs, (b"content-length", str(len(body)).encode())],
        }
    )


async def answer_error(scope: Scope, send: Send, status: int, message: str, headers: Mapping[str, str] = {}) -> None:
    await answer_json(send, status, error_body(scope["path"], status, message), headers)


def error_body(path: str, status: int, message: str) -> dict[str, Any]:
    """An error in the form that clients of the route expect.

    Example:
        >>> error_body("/embed", 413, "Too large.")
        {'error': 'Too large.', 'error_type': 'Validation'}
        >>> error_body("/v2/rerank", 413, "Too large.")
        {'message': 'Too large.'}
    """
    openai, tei = _TYPES[status]
    if path in _COHERE:
        return {"message": message}
    if path.startswith("/v1/") or path == "/embeddings":
        return {"error": {"message": message, "type": openai, "param": None, "code": None}}
    return {"error": message, "error_type": tei}
