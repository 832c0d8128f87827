"""Answers leave in one packet."""

from __future__ import annotations

import asyncio
from typing import Any

from bertblocks.serve.connections import JoinedWrites


class Recorder:
    """A transport that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.calls.append(parts)

    def close(self) -> None:
        self.calls.append("closed")


async def record(*steps: bytes | str) -> list[Any]:
    """The calls that reach the transport; "wait" lets the event loop run."""
    recorder = Recorder()
    joined = JoinedWrites(recorder, asyncio.get_running_loop())  # type: ignore[arg-type]
    for step in steps:
        if isinstance(step, bytes):
            joined.write(step)
        elif step == "close":
            joined.close()
        else:
            await asyncio.sleep(0)
    return recorder.calls


def test_head_and_body_are_one_write() -> None:
    assert asyncio.run(record(b"head", b"body", "wait")) == [[b"head", b"body"]]


def test_what_has_no_body_leaves_when_the_loop_goes_on() -> None:
    assert asyncio.run(record(b"head", "wait", b"body", "wait")) == [b"head", b"body"]


def test_closing_sends_what_is_held() -> None:
    assert asyncio.run(record(b"head", "close", "wait")) == [b"head", "closed"]
