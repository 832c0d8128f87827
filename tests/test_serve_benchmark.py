"""The logic of the load tests: plans, percentiles, the search for a rate, the client, and the tables."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import load, serve, serve_peers
from benchmarks.load import NO_ANSWER, Run, build_request, closed_loop, highest_rate, open_loop, percentile
from benchmarks.serve_report import SHEETS, goals_sheet, measure_sheet

REQUEST = build_request("/v1/embeddings", b'{"input": "a"}')


def answer(status: int, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


Reply = Callable[[int], Awaitable[bytes | None]]


def with_server(reply: Reply, work: Callable[[int], Any]) -> tuple[Any, list[int]]:
    """Runs `work` on a server that gives each request its number; also returns the requests of each connection."""
    numbers = itertools.count()
    seen: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = len(seen)
        seen.append(0)
        while True:
            try:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(14)
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            seen[index] += 1
            if (data := await reply(next(numbers))) is None:
                break
            writer.write(data)
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(handle, load.HOST, 0)
        async with server:
            return await work(server.sockets[0].getsockname()[1])

    return asyncio.run(run()), seen


async def accept(number: int) -> bytes:
    return answer(200)


# ---------------------------------------------------------------------- plans and numbers


def test_percentiles_equal_numpys_nearest_rank() -> None:
    numbers = np.random.default_rng(0).lognormal(size=777)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert percentile(numbers.tolist(), share) == np.quantile(numbers, share, method="inverted_cdf")
    assert percentile([], 0.99) == float("inf")


def test_arrivals_are_a_poisson_process_and_scale_with_the_rate() -> None:
    arrivals = load.plan_arrivals(100.0, 200.0, seed=3)
    gaps = np.diff(arrivals)
    assert abs(len(arrivals) - 20_000) < 5 * 20_000**0.5
    assert gaps.mean() == pytest.approx(gaps.std(), rel=0.05)  # as for no other spacing: even gaps have no deviation
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert arrivals[-1] < 200.0
    faster = load.plan_arrivals(200.0, 100.0, seed=3)
    assert np.allclose(np.array(faster) * 2, arrivals)
    assert load.plan_arrivals(100.0, 200.0, seed=4) != arrivals


@pytest.mark.parametrize("limit", [30.0, 49.0, 101.0, 380.0])
def test_the_search_ends_close_below_the_limit(limit: float) -> None:
    tried: list[float] = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    best = highest_rate(passes, first=80.0, steps=12)
    assert len(tried) == 12
    assert limit / 1.02 <= best <= limit


# ---------------------------------------------------------------------- the client


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The server answers nothing until it has all requests, which a closed loop would never send."""
    everyone = asyncio.Event()

    async def reply(number: int) -> bytes:
        if number == 49:
            everyone.set()
        await everyone.wait()
        return answer(200)

    arrivals = [index / 1000 for index in range(50)]
    run, connections = with_server(reply, lambda port: open_loop(port, arrivals, [REQUEST], connections=4))
    assert (run.sent, run.statuses[200], run.failed) == (50, 50, 0)
    assert max(connections) == 1
    assert max(run.latencies) >= 0.049  # the first was due that long before the last


def test_every_kind_of_answer_is_counted_once() -> None:
    kinds = [answer(200), answer(429), answer(503, b"", "Connection: close"), None, answer(200, b"x" * 300_000)]

    async def reply(number: int) -> bytes | None:
        return kinds[number % len(kinds)]

    arrivals = [index / 500 for index in range(50)]
    run, connections = with_server(reply, lambda port: open_loop(port, arrivals, [REQUEST], connections=1))
    assert run.statuses == {200: 20, 429: 10, 503: 10, NO_ANSWER: 10}
    assert (len(run.latencies), run.failed, run.outstanding) == (20, 30, 0)
    assert len(connections) >= 20  # each lost connection is replaced


def test_answers_that_come_without_a_request_refuse_the_next_one() -> None:
    async def work() -> Run:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer(503, b"{}", "Connection: close"))
            writer.close()

        async with await asyncio.start_server(handle, load.HOST, 0) as server:
            return await open_loop(server.sockets[0].getsockname()[1], [0.05, 0.06], [REQUEST], connections=0)

    run = asyncio.run(work())
    assert run.sent == run.statuses[503] + run.statuses[NO_ANSWER] == 2


