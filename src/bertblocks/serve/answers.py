"""Answers that the server gives before, or in place of, a route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bertblocks.serve.error_bodies import error_body

if TYPE_CHECKING:
    from starlette.types import Scope, Send


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
