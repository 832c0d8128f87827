"""Connections of uvicorn, with the limits that it lacks and a drain that loses nobody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a request's line and headers.
MAX_HEADER_BYTES = 64 * 1024
#: Seconds that a drain waits for a request that is on its way over an open connection.
IDLE_GRACE = 0.5


@dataclass
class ConnectionLimits:
    """What all connections of a server share."""

    timeout: float
    max_connections: int
    draining: bool = False


class JoinedWrites:
    """A transport that sends the head of an answer and its body in one packet. uvicorn writes them one after the other,
    and every write costs a system call and wakes the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Holds data until the next write, at most until the event loop has nothing else to do for this client."""
        if self._held is None:
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            held, self._held = self._held, None
            self._transport.writelines([held, data])

    def _flush(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._transport.write(held)

    def close(self) -> None:
        self._flush()
        self._transport.close()


class LimitedProtocol(HttpToolsProtocol):
    """A connection that ends if its client sends no request, sends too much of one, or does not read its answer."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True
        self._in_request = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self._limits.max_connections:
            self._end(429, "Too many connections.")
        else:
            self._await_request(IDLE_GRACE if self._limits.draining else self._limits.timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._end(431, f"The headers are larger than {MAX_HEADER_BYTES // 1024} KiB.")
        elif self._request_timer is None and (
            self._in_request or (self._is_idle and self.timeout_keep_alive_task is None)
        ):
            self._await_request(self._limits.timeout)

    def on_message_begin(self) -> None:
        self._in_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes = False, 0
        super().on_headers_complete()
        if self._limits.draining:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_request, self._in_headers, self._header_bytes = False, True, 0
        self._stop_request_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self._limits.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """Finishes the request that runs or is on its way, and then ends."""
        if not self._is_idle:
            self.cycle.keep_alive = False
        elif not self._in_request:
            self._stop_request_timer()
            self._unset_keepalive_if_required()
            self._await_request(IDLE_GRACE)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_request(self, seconds: float) -> None:
        self._request_timer = self.loop.call_later(seconds, self._request_timed_out)

    def _request_timed_out(self) -> None:
        """The client had its time to send a request, unless it was the server that did not read."""
        self._request_timer = None
        if self.transport.is_closing():
            return
        if self.pipeline or (self._in_headers and not self._is_idle):
            self._await_request(self._limits.timeout)
        elif self._in_request and (self._in_headers or not self.cycle.response_started):
            self._end(408, f"The request did not arrive within {self._limits.timeout:g} s.")
        else:
            self.transport.close()

    def _end(self, status: int, message: str) -> None:
        body = message.encode()
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 429: "Too Many Requests"}
