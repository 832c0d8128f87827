"""Runs a server from its start to the end of its drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import uvicorn

from bertblocks.serve.connections import ConnectionLimits, LimitedProtocol
from bertblocks.serve.front import Front, Service, wrap
from bertblocks.serve.listening import BACKLOG, allow_connections, listen, stop_connections
from bertblocks.serve.logs import make_access_log, set_up_logs
from bertblocks.serve.metrics import Metrics
from bertblocks.serve.requests import RequestRecord
from bertblocks.serve.settings import ServeSettings
from bertblocks.serve.traces import make_tracer

Loaded = TypeVar("Loaded")

logger = logging.getLogger("bertblocks.serve")
#: Seconds until an idle connection is closed; longer than proxies keep theirs, so that they close them first.
KEEP_ALIVE = 75
#: Seconds that clients have to complete the connections they have begun when the server stops listening.
LAST_HANDSHAKES = 0.1
#: The part of the drain that is left for answers to requests that could not be finished.
LAST_ANSWERS = 0.1


def run_server(
    settings: ServeSettings,
    load: Callable[[], Loaded],
    make_service: Callable[[Loaded, Metrics], Service],
    on_ready: Callable[[Loaded, str], None],
) -> None:
    """Listens at once, loads models in a thread and warms them, then serves until SIGTERM or SIGINT.

    `make_service` runs when that thread has ended, so it may fork. `on_ready` gets the server's URL. After the signal
    no connection is accepted, and every request that was accepted is answered within `settings.drain` seconds; a second
    signal ends the process at once.
    """
    tracer = make_tracer(settings.otlp_endpoint)
    listener = listen(settings)
    set_up_logs(settings.log_format)
    try:
        if settings.uds is None:
            settings = replace(settings, port=listener.getsockname()[1])
        allow_connections(settings.max_connections)
        metrics = Metrics()
        sinks: list[Callable[[RequestRecord], None]] = [metrics.record]
        if settings.log_format != "off":
            sinks.append(make_access_log(settings.log_format))
        if tracer is not None:
            sinks.append(tracer.record)

        async def start() -> Service:
            loaded = await _run_in_thread(load)
            service = make_service(loaded, metrics)
            await service.scheduler.start()
            on_ready(loaded, settings.url)
            return service

        server = _Server(settings, Front(metrics), sinks, start)
        server.run(sockets=[listener])
        if server.failure is not None:
            raise server.failure
    finally:
        listener.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
        if tracer is not None:
            tracer.close()


class _Server(uvicorn.Server):
    """uvicorn's server with a start that does not wait for models, and with a drain of ours."""

    def __init__(
        self,
        settings: ServeSettings,
        front: Front,
        sinks: list[Callable[[RequestRecord], None]],
        start: Callable[[], Awaitable[Service]],
    ) -> None:
        self.limits = ConnectionLimits(settings.client_timeout, settings.max_connections)
        protocol: Any = functools.partial(LimitedProtocol, limits=self.limits)
        config = uvicorn.Config(
            wrap(front, settings, sinks),
            http=protocol,
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            backlog=BACKLOG,
        )
        super().__init__(config)
        self.settings = settings
        self.front = front
        self.failure: Exception | None = None
        self._start = start
        self._service: Service | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._starting = asyncio.get_running_loop().create_task(self._start_service())

    async def _start_service(self) -> None:
        began = time.monotonic()
        try:
            service = await self._start()
        except Exception as error:
            self.failure, self.should_exit = error, True
            return
        gc.collect()
        gc.freeze()  # collections need not visit the models and libraries again
        self._service = service
        self.front.open(service)
        logger.info("ready after %.1f s", time.monotonic() - began)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """The first signal starts the drain, the second ends the process. uvicorn would raise the first once more."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + number)
            self.should_exit = True
            self.front.drain()

        originals = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, original in originals.items():
                signal.signal(number, original)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = time.monotonic() + self.settings.drain
        self.front.drain()
        self.limits.draining = True
        await self._stop_listening(sockets or [])
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            logger.info("finishing %d requests", len(self.server_state.tasks))
        await self._wait_for_connections(deadline - LAST_ANSWERS * self.settings.drain)
        self._starting.cancel()
        if self._service is not None:
            await self._service.scheduler.drain(max(0.0, deadline - time.monotonic()))
        await self._wait_for_connections(deadline)
        if self.server_state.tasks:
            logger.warning(
                "%d requests were not finished within %g s", len(self.server_state.tasks), self.settings.drain
            )
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Closes the listener, but takes the connections that the kernel has begun to accept by then."""
        copies = [each.dup() for each in sockets]
        for server in self.servers:
            server.close()
        for copy in copies:
            stop_connections(copy)
        await asyncio.sleep(LAST_HANDSHAKES)
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        factory = functools.partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        self._late = []
        for copy in copies:
            copy.setblocking(False)
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = copy.accept()
                    connection.setblocking(False)
                    self._late.append(loop.create_task(loop.connect_accepted_socket(factory, connection)))
            with contextlib.suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)  # for workers too, which inherited the socket
            copy.close()
        for each in sockets:
            each.close()

    async def _wait_for_connections(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if not self.server_state.connections and not self.server_state.tasks and all(t.done() for t in self._late):
                return
            await asyncio.sleep(0.01)


async def _run_in_thread(function: Callable[[], Loaded]) -> Loaded:
    """The result of a function that runs in a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Loaded] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as found:
            error = found
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(settle, value, error)

    thread = threading.Thread(target=run, name="bertblocks-load", daemon=True)
    thread.start()
    value = await result
    thread.join()
    return value
