"""Load over HTTP/1.1 with known arrival times, by a client that is small enough to share the server's cores.

Arrivals are planned ahead and do not wait for answers (an open loop), and latency counts from the planned time. A
server that stalls therefore delays every request that was due meanwhile, and none goes uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

HOST = "127.0.0.1"
#: Seconds to wait for outstanding answers at the end of a run.
DRAIN = 30.0
#: Seconds after which an idle connection is not used again: the server may be closing it, by default after 5.
IDLE = 3.0
#: Seconds until a closed loop asks again after a connection was lost.
RETRY = 0.05
#: The status of a request without an answer: refused, reset or late.
NO_ANSWER = 0

Done = Callable[[int, bytes], None]


def build_request(path: str, body: bytes, accept: str = "application/json") -> bytes:
    """A whole POST request with a JSON body.

    Example:
        >>> build_request("/embed", b"{}").splitlines()[0]
        b'POST /embed HTTP/1.1'
    """
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {HOST}",
        "Content-Type: application/json",
        f"Accept: {accept}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def percentile(numbers: Sequence[float], share: float) -> float:
    """The smallest number that at least `share` of them do not exceed (nearest rank); infinity if there are none.

    Example:
        >>> percentile(range(1, 201), 0.99), percentile([3.0], 0.5)
        (198, 3.0)
    """
    if not numbers:
        return math.inf
    return sorted(numbers)[max(math.ceil(share * len(numbers)), 1) - 1]


def plan_arrivals(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Times of a Poisson process with `rate` arrivals a second. Of one seed, a higher rate is the same plan, faster."""
    rng = random.Random(seed)
    gaps = (rng.expovariate(1.0) / rate for _ in itertools.count())
    return list(itertools.takewhile(lambda arrival: arrival < seconds, itertools.accumulate(gaps)))


def highest_rate(passes: Callable[[float], bool], first: float, steps: int) -> float:
    """The highest of `steps` rates that passes: half as much again until one fails, then bisection; 0 if none passes.

    Example:
        >>> highest_rate(lambda rate: rate <= 100, first=60, steps=3), highest_rate(lambda rate: False, 60, steps=3)
        (90.0, 0.0)
    """
    low, high, rate = 0.0, math.inf, first
    for _ in range(steps):
        if passes(rate):
            low = rate
        else:
            high = rate
        rate = low * 1.5 if high == math.inf else high / 1.5 if low == 0 else math.sqrt(low * high)
    return low


# ---------------------------------------------------------------------- client


def parse_head(head: bytes) -> tuple[int, int, bool]:
    """The status, the length of the body, and whether the server closes the connection.

    Example:
        >>> parse_head(b"HTTP/1.1 429 Too Many Requests\\r\\nContent-Length: 12\\r\\nConnection: close")
        (429, 12, True)
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" not in headers:
        raise ValueError(f"{first}: the answer has no Content-Length.")
    return int(first.split()[1]), int(headers["content-length"]), headers.get("connection", "").lower() == "close"


class Connection(asyncio.Protocol):
    """One request at a time; calls `done` with the status and the body, or with `NO_ANSWER`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.buffer = bytearray()
        self.head: tuple[int, int, bool] | None = None
        self.start = 0
        self.done: Done | None = None
        self.is_open = False
        #: What the server answered before there was a request.
        self.early = NO_ANSWER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.is_open = cast(asyncio.Transport, transport), True
        self.used = time.perf_counter()

    def send(self, request: bytes, done: Done) -> None:
        if self.is_open:
            self.done = done
            self.transport.write(request)
        else:
            done(self.early, b"")

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.head is None:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self.head, self.start = parse_head(bytes(self.buffer[:end])), end + 4
        status, length, closes = self.head
        if len(self.buffer) < self.start + length:
            return
        body = bytes(self.buffer[self.start : self.start + length])
        self.buffer.clear()
        self.head = None
        if closes:
            self.transport.close()
            self.is_open = False
        self._finish(status, body)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self.client.opened -= 1
        self._finish(NO_ANSWER, b"")

    def _finish(self, status: int, body: bytes) -> None:
        done, self.done = self.done, None
        if done is None:
            self.early = self.early or status
            return
        if self.is_open:
            self.used = time.perf_counter()
            self.client.idle.append(self)
        done(status, body)


class Client:
    """Keep-alive connections to a server on this machine, at most `most`."""

    def __init__(self, port: int, most: int = 10_000) -> None:
        self.port, self.most = port, most
        self.idle: list[Connection] = []
        self.opened = 0
        self.opening: set[asyncio.Task[None]] = set()
        self.all: list[Connection] = []

    async def connect(self, count: int) -> None:
        """Opens connections before they are needed."""
        self.idle += await asyncio.gather(*(self._open() for _ in range(count)))

    async def _open(self) -> Connection:
        self.opened += 1
        try:
            made = await asyncio.get_running_loop().create_connection(lambda: Connection(self), HOST, self.port)
        except OSError:
            self.opened -= 1
            raise
        self.all.append(made[1])
        return made[1]

    def send(self, request: bytes, done: Done) -> None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open and time.perf_counter() - connection.used < IDLE:
                connection.send(request, done)
                return
            connection.transport.abort()
        if self.opened >= self.most:
            done(NO_ANSWER, b"")
            return
        task = asyncio.get_running_loop().create_task(self._open_and_send(request, done))
        self.opening.add(task)
        task.add_done_callback(self.opening.discard)

    async def _open_and_send(self, request: bytes, done: Done) -> None:
        try:
            connection = await self._open()
        except OSError:
            done(NO_ANSWER, b"")
        else:
            connection.send(request, done)

    def close(self) -> None:
        """Closes all connections. Requests without an answer stay without one."""
        for task in self.opening:
            task.cancel()
        for connection in self.all:
            connection.done = None
            connection.transport.abort()