def test_a_run_stops_once_its_bound_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reply(number: int) -> bytes:
        return answer(500)

    arrivals = [index / 1000 for index in range(400)]
    run, _ = with_server(reply, lambda port: open_loop(port, arrivals, [REQUEST], bound=1.0))
    assert 4 < run.sent < 400
    monkeypatch.setattr(load, "DRAIN", 0.05)

    async def silent(number: int) -> bytes:
        await asyncio.sleep(3600)
        return b""

    run, _ = with_server(silent, lambda port: open_loop(port, [0.0, 0.01], [REQUEST]))
    assert run.statuses == {NO_ANSWER: 2}


def test_a_closed_loop_keeps_its_connections_busy() -> None:
    run, connections = with_server(
        accept, lambda port: closed_loop(port, [REQUEST], lambda run: run.sent < 200, connections=3)
    )
    assert (run.sent, run.statuses[200]) == (200, 200)
    assert len(connections) == 3
    assert min(connections) > 0
    assert run.rate > 0


def test_a_plain_connection_reads_answers_in_pieces() -> None:
    body = os.urandom(3_000_000)
    ready, port = threading.Event(), 0
    found: list[tuple[int, bytes]] = []

    def ask() -> None:
        ready.wait()
        with load.PlainConnection(port) as connection:
            found.extend(connection.ask(REQUEST) for _ in range(2))

    async def reply(number: int) -> bytes:
        return answer(200, body) if number == 0 else answer(404)

    async def work(chosen: int) -> None:
        nonlocal port
        port = chosen
        ready.set()
        await asyncio.to_thread(thread.join)

    thread = threading.Thread(target=ask)
    thread.start()
    with_server(reply, work)
    assert found == [(200, body), (404, b"{}")]


# ---------------------------------------------------------------------- servers and tables


def test_memory_counts_the_processes_of_a_server() -> None:
    own = serve_peers.memory_of(os.getpid())
    program = "import os, sys; os.fork() or sys.stdin.read(); print(flush=True); sys.stdin.read()"
    data = "x = bytearray(b'1' * 50_000_000);"
    child = subprocess.Popen([sys.executable, "-c", data + program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()  # the forked process has started
    both = serve_peers.memory_of(child.pid)
    with_child = serve_peers.memory_of(os.getpid())
    child.communicate()
    assert both > 100_000_000  # two processes that share the array
    assert with_child > own + 90_000_000


def test_commands_are_shown_without_folders(tmp_path: Any) -> None:
    options = serve.parse(["--quick", "--only", "lanes", "--output", str(tmp_path), "--options", "--queue-tokens 9"])
    assert (options.seconds, options.requests) == (2, 2_000)
    expected = "--quick --only lanes --seconds 2 --bound 250 --threads 2 --options '--queue-tokens 9'"
    assert serve.shown_command(options) == f"python -m benchmarks.serve {expected}"


def test_goals_compare_with_the_best_peer_at_the_same_bound() -> None:
    about = {"command": "c", "machine": {"processor": "p", "threads": 2}}

    def rates(best: float, bound: float = 250.0) -> dict[str, Any]:
        at_best = {"p50": 1.0, "p99": 2.0, "client_share": 0.02, "client_lag_p99": 1.0}
        return {"best": best, "bound": bound, "capacity": 1.0, "at_best": at_best if best else None, **about}

    peers = {"infinity": rates(30.0), "fastapi": rates(40.0), "fastapi-2": rates(1000.0, bound=500.0)}
    results: dict[str, Any] = {
        "throughput": {**peers, "ours": rates(100.0), "ours-int8": rates(120.0)},
        "lanes": {"ours": {"ratio": 1.4}},
        "overhead": {"ours": {"overhead": 0.7}},
        "overload": {"ours": {"refused": 9, "server_errors": 1, "unanswered": 0}},
        "memory": {"ours": {"requests": 20, "readings": [{"requests": 10, "bytes": 100}, {"bytes": 101}]}},
    }
    lines = {
        line[0].split(", ", 1)[1].split(",")[0].split(" after")[0]: line for line in goals_sheet(results).lines[:5]
    }
    assert {name: line[2:] for name, line in lines.items()} == {
        "requests/s over the best peer": ["2.50", "yes"],
        "p99 of short queries": ["1.40", "yes"],
        "HTTP and scheduling": ["0.70 ms", "no"],
        "overload": ["9 x 429, 1 x 5xx, 0 unanswered", "no"],
        "memory": ["1.010", "yes"],
    }
    assert goals_sheet(results).lines[5][2:] == ["3.00", "no"]
    sheet = measure_sheet("throughput", results["throughput"])
    assert [line[0] for line in sheet.lines] == [server.title for server in serve_peers.SERVERS.values()]
    assert {len(line) for line in sheet.lines} == {len(sheet.columns)} == {len(SHEETS["throughput"][1]) + 1}
