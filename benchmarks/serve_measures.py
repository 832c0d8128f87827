"""What `benchmarks.serve` measures of a server that runs."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch
import uvloop
from rich.console import Console

from benchmarks.load import (
    NO_ANSWER,
    PlainConnection,
    Run,
    build_request,
    closed_loop,
    for_seconds,
    highest_rate,
    open_loop,
    percentile,
    plan_arrivals,
)
from benchmarks.serve_peers import NAME, Place, Server, memory_of
from benchmarks.serve_texts import Texts
from bertblocks.tasks.predictor import Predictor

#: Seconds of the closed loop that estimates the capacity.
PROBE = 3.0
#: Seeds of the plans of arrivals that a rate must pass.
PLANS = (0, 1)
#: Short queries a second for the lanes, and connections that send long documents meanwhile.
QUERY_RATE, LONG_CONNECTIONS = 20.0, 8
#: How many times the capacity the overload asks for, and for how many runs' seconds.
OVERLOAD, OVERLOAD_RUNS = 3.0, 2
#: Requests between two readings of the memory, and the most minutes of that measure.
MEMORY_EVERY, MEMORY_MINUTES = 10_000, 20.0
#: Texts in a request when formats are compared.
FORMAT_TEXTS = 32

Found = dict[str, Any]


def run_loop(work: Coroutine[Any, Any, Run]) -> Run:
    return uvloop.run(work)


@dataclass(frozen=True)
class Bench:
    """A running server and what it is asked."""

    server: Server
    place: Place
    pid: int
    texts: Texts
    options: argparse.Namespace
    console: Console

    @property
    def port(self) -> int:
        return self.place.port

    def requests(self, texts: list[str]) -> list[bytes]:
        return [self.server.request(text) for text in texts]

    def capacity(self) -> float:
        """Mixed requests a second when 16 connections are always busy."""
        return run_loop(closed_loop(self.port, self.requests(self.texts.mixed), for_seconds(PROBE))).rate

    def describe(self, run: Run) -> Found:
        """Milliseconds, requests a second, statuses, and the client's share of the CPUs."""
        return {
            "rate": run.rate,
            "p50": run.latency(0.5) * 1e3,
            "p99": run.latency(0.99) * 1e3,
            "sent": run.sent,
            "statuses": {str(status): count for status, count in sorted(run.statuses.items()) if count},
            "client_share": run.cpu_seconds / run.seconds / self.place.threads,
            "client_lag_p99": percentile(run.lags, 0.99) * 1e3,
        }


def throughput(bench: Bench) -> Found:
    """The highest rate of mixed requests whose p99 stays within the bound, with no error, on each plan of arrivals."""
    options, requests = bench.options, bench.requests(bench.texts.mixed)
    bound, tried = options.bound / 1e3, []

    def passes(rate: float) -> bool:
        return all(holds(rate, seed) for seed in PLANS)

    def holds(rate: float, seed: int) -> bool:
        arrivals = plan_arrivals(rate, options.seconds, seed)
        run = run_loop(open_loop(bench.port, arrivals, requests, bound))
        passed = run.statuses[200] == len(arrivals) and run.latency(0.99) <= bound
        tried.append({"planned": rate, "seed": seed, "passed": passed, **bench.describe(run)})
        shown = f"{rate:7.1f} requests/s: p99 {tried[-1]['p99']:.0f} ms, {'passed' if passed else 'failed'}"
        bench.console.print(f"[dim]{bench.server.title}: {shown}[/dim]")
        return passed

    capacity = bench.capacity()
    best = highest_rate(passes, 0.8 * capacity, options.steps)
    at_best = next((run for run in reversed(tried) if run["planned"] == best), None)
    return {"bound": options.bound, "capacity": capacity, "best": best, "at_best": at_best, "tried": tried}


def lanes(bench: Bench) -> Found:
    """Latency of short queries at a low rate, alone and while other connections keep the server busy with documents."""
    short, documents = bench.requests(bench.texts.queries), bench.requests(bench.texts.documents)
    arrivals = plan_arrivals(QUERY_RATE, bench.options.queries / QUERY_RATE)
    idle = run_loop(open_loop(bench.port, arrivals, short))
    is_over, busy = False, Run()

    async def both() -> Run:
        nonlocal is_over, busy
        load = asyncio.create_task(closed_loop(bench.port, documents, lambda run: not is_over, LONG_CONNECTIONS))
        await asyncio.sleep(2.0)
        run = await open_loop(bench.port, arrivals, short)
        is_over = True
        busy = await load
        return run

    loaded = run_loop(both())
    found = {"idle": bench.describe(idle), "loaded": bench.describe(loaded), "documents": bench.describe(busy)}
    return found | {"ratio": loaded.latency(0.99) / idle.latency(0.99)}


