"""The bodies of errors, in the form that clients of each dialect expect."""

from __future__ import annotations

from typing import Any, Literal

Dialect = Literal["openai", "tei", "cohere"]

#: By status: the type of an error in OpenAI's and in TEI's form.
_TYPES = {
    400: ("invalid_request_error", "Validation"),
    401: ("authentication_error", "Unauthorized"),
    404: ("not_found_error", "Validation"),
    405: ("invalid_request_error", "Validation"),
    408: ("invalid_request_error", "Timeout"),
    413: ("invalid_request_error", "Validation"),
    415: ("invalid_request_error", "Validation"),
    422: ("invalid_request_error", "Validation"),
    429: ("rate_limit_error", "Overloaded"),
    500: ("server_error", "Backend"),
    503: ("server_error", "Unhealthy"),
    504: ("server_error", "Backend"),
}
_COHERE_PATHS = ("/v1/rerank", "/v2/")
_OPENAI_PATHS = ("/v1/", "/embeddings", "/models", "/classify")


def dialect_of(path: str) -> Dialect:
    """The dialect that a path belongs to.

    Example:
        >>> dialect_of("/v1/embed"), dialect_of("/v2/rerank"), dialect_of("/rerank")
        ('openai', 'cohere', 'tei')
    """
    if path.startswith(_COHERE_PATHS):
        return "cohere"
    return "openai" if path.startswith(_OPENAI_PATHS) else "tei"


def error_body(
    path: str, status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in the form that clients of the path expect.

    Example:
        >>> error_body("/embed", 413, "Too large.")
        {'error': 'Too large.', 'error_type': 'Validation'}
        >>> error_body("/v2/rerank", 413, "Too large.")
        {'message': 'Too large.'}
    """
    dialect = dialect_of(path)
    if dialect == "cohere":
        return {"message": message}
    openai, tei = _TYPES[status]
    if dialect == "openai":
        return {"error": {"message": message, "type": openai, "param": param, "code": code}}
    return {"error": message, "error_type": tei}
