"""Metrics for Prometheus, and a few numbers of the last seconds for the page."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from bertblocks.serve.observer import Observer
from bertblocks.serve.requests import RequestRecord

if TYPE_CHECKING:
    from bertblocks.serve.scheduler import Outcome

#: Upper ends of the histograms of seconds and of tokens.
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
#: Seconds that /stats looks back.
WINDOW = 30
#: Latencies of /stats are known to within half of this ratio.
RATIO = 1.05


class Metrics(Observer):
    """Observes the scheduler and the requests of one server. Its methods may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"bertblocks_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"bertblocks_{name}", text, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"bertblocks_{name}", text, labels, buckets=buckets, registry=self.registry)

        self._requests = counter("requests", "HTTP requests that were answered", "route", "status")
        self._request_seconds = histogram("request_seconds", "From request to answer", SECONDS, "route")
        self._stages = histogram("stage_seconds", "Model requests by stage", SECONDS, "stage", "model", "method")
        self._tokens = counter("tokens", "Tokens that models read", "model", "method")
        self._batch_tokens = histogram("batch_tokens", "Tokens of a batch", TOKENS, "model", "method", "lane")
        self._batch_seconds = histogram("batch_seconds", "Time of a batch", SECONDS, "model", "method", "lane")
        self._batch_segments = counter("batch_segments", "Sequences in all batches", "model", "method", "lane")
        self._rejected = counter("rejected", "Model requests that were not accepted or were given up", "reason")
        self._cancelled = counter("cancelled", "Model requests whose client left")
        self._cancelled_tokens = counter("cancelled_tokens", "Tokens that did not run because their client left")
        self._queue_tokens = gauge("queue_tokens", "Tokens that wait or run")
        self._in_progress = gauge("requests_in_progress", "HTTP requests that wait or run, without probes")
        self._ready = gauge("ready", "1 if the models are loaded and the server is not draining")
        self._waiting = 0
        self._recent = Recent(clock)

    # ------------------------------------------------------------------ the scheduler's observer

    def queued(self, tokens: int) -> None:
        self._waiting = tokens
        self._queue_tokens.set(tokens)

    def batch(self, model: str, method: str, lane: str, tokens: int, segments: int, seconds: float) -> None:
        self._batch_tokens.labels(model, method, lane).observe(tokens)
        self._batch_seconds.labels(model, method, lane).observe(seconds)
        self._batch_segments.labels(model, method, lane).inc(segments)
        self._recent.add_batch(tokens)

    def finished(self, model: str, method: str, outcome: Outcome) -> None:
        timing = outcome.timing
        for stage in ("tokenize", "queue", "inference", "total"):
            self._stages.labels(stage, model, method).observe(getattr(timing, stage))
        self._tokens.labels(model, method).inc(outcome.tokens)
        self._recent.add_request(outcome.tokens, timing.total)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def cancelled(self, tokens: int) -> None:
        self._cancelled.inc()
        self._cancelled_tokens.inc(tokens)

    # ------------------------------------------------------------------ requests and what is shown

    def record(self, record: RequestRecord) -> None:
        self._requests.labels(record.route, str(record.status)).inc()
        self._request_seconds.labels(record.route).observe(record.seconds)

    def in_progress(self) -> AbstractContextManager[None]:
        return self._in_progress.track_inprogress()

    def set_ready(self, is_ready: bool) -> None:
        self._ready.set(is_ready)

    def to_prometheus(self) -> bytes:
        return generate_latest(self.registry)

    def to_stats(self) -> dict[str, float]:
        """The numbers of the last `WINDOW` seconds."""
        return {**self._recent.summarize(), "queue_tokens": self._waiting}


@dataclass
class _Second:
    """What happened within a second."""

    number: int
    requests: int = 0
    tokens: int = 0
    batches: int = 0
    batch_tokens: int = 0
    #: Requests by the logarithm of their milliseconds.
    latencies: Counts[int] = field(default_factory=Counts)


class Recent:
    """Rates and latencies of the last seconds, in memory that does not grow with the load."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: deque[_Second] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()

    def add_request(self, tokens: int, seconds: float) -> None:
        with self._lock:
            now = self._current()
            now.requests += 1
            now.tokens += tokens
            now.latencies[round(math.log(max(seconds * 1000, 1e-3), RATIO))] += 1

    def add_batch(self, tokens: int) -> None:
        with self._lock:
            now = self._current()
            now.batches += 1
            now.batch_tokens += tokens

    def _current(self) -> _Second:
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]

    def summarize(self) -> dict[str, float]:
        with self._lock:
            now = self._clock()
            seconds = [second for second in self._seconds if second.number > int(now) - WINDOW]
            latencies: Counts[int] = sum((second.latencies for second in seconds), Counts())
        passed = min(max(now - self._began, 1.0), WINDOW)
        batches = sum(second.batches for second in seconds)
        return {
            "requests_per_second": round(sum(second.requests for second in seconds) / passed, 2),
            "tokens_per_second": round(sum(second.tokens for second in seconds) / passed, 1),
            "p50_ms": _percentile(latencies, 0.5),
            "p99_ms": _percentile(latencies, 0.99),
            "batch_tokens": round(sum(second.batch_tokens for second in seconds) / max(batches, 1), 1),
        }


def _percentile(latencies: Counts[int], share: float) -> float:
    """The latency in milliseconds that this share of requests did not exceed; 0 without requests."""
    rest = share * sum(latencies.values())
    for exponent in sorted(latencies):
        rest -= latencies[exponent]
        if rest <= 1e-9:
            return round(RATIO**exponent, 3)
    return 0.0
