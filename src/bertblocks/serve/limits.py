"""What a client may send: bodies of bounded size. `connections.py` bounds the time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bertblocks.core.console import write_bytes
from bertblocks.serve.answers import send_start
from bertblocks.serve.error_bodies import error_body
from bertblocks.serve.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bodies of the largest size that the server holds at once, whatever the number of connections.
LARGEST_BODIES = 16
#: Seconds in which the rest of a refused body is read and dropped. A client that is still sending would otherwise get a
#: reset in place of the answer.
LINGER = 5.0


class _Refused(Exception):
    """The body cannot be taken; the answer says why."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class BodyLimit:
    """ASGI middleware: reads the body before the route runs, and refuses one that is too large."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self.app = app
        self.max_body = settings.max_body
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            try:
                message = await self._read(scope, receive, parts)
            except _Refused as refusal:
                self._release(parts)
                await _refuse(scope, receive, send, refusal)
                return
            if message["type"] == "http.request":
                await self.app(scope, _replay(message, receive), send)
        finally:
            self._release(parts)

    async def _read(self, scope: Scope, receive: Receive, parts: list[bytes]) -> Message:
        """Reads the whole body, in one message; `parts` holds what counts as read."""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_large()
        size = 0
        while True:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size > self.max_body:
                raise self._too_large()
            if self._held + len(part) > LARGEST_BODIES * self.max_body:
                raise _Refused(429, "The server is reading too many large requests.", {"retry-after": "1"})
            self._held += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                break
        if len(parts) > 1:
            parts[:] = [b"".join(parts)]
        return {**message, "body": parts[0]} if message["type"] == "http.request" else message

    def _too_large(self) -> _Refused:
        return _Refused(413, f"The body of the request is larger than {write_bytes(self.max_body)}; send fewer inputs.")

    def _release(self, parts: list[bytes]) -> None:
        self._held -= sum(map(len, parts))
        parts.clear()


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _replay(message: Message, receive: Receive) -> Receive:
    """A `receive` that gives the body first, and then what the client does next."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return message

    return replay


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: _Refused) -> None:
    """Answers at once, drops what the client still sends for a while, and closes the connection."""
    body = json.dumps(error_body(scope["path"], refusal.status, str(refusal))).encode()
    headers = {"content-type": "application/json", "connection": "close", **refusal.headers}
    await send_start(send, refusal.status, body, headers)
    await send({"type": "http.response.body", "body": body, "more_body": True})

    async def drop() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop(), LINGER)
    await send({"type": "http.response.body", "body": b""})
