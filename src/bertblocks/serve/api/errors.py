"""Errors in the form that clients of each dialect expect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bertblocks.core.log import logger
from bertblocks.core.messages import short_repr, shorten
from bertblocks.core.registry import nearest
from bertblocks.serve.error_bodies import Dialect, error_body
from bertblocks.serve.errors import (
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    ServeError,
    ShuttingDown,
    TaskNotServed,
    TooLarge,
    WorkerLost,
)

#: What each status means, for the OpenAPI document.
MEANINGS = {
    400: "The body is not valid JSON.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The request took too long to arrive.",
    413: "The body is too large, or has too many inputs.",
    415: "The body's content type is not application/json.",
    422: "The request does not fit the schema or the model.",
    429: "The server is overloaded; the header Retry-After says when to try again.",
    500: "The server failed; its log has the details.",
    503: "The server is starting, stopping, or has lost a worker.",
    504: "The request's deadline passed.",
}
_STATUSES: dict[type[ServeError], tuple[int, str | None]] = {
    ModelNotFound: (404, "model_not_found"),
    TaskNotServed: (422, "task_not_served"),
    TooLarge: (413, "too_large"),
    Overloaded: (429, "overloaded"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    WorkerLost: (503, "worker_lost"),
    ShuttingDown: (503, "shutting_down"),
}


class BadRequest(Exception):
    """A request that is wrong whatever the models are."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class OpenAIErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    error: OpenAIErrorDetails


class TEIError(BaseModel):
    error: str
    error_type: str


class CohereError(BaseModel):
    message: str


ERROR_SCHEMAS: dict[Dialect, type[BaseModel]] = {"openai": OpenAIError, "tei": TEIError, "cohere": CohereError}


def answer_exception(path: str, error: Exception) -> tuple[int, dict[str, Any], list[tuple[bytes, bytes]]]:
    """The status, body and headers that answer an exception. The log has the details of what nobody expected."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if isinstance(error, BadRequest):
        return error.status, error_body(path, error.status, str(error), error.param), headers
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            param = "model" if status in (404, 422) else None
            return status, error_body(path, status, str(error), param, code), headers
    if isinstance(error, (ValueError, TypeError)):
        return 422, error_body(path, 422, shorten(str(error))), headers
    logger.error("A request to %s failed.", path, exc_info=error)
    return 500, error_body(path, 500, "The server failed; its log has the details."), headers


def describe_invalid(error: ValidationError, keys: Iterable[str]) -> BadRequest:
    """Says in one sentence what is wrong with a body, and what would be right."""
    found = error.errors(include_url=False)
    # a key that is missing may be there, but misspelt
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    key = ".".join(map(str, first["loc"]))
    return BadRequest(422, shorten(_describe(first, key, list(keys))), key or None)


def _describe(error: ErrorDetails, key: str, keys: list[str]) -> str:
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        hint = nearest(name, keys)
        return f"{short_repr(key)} is not a key of this request{hint or '; its keys are ' + ', '.join(keys)}."
    if error["type"] == "missing":
        return f"{key} is missing."
    reason = error["ctx"]["error"] if error["type"] == "value_error" else _lower_first(error["msg"])
    return f"{key or 'The body'} is {short_repr(error['input'])}; {reason}."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
