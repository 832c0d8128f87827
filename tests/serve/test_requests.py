"""Records of requests, and what the log and the traces make of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from bertblocks.core.requirements import MissingPackageError
from bertblocks.serve.logs import make_access_log, set_up_logs
from bertblocks.serve.requests import RequestRecord, RequestRecorder
from bertblocks.serve.traces import Tracer, make_tracer
from tests.serve.asgi import call

TIMES = {"x-inference-time": "20.5", "x-queue-time": "3.25", "x-tokenization-time": "1", "x-compute-tokens": "12"}


async def embed(request: Request) -> Response:
    return Response(b"{}", headers=TIMES)


async def fail(request: Request) -> Response:
    logging.getLogger("bertblocks").warning("about to fail")
    raise RuntimeError("a secret detail")


APP = Starlette(routes=[Route("/v1/{task}", embed, methods=["POST"]), Route("/fail", fail, methods=["POST"])])


def record(path: str = "/v1/embed", **headers: str) -> tuple[RequestRecord, Any]:
    records: list[RequestRecord] = []
    answer = call(RequestRecorder(APP, [records.append]), path, **headers)
    return records[0], answer


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Returns what was logged since the last call; loggers are as they were afterwards."""
    loggers = [logging.getLogger(name) for name in ("bertblocks", "bertblocks.access", "uvicorn.error")]
    before = [(each, each.handlers, each.propagate, each.level) for each in loggers]
    yield lambda: capsys.readouterr().err
    for each, handlers, propagate, level in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def test_a_record_has_the_route_and_the_timings_of_the_answer() -> None:
    found, answer = record()
    assert (found.method, found.route, found.status, found.tokens) == ("POST", "/v1/{task}", 200, 12)
    assert list(found.stages.items()) == [("tokenize", 0.001), ("queue", 0.00325), ("inference", 0.0205)]
    assert answer.headers["x-request-id"] == found.id


def test_unknown_paths_share_one_route() -> None:
    """A scanner must not fill the metrics with its guesses."""
    assert record("/wp-admin.php")[0].route == record("/.env")[0].route == "unmatched"


def test_ids_of_clients_are_kept_if_they_are_harmless() -> None:
    assert record(x_request_id="job-7/part:3")[1].headers["x-request-id"] == "job-7/part:3"
    for bad in ("a b", "x" * 200, "a\tb", "\xe9", ""):
        assert len(record(x_request_id=bad)[0].id) == 32
    assert record()[0].id != record()[0].id


def test_exceptions_become_500_without_details(log: Callable[[], str]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a secret detail")

    records: list[RequestRecord] = []
    set_up_logs("text")
    answer = call(RequestRecorder(app, [records.append]))
    assert answer.status == records[0].status == 500
    assert b"secret" not in answer.body
    assert records[0].id in answer.body.decode()
    assert "a secret detail" in log()


def test_a_request_whose_client_left_is_recorded_as_499() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return

    records: list[RequestRecord] = []
    call(RequestRecorder(app, [records.append]))
    assert records[0].status == 499


# ---------------------------------------------------------------------- logs


def test_json_logs_have_a_line_per_request(log: Callable[[], str]) -> None:
    set_up_logs("json")
    app = RequestRecorder(APP, [make_access_log("json")])
    call(app, "/v1/embed", parts=[b"a private text"], x_request_id="job-7")
    text = log()
    line = json.loads(text)
    assert line["time"].endswith("Z")
    expected = {"request_id": "job-7", "method": "POST", "route": "/v1/{task}", "status": 200, "tokens": 12}
    assert expected.items() <= line.items()
    assert (line["tokenize_ms"], line["queue_ms"], line["inference_ms"]) == (1, 3.25, 20.5)
    assert "private" not in text


def test_json_logs_tie_a_traceback_to_its_request(log: Callable[[], str]) -> None:
    set_up_logs("json")
    call(RequestRecorder(APP, [make_access_log("json")]), "/fail", x_request_id="job-8")
    warning, error, access = map(json.loads, log().splitlines())
    assert warning["request_id"] == error["request_id"] == access["request_id"] == "job-8"
    assert warning["message"] == "about to fail"
    assert "RuntimeError: a secret detail" in error["traceback"]
    assert access["status"] == 500


def test_text_logs_are_lines_for_people(log: Callable[[], str]) -> None:
    set_up_logs("text")
    call(RequestRecorder(APP, [make_access_log("text")]), "/v1/embed", x_request_id="job-7")
    line = log().rstrip("\n")
    assert "POST /v1/{task} 200" in line
    assert line.endswith("12 tokens, tokenize 1.0 ms, queue 3.2 ms, inference 20.5 ms, id job-7")


def test_probes_are_not_logged(log: Callable[[], str]) -> None:
    set_up_logs("text")
    for route in ("/v1/models", "/ready"):
        make_access_log("text")(RequestRecord("id", "GET", route, 503, 0.0, 0.0, None, {}, "", None))
    (line,) = log().splitlines()
    assert "GET /v1/models 503" in line


# ---------------------------------------------------------------------- traces


def test_a_trace_has_spans_for_the_request_and_its_stages() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    stages = {"tokenize": 0.25, "queue": 0.5, "inference": 1.0}
    tracer.record(RequestRecord("job-7", "POST", "/embed", 200, 100.0, 2.0, 12, stages, "", parent))
    tracer.close()
    *inner, outer = exporter.get_finished_spans()
    assert outer.name == "POST /embed"
    assert outer.attributes
    assert outer.attributes["http.response.status_code"] == 200
    assert outer.attributes["bertblocks.tokens"] == 12
    assert (outer.start_time, outer.end_time) == (100_000_000_000, 102_000_000_000)
    assert outer.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert outer.parent
    assert outer.parent.span_id == 0xB7AD6B7169203331
    times = [(span.name, span.start_time - outer.start_time, span.end_time - span.start_time) for span in inner]
    assert times == [
        ("tokenize", 0, 250_000_000),
        ("queue", 250_000_000, 500_000_000),
        ("inference", 750_000_000, 1_000_000_000),
    ]
    assert all(span.parent and span.parent.span_id == outer.context.span_id for span in inner)


def test_failures_are_errors_in_traces_and_broken_parents_are_ignored() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter)
    tracer.record(RequestRecord("id", "POST", "/embed", 503, 100.0, 2.0, None, {}, "", "not a parent"))
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.parent is None


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert make_tracer(None) is None


def test_the_endpoint_gets_the_path_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    addresses = []

    class Exporter(trace_exporter.OTLPSpanExporter):
        def __init__(self, endpoint: str | None = None) -> None:
            super().__init__(endpoint)
            addresses.append(self._endpoint)

    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", Exporter)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    for endpoint in (None, "http://other:4318/"):
        tracer = make_tracer(endpoint)
        assert tracer
        tracer.close()
    assert addresses == ["http://collector:4318/v1/traces", "http://other:4318/v1/traces"]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(MissingPackageError, match=r"Sending traces needs opentelemetry-sdk .*bertblocks\[otel\]"):
        make_tracer("http://localhost:4318")
