from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bertblocks.serve.metrics import RATIO, WINDOW, Metrics
from bertblocks.serve.requests import RequestRecord


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def outcome(tokens: int, total: float) -> SimpleNamespace:
    timing = SimpleNamespace(tokenize=0.1 * total, queue=0.2 * total, inference=0.7 * total, total=total)
    return SimpleNamespace(results=[], tokens=tokens, timing=timing)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """A number of the text that Prometheus gets."""
    families = text_string_to_metric_families(metrics.to_prometheus().decode())
    found = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    return found[0] if found else None


def test_prometheus_gets_what_the_scheduler_tells() -> None:
    metrics = Metrics()
    metrics.queued(500)
    metrics.queued(300)
    metrics.batch("minilm", "encode", "short", 200, 8, 0.03)
    metrics.batch("minilm", "encode", "short", 100, 2, 0.01)
    metrics.finished("minilm", "encode", outcome(40, 0.5))
    metrics.rejected("Overloaded")
    metrics.cancelled(70)
    assert value(metrics, "bertblocks_queue_tokens") == 300
    batch = {"model": "minilm", "method": "encode", "lane": "short"}
    assert value(metrics, "bertblocks_batch_tokens_sum", **batch) == 300
    assert value(metrics, "bertblocks_batch_tokens_bucket", **batch, le="256.0") == 2
    assert value(metrics, "bertblocks_batch_tokens_bucket", **batch, le="64.0") == 0
    assert value(metrics, "bertblocks_batch_seconds_sum", **batch) == pytest.approx(0.04)
    assert value(metrics, "bertblocks_batch_segments_total", **batch) == 10
    request = {"model": "minilm", "method": "encode"}
    for stage, seconds in {"tokenize": 0.05, "queue": 0.1, "inference": 0.35, "total": 0.5}.items():
        assert value(metrics, "bertblocks_stage_seconds_sum", **request, stage=stage) == pytest.approx(seconds)
    assert value(metrics, "bertblocks_tokens_total", **request) == 40
    assert value(metrics, "bertblocks_rejected_total", reason="Overloaded") == 1
    assert value(metrics, "bertblocks_cancelled_total") == 1
    assert value(metrics, "bertblocks_cancelled_tokens_total") == 70


def test_prometheus_counts_requests_by_route_and_status() -> None:
    metrics = Metrics()
    for status in (200, 200, 429):
        metrics.record(RequestRecord("id", "POST", "/embed", status, 0.0, 0.25, None, {}, "", None))
    assert value(metrics, "bertblocks_requests_total", route="/embed", status="200") == 2
    assert value(metrics, "bertblocks_requests_total", route="/embed", status="429") == 1
    assert value(metrics, "bertblocks_request_seconds_sum", route="/embed") == 0.75


def test_prometheus_gets_the_memory_of_the_process() -> None:
    assert (value(Metrics(), "process_resident_memory_bytes") or 0) > 2**20


def test_requests_in_progress_are_counted_while_they_last() -> None:
    metrics = Metrics()
    with metrics.in_progress():
        assert value(metrics, "bertblocks_requests_in_progress") == 1
    assert value(metrics, "bertblocks_requests_in_progress") == 0


def test_two_servers_in_a_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.rejected("Overloaded")
    assert value(second, "bertblocks_rejected_total", reason="Overloaded") is None


def test_stats_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    latencies = np.random.default_rng(0).lognormal(-4, 1, 2000)
    metrics.finished("m", "encode", outcome(10**9, 1000.0))
    clock.now += WINDOW + 10
    for number, seconds in enumerate(latencies):
        clock.now += 0.01 if number else 0
        metrics.finished("m", "encode", outcome(5, seconds))
    metrics.batch("m", "encode", "long", 100, 1, 0.1)
    metrics.batch("m", "encode", "long", 300, 1, 0.1)
    metrics.queued(17)
    stats = metrics.to_stats()
    assert stats["requests_per_second"] == pytest.approx(2000 / WINDOW, abs=0.01)
    assert stats["tokens_per_second"] == pytest.approx(10000 / WINDOW, abs=0.1)
    assert stats["batch_tokens"] == 200
    assert stats["queue_tokens"] == 17
    for name, share in (("p50_ms", 50), ("p99_ms", 99)):
        exact = 1000 * np.percentile(latencies, share, method="inverted_cdf")
        assert stats[name] == pytest.approx(exact, rel=RATIO - 1)
    clock.now += WINDOW + 1
    assert set(metrics.to_stats().values()) == {0.0, 17}


def test_rates_of_a_new_server_are_those_of_its_own_time() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    clock.now += 4
    for _ in range(8):
        metrics.finished("m", "encode", outcome(1, 0.01))
    assert metrics.to_stats()["requests_per_second"] == 2


def test_memory_does_not_grow_with_requests() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    for number in range(200):
        clock.now += 1
        for size in range(20):
            metrics.finished("m", "encode", outcome(1, 0.001 * (1 + size) * (1 + number)))
    recent = metrics._recent
    assert len(recent._seconds) == WINDOW
    assert sum(len(second.latencies) for second in recent._seconds) <= 20 * WINDOW
