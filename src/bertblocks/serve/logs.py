"""The log of a server: lines for people, or one JSON object per line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from bertblocks.core.console import printable, to_json_line
from bertblocks.core.log import logger as root
from bertblocks.serve.requests import REQUEST_ID, RequestRecord
from bertblocks.serve.settings import LogFormat

access = logging.getLogger("bertblocks.access")
#: Routes that probes and scrapers call every few seconds; they are not worth a line.
SILENT = frozenset({"/live", "/ready", "/health", "/metrics", "/stats"})


class TextFormatter(logging.Formatter):
    """A time, a level if it matters, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        request_id = REQUEST_ID.get()
        note = f" (request {request_id})" if request_id is not None and record.name != access.name else ""
        text = f"{_write_time(record.created)} {level}{record.getMessage()}{note}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return printable(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, message, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time": _write_time(record.created), "level": record.levelname.lower()}
        fields |= getattr(record, "fields", None) or {"message": record.getMessage(), "request_id": REQUEST_ID.get()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return to_json_line(fields)


def _write_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _StderrHandler(logging.Handler):
    """Follows `sys.stderr` when that is replaced, and forgives a reader that has left."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


def set_up_logs(log_format: LogFormat) -> None:
    """Sends notes of the library and of uvicorn, and the access log, to stderr in one format."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    server = logging.getLogger("uvicorn.error")
    for each in (root, server, access):
        each.handlers = [handler]
        each.propagate = False
    root.setLevel(logging.INFO)
    server.setLevel(logging.ERROR)  # its warnings are about clients that do not speak HTTP
    access.setLevel(logging.INFO)


def make_access_log(log_format: LogFormat) -> Callable[[RequestRecord], None]:
    """Returns the function that writes the line of a request; it never sees a text."""

    def write_json(record: RequestRecord) -> None:
        if record.route not in SILENT:
            access.info("", extra={"fields": to_fields(record)})

    def write_text(record: RequestRecord) -> None:
        if record.route not in SILENT:
            access.info(to_text(record))

    return write_json if log_format == "json" else write_text


def to_fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of a request in the JSON log; times are milliseconds."""
    fields: dict[str, Any] = {
        "request_id": record.id,
        "client": record.client,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "tokens": record.tokens,
        "total_ms": round(record.seconds * 1000, 3),
    }
    fields |= {f"{stage}_ms": round(seconds * 1000, 3) for stage, seconds in record.stages.items()}
    return fields


def to_text(record: RequestRecord) -> str:
    parts = [f"{record.method} {record.route} {record.status} {record.seconds * 1000:.1f} ms"]
    if record.tokens is not None:
        parts.append(f"{record.tokens} tokens")
    parts += [f"{stage} {seconds * 1000:.1f} ms" for stage, seconds in record.stages.items()]
    return ", ".join([*parts, f"id {record.id}"])