# ---------------------------------------------------------------------- loops


@dataclass
class Run:
    """What a run of requests saw. Latencies are those of answers with status 200, in seconds."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    #: How much later than planned the client sent each request.
    lags: list[float] = field(default_factory=list)
    seconds: float = 0.0
    #: CPU time of the client's process.
    cpu_seconds: float = 0.0

    @property
    def outstanding(self) -> int:
        return self.sent - self.statuses.total()

    @property
    def failed(self) -> int:
        return self.sent - self.statuses[200]

    @property
    def rate(self) -> float:
        return self.statuses[200] / self.seconds

    def latency(self, share: float) -> float:
        return percentile(self.latencies, share)

    def add(self, planned: float) -> Done:
        """Counts a request that is sent now, and returns what counts its answer."""
        now = time.perf_counter()
        self.sent += 1
        self.lags.append(now - planned)

        def done(status: int, body: bytes) -> None:
            self.statuses[status] += 1
            if status == 200:
                self.latencies.append(time.perf_counter() - planned)

        return done


@contextlib.contextmanager
def timed(run: Run) -> Iterator[None]:
    """Measures a run's wall and CPU time, with garbage collection off: its pauses would look like the server's."""
    gc.collect()
    gc.freeze()
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        run.seconds, run.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        gc.enable()
        gc.unfreeze()


async def drain(client: Client, run: Run) -> None:
    """Waits for outstanding answers; those that do not come count as `NO_ANSWER`."""
    end = time.perf_counter() + DRAIN
    while run.outstanding and time.perf_counter() < end:
        await asyncio.sleep(0.01)
    run.statuses[NO_ANSWER] += run.outstanding
    client.close()
    await asyncio.sleep(0)


async def open_loop(
    port: int, arrivals: Sequence[float], requests: Sequence[bytes], bound: float = math.inf, connections: int = 32
) -> Run:
    """Sends each request at its planned time, and stops early once the 99th percentile must exceed `bound`."""
    client, run = Client(port), Run()
    await client.connect(connections)
    allowed, late = len(arrivals) / 100, itertools.count()
    is_over = False

    def watch(counted: Done, planned: float) -> Done:
        def done(status: int, body: bytes) -> None:
            nonlocal is_over
            counted(status, body)
            if (status != 200 or time.perf_counter() - planned > bound) and next(late) >= allowed:
                is_over = True

        return done

    with timed(run):
        start = time.perf_counter() + 0.01
        for arrival, request in zip(arrivals, itertools.cycle(requests)):
            planned = start + arrival
            await asyncio.sleep(max(planned - time.perf_counter(), 0))
            if is_over and bound < math.inf:
                break
            client.send(request, watch(run.add(planned), planned))
        await drain(client, run)
    return run


async def closed_loop(
    port: int, requests: Sequence[bytes], goes_on: Callable[[Run], bool], connections: int = 16
) -> Run:
    """Keeps every connection busy: each sends its next request when it has its answer."""
    client, run = Client(port), Run()
    await client.connect(connections)
    endless = itertools.cycle(requests)

    def send_next() -> None:
        if goes_on(run):
            counted = run.add(time.perf_counter())

            def done(status: int, body: bytes) -> None:
                counted(status, body)
                if status == NO_ANSWER:  # the connection has to be opened again
                    asyncio.get_running_loop().call_later(RETRY, send_next)
                else:
                    send_next()

            client.send(next(endless), done)

    with timed(run):
        for _ in range(connections):
            send_next()
        while goes_on(run):
            await asyncio.sleep(0.05)
        await drain(client, run)
    return run


def for_seconds(seconds: float) -> Callable[[Run], bool]:
    end = time.perf_counter() + seconds
    return lambda run: time.perf_counter() < end


# ---------------------------------------------------------------------- one by one


class PlainConnection:
    """A blocking connection, which adds the least to the latency of a single request."""

    def __init__(self, port: int, timeout: float = 60.0) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> PlainConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def ask(self, request: bytes) -> tuple[int, bytes]:
        self.socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        status, length, _ = parse_head(data[:end])
        while len(data) < end + 4 + length:
            data += self._receive()
        return status, data[end + 4 :]

    def _receive(self) -> bytes:
        if not (data := self.socket.recv(1 << 20)):
            raise ConnectionResetError("The server closed the connection.")
        return data
