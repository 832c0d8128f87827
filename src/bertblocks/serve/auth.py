"""Bearer keys."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertblocks.serve.answers import answer_error
from bertblocks.serve.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: The variable that holds keys, separated by commas.
VARIABLE = "BERTBLOCKS_API_KEY"
#: Probes and their callers have no key.
PROBES = frozenset({"/live", "/ready", "/health"})
METRICS = frozenset({"/metrics", "/stats"})
#: What a browser opens by itself, without a header: the page, the description of the routes, and files of both.
PAGES = re.compile(r"/|/docs|/openapi\.json|/[a-z]+\.(css|js)")


class BearerKeys:
    """ASGI middleware: answers 401 unless a request has one of the keys."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self.app = app
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._open = PROBES if settings.protect_metrics else PROBES | METRICS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or self._is_open(scope) or self._has_key(scope):
            await self.app(scope, receive, send)
        else:
            message = "The request has no valid API key; send it as the header `Authorization: Bearer KEY`."
            await answer_error(scope, send, 401, message, {"www-authenticate": "Bearer"})

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in self._open or (scope["method"] in ("GET", "HEAD") and PAGES.fullmatch(path) is not None)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        # every key is compared, in constant time, so that the time tells neither which one nor how much of it is right
        return sum([hmac.compare_digest(digest, known) for known in self._keys]) > 0


def _digest(key: bytes) -> bytes:
    """Keys of one length, because comparing bytes of different lengths takes a different time."""
    return hashlib.sha256(key).digest()


def gather_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """The keys of `--api-key`, of the lines of a file, and of BERTBLOCKS_API_KEY."""
    keys = list(given)
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ValueError(f"{file} does not hold a key; write one key per line.")
        keys += in_file
    if VARIABLE in os.environ:
        keys += _without_empty(os.environ[VARIABLE].split(","))
    return tuple(dict.fromkeys(keys))


def _without_empty(keys: Iterable[str]) -> list[str]:
    found = [key.strip() for key in keys if key.strip()]
    if not found:
        raise ValueError(f"{VARIABLE} is empty; set it to a key, or unset it.")
    return found
