"""OpenTelemetry traces: a span for each request, and spans for its stages."""

from __future__ import annotations

import os
from typing import Any

from bertblocks.core.requirements import require_packages
from bertblocks.serve.requests import RequestRecord

#: OpenTelemetry's own variable.
VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class Tracer:
    """Sends the spans of requests that ended, in a thread of its own."""

    def __init__(self, exporter: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "bertblocks")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("bertblocks.serve")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord) -> None:
        """Makes the spans. The stages of a request follow each other, so their lengths give their times."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        parent = self._propagator.extract({"traceparent": record.trace_parent}) if record.trace_parent else None
        attributes: dict[str, Any] = {
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            "bertblocks.request_id": record.id,
        }
        if record.tokens is not None:
            attributes["bertblocks.tokens"] = record.tokens
        began = int(record.began * 1e9)
        span = self._tracer.start_span(
            f"{record.method} {record.route}", parent, SpanKind.SERVER, attributes, start_time=began
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        context, at = set_span_in_context(span), began
        for stage, seconds in record.stages.items():
            inner = self._tracer.start_span(stage, context, start_time=at)
            at += int(seconds * 1e9)
            inner.end(at)
        span.end(began + int(record.seconds * 1e9))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def make_tracer(endpoint: str | None) -> Tracer | None:
    """A tracer that sends to an OTLP endpoint, by default that of OTEL_EXPORTER_OTLP_ENDPOINT; None without one."""
    if endpoint is None and not os.environ.get(VARIABLE):
        return None
    require_packages(PACKAGES, "Sending traces")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # the exporter completes the variable's address, but not one that it is given
    return Tracer(OTLPSpanExporter() if endpoint is None else OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces"))
