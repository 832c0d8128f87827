"""Calls an ASGI application without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Answer:
    status: int | None
    headers: dict[str, str]
    body: bytes


def call(
    app: ASGIApp, path: str = "/embed", method: str = "POST", parts: Sequence[bytes] = (), **headers: str
) -> Answer:
    """The answer to a request whose body arrives in parts; keywords are headers, with _ for -."""
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": pairs, "query_string": b""}
    return asyncio.run(_call(app, scope, list(parts)))


async def _call(app: ASGIApp, scope: dict[str, Any], parts: list[bytes]) -> Answer:
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts or [b""], start=1)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return Answer(None, {}, b"")
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert int(fields.get("content-length", "-1")) in (-1, sum(len(message.get("body", b"")) for message in sent))
    return Answer(sent[0]["status"], fields, b"".join(message.get("body", b"") for message in sent[1:]))


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 200 with the body of the request."""
    message = await receive()
    assert not message.get("more_body")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message.get("body", b"")})
