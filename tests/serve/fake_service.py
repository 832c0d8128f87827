"""A server whose service is a few lines, in a process of its own: it starts without torch."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

SOURCE = Path(__file__).parents[2] / "src"


class FakeScheduler:
    """Ready once it has started; says when it is drained."""

    is_ready = False

    async def start(self) -> None:
        self.is_ready = True

    async def drain(self, seconds: float) -> None:
        self.is_ready = False
        print("drained", flush=True)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body after the seconds that the query names; /fail raises an exception."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/fail":
        raise RuntimeError("a secret detail")
    await asyncio.sleep(float(scope["query_string"] or b"0"))
    body = b"x" * 50_000_000 if scope["path"] == "/large" else json.dumps({"size": size}).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"x-compute-tokens", b"7"), (b"x-queue-time", b"1.5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(settings: dict[str, Any], load_seconds: float = 0.0, failure: str | None = None) -> None:
    from bertblocks.serve.front import Service
    from bertblocks.serve.metrics import Metrics
    from bertblocks.serve.run import run_server
    from bertblocks.serve.settings import ServeSettings

    def load() -> None:
        time.sleep(load_seconds)
        if failure is not None:
            raise ValueError(failure)

    def make_service(loaded: None, metrics: Metrics) -> Service:
        return Service(app, FakeScheduler())

    if "uds" in settings:
        settings["uds"] = Path(settings["uds"])
    print("starting", flush=True)
    try:
        run_server(ServeSettings(port=0, **settings), load, make_service, lambda _, url: print(url, flush=True))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


class Running:
    """A server process, once it has printed its URL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        self.url = process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2]) if self.url.startswith("http") else 0

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
        """Asks over a connection of its own; keywords are headers, with _ for -."""
        connection = self.connect()
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        found = Response(response.status, dict(response.headers), response.read())
        connection.close()
        return found

    def memory(self, field: str = "VmHWM") -> int:
        """Bytes of resident memory, by default at its peak."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal; returns the exit code, and what the process wrote."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


def start(*arguments: Any, **settings: Any) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    code = f"from tests.serve.fake_service import main; main({settings!r}, *{arguments!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), root])}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def serving(*arguments: Any, **settings: Any) -> Iterator[Running]:
    process = start(*arguments, **settings)
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()
