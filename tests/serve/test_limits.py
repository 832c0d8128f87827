from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from bertblocks.serve import limits
from bertblocks.serve.limits import BodyLimit
from bertblocks.serve.settings import ServeSettings
from tests.serve.asgi import call, ok

SMALL = BodyLimit(ok, ServeSettings(max_body=10))


def test_the_route_gets_the_whole_body_in_one_message() -> None:
    assert call(SMALL, parts=[b"abc", b"", b"defghij"], transfer_encoding="chunked").body == b"abcdefghij"
    assert call(SMALL, parts=[b"abc"], content_length="3").body == b"abc"
    assert call(SMALL, method="GET").status == 200


@pytest.mark.parametrize(
    ("parts", "headers"),
    [
        ([b"12345678901"], {"content_length": "11"}),
        ([b"1234567890", b"1"], {"transfer_encoding": "chunked"}),
        ([b"1234567890", b"1"], {"transfer_encoding": "chunked", "content_length": "3"}),
        ([], {"content_length": "9" * 100}),
    ],
)
def test_larger_bodies_get_413(parts: list[bytes], headers: dict[str, str]) -> None:
    answer = call(SMALL, parts=parts, **headers)
    assert answer.status == 413
    assert answer.headers["connection"] == "close"
    assert "larger than" in json.loads(answer.body)["error"]
    assert SMALL._held == 0


def run(app: BodyLimit, receive: Receive, **headers: str) -> tuple[list[Message], int]:
    """Returns what the application sent, and how often it asked for more."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": pairs}
    sent: list[Message] = []
    asked = 0

    async def count() -> Message:
        nonlocal asked
        asked += 1
        return await receive()

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, count, send))
    return sent, asked


def test_an_endless_body_is_answered_at_once_and_dropped_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER", 0.05)

    async def receive() -> Message:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"x", "more_body": True}

    sent, asked = run(SMALL, receive, **{"transfer-encoding": "chunked"})
    assert [message.get("status") for message in sent] == [413, None, None]
    assert sent[1]["more_body"]
    assert not sent[2].get("more_body")
    assert asked > 11


def test_a_client_that_leaves_in_the_middle_reaches_no_route() -> None:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        pytest.fail("the body is not complete")

    messages: list[Message] = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    app = BodyLimit(route, ServeSettings())
    assert run(app, receive, **{"content-length": "5"})[0] == []
    assert app._held == 0


def test_the_route_sees_that_the_client_leaves_later() -> None:
    seen: list[str] = []

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    call(BodyLimit(route, ServeSettings()), parts=[b"abc"], content_length="3")
    assert seen == ["http.request", "http.disconnect"]


def test_many_large_bodies_at_once_get_429() -> None:
    """Memory is bounded, whatever the number of clients. The rest is answered when others are done."""
    statuses: list[int] = []

    async def main() -> None:
        done = asyncio.Event()

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await done.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        app = BodyLimit(route, ServeSettings(max_body=10))

        async def client() -> None:
            messages: list[Message] = [{"type": "http.request", "body": b"x" * 10}]

            async def receive() -> Message:
                return messages.pop(0) if messages else {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"10")]}
            await app(scope, receive, send)

        waiting = [asyncio.ensure_future(client()) for _ in range(limits.LARGEST_BODIES + 3)]
        await asyncio.sleep(0)
        done.set()
        await asyncio.gather(*waiting)
        assert sorted(statuses) == [200] * limits.LARGEST_BODIES + [429] * 3
        await client()
        assert statuses[-1] == 200

    asyncio.run(main())