def overhead(bench: Bench) -> Found:
    """What HTTP and scheduling add to one short query: its time over a connection less that of the same in process."""
    text = bench.texts.queries[0]
    request = bench.server.request(text)
    times: dict[str, list[float]] = {"http": [], "in_process": []}
    with PlainConnection(bench.port) as connection:
        functions: dict[str, Callable[[], object]] = {"http": lambda: connection.ask(request)}
        if bench.server.is_ours:
            functions["in_process"] = in_process(bench, text)
        for _ in range(10):  # by turns, so that both see the same machine
            for name, function in functions.items():
                times[name] += time_each(function, max(bench.options.queries // 10, 1))
    medians = {name: statistics.median(times[name]) * 1e3 for name in functions}
    return medians | ({"overhead": medians["http"] - medians["in_process"]} if bench.server.is_ours else {})


def in_process(bench: Bench, text: str) -> Callable[[], object]:
    """Tokenizes, runs the model and pools in the calling thread, without the stream of `Predictor.encode`."""
    int8 = "--int8" in bench.server.command(bench.place)
    dtype = None if int8 else torch.float32
    predictor = Predictor(bench.place.model, dtype=dtype, threads=bench.place.threads, int8=int8)
    pipeline = predictor.pipeline("encode")

    def run() -> object:
        (request,) = pipeline.preprocess([text], 0)
        request.outputs = list(predictor.forward(pipeline, request.segments))
        return pipeline.postprocess(request)

    return run


def time_each(function: Callable[[], object], count: int) -> list[float]:
    """Seconds of every call, after three that warm up."""
    times = []
    for index in range(count + 3):
        start = time.perf_counter()
        function()
        if index >= 3:
            times.append(time.perf_counter() - start)
    return times


def overload(bench: Bench) -> Found:
    """Three times the capacity: how many requests are refused, and whether the server answers normally afterwards."""
    capacity, seconds = bench.capacity(), bench.options.seconds * OVERLOAD_RUNS
    arrivals = plan_arrivals(OVERLOAD * capacity, seconds)
    requests = bench.requests(bench.texts.mixed)
    run = run_loop(open_loop(bench.port, arrivals, requests))
    after = run_loop(closed_loop(bench.port, requests, lambda run: run.sent < 50, connections=1))
    found = {"capacity": capacity, "planned": len(arrivals), **bench.describe(run), "after": bench.describe(after)}
    refused, unanswered = run.statuses[429], run.statuses[NO_ANSWER]
    errors = sum(count for status, count in run.statuses.items() if status >= 500)
    return found | {"refused": refused, "unanswered": unanswered, "server_errors": errors}


def memory(bench: Bench) -> Found:
    """Resident memory of the server and its processes over many short requests."""
    requests, total = bench.requests(bench.texts.queries), bench.options.requests
    every = min(MEMORY_EVERY, max(total // 10, 1))
    readings, failed, sent, end = [], 0, 0, time.monotonic() + 60 * MEMORY_MINUTES
    rate = 0.0
    while sent < total and time.monotonic() < end:
        run = run_loop(closed_loop(bench.port, requests, lambda run: run.sent < every))
        sent, failed, rate = sent + run.sent, failed + run.failed, run.rate
        readings.append({"requests": sent, "bytes": memory_of(bench.pid)})
    return {"requests": sent, "failed": failed, "rate": rate, "readings": readings}


def formats(bench: Bench) -> Found:
    """Requests a second by the form of the vectors, for requests of 32 short texts."""
    texts, rates = bench.texts.queries[:FORMAT_TEXTS], {}
    openai: dict[str, Any] = {"model": NAME, "input": texts}
    own = json.dumps({"model": NAME, "inputs": texts}).encode()
    bodies = {
        name: build_request("/v1/embeddings", json.dumps(openai | {"encoding_format": name}).encode())
        for name in ("float", "base64")
    }
    bodies["raw"] = build_request("/v1/embed", own, accept="application/octet-stream")
    for name, request in bodies.items():
        run = run_loop(closed_loop(bench.port, [request], for_seconds(bench.options.seconds), connections=4))
        rates[name] = bench.describe(run)
    return {"formats": rates}


@dataclass(frozen=True)
class Measure:
    run: Callable[[Bench], Found]
    is_ours_only: bool = False


MEASURES = {
    "throughput": Measure(throughput),
    "lanes": Measure(lanes),
    "overhead": Measure(overhead),
    "overload": Measure(overload),
    "memory": Measure(memory, is_ours_only=True),
    "formats": Measure(formats, is_ours_only=True),
}
