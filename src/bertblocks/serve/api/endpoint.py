"""What every route does: read and check the body, run the model until the client leaves, and answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from bertblocks.core.messages import short_repr
from bertblocks.serve.api.errors import BadRequest, answer_exception, describe_invalid
from bertblocks.serve.api.schemas import Body
from bertblocks.serve.error_bodies import Dialect, dialect_of
from bertblocks.serve.models import ModelSet, ServedModel
from bertblocks.serve.scheduler import Outcome, Scheduler
from bertblocks.serve.settings import ServeSettings

Headers = list[tuple[bytes, bytes]]
#: The longest deadline that a client may set, in milliseconds.
MAX_TIMEOUT = 3_600_000
RAW = "application/octet-stream"


class ClientGone(Exception):
    """Nobody waits for the answer."""


@dataclass(frozen=True)
class Server:
    """What routes need: the models, what runs them, and the settings."""

    models: ModelSet
    scheduler: Scheduler
    settings: ServeSettings
    #: When the server started, in seconds since 1970.
    started: int

    @cached_property
    def tokenizer_thread(self) -> ThreadPoolExecutor:
        """Tokenizes for routes that do not run a model, one request at a time."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="bertblocks-tokenize")


@dataclass
class Call:
    """One request on its way through a route."""

    server: Server
    path: str
    #: Seconds.
    timeout: float | None
    #: Whether the client wants the bytes of an array in place of JSON.
    is_raw: bool
    characters: int = 0
    outcome: Outcome | None = None
    headers: Headers = field(default_factory=list)

    def find(self, name: str | None, task: str) -> ServedModel:
        return self.server.models.find(name, task)

    def find_any(self, name: str | None) -> ServedModel:
        """The model with a name, whatever it does, or the first one."""
        found = next((model for model in self.server.models if not name or model.name == name), None)
        return found or self.find(name, "")

    async def run(
        self,
        model: ServedModel,
        method: str,
        items: Sequence[Any],
        options: Mapping[str, Any],
        truncate: bool | None = None,
    ) -> list[Any]:
        """Runs a method of the model's predictor, and remembers what the headers of the answer say about it."""
        self.check_number(len(items))
        self.characters = count_characters(items)
        self.outcome = await self.server.scheduler.run(
            model, method, items, options, truncate=truncate, timeout=self.timeout
        )
        return self.outcome.results

    def check_number(self, inputs: int) -> None:
        most = self.server.settings.max_inputs
        if inputs > most:
            raise BadRequest(413, f"The request has {inputs} inputs; send at most {most} at a time.")

    async def in_thread(self, function: Callable[..., Any], *values: Any) -> Any:
        """Runs what takes a while and needs no model, so that other requests are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.server.tokenizer_thread, function, *values)

    @property
    def tokens(self) -> int:
        return self.outcome.tokens if self.outcome is not None else 0


@dataclass(frozen=True)
class Raw:
    """The bytes of an array, in place of JSON."""

    content: bytes
    headers: Headers


@dataclass(frozen=True)
class Endpoint:
    """A route that takes a JSON body."""

    path: str
    handler: Callable[[Call, Any], Awaitable[Any]]
    request: type[Body]
    #: The type of the answer, for the OpenAPI document.
    response: Any
    #: One sentence and one body, for the OpenAPI document.
    summary: str
    example: Mapping[str, Any]
    #: The task that the model must do; None if any model will do.
    task: str | None = None
    has_raw: bool = False

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.path)

    def parse(self, kind: bytes, body: bytes) -> Any:
        """Checks the content type, the JSON and the schema of a body."""
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            given = kind.decode("latin-1") or "missing"
            raise BadRequest(415, f"The content type is {short_repr(given)}; send JSON as application/json.")
        try:
            return self.request.model_validate(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            raise BadRequest(400, f"The body is not valid JSON: {error}.") from None
        except ValidationError as error:
            raise describe_invalid(error, self.request.model_fields) from None


class EndpointApp:
    """Answers the requests of an endpoint. It is an ASGI application of its own, without layers in between."""

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self.endpoint, self.server = endpoint, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.endpoint
        headers: Headers
        try:
            kind, timeout, is_raw = _read_headers(scope["headers"])
            request = endpoint.parse(kind, await _read_body(receive))
            call = Call(self.server, endpoint.path, timeout, is_raw and endpoint.has_raw)
            with _until_client_leaves(receive):
                answer = await endpoint.handler(call, request)
            status, headers = 200, _timing_headers(call)
            if isinstance(answer, Raw):
                content = answer.content
                headers += [(b"content-type", RAW.encode()), *answer.headers]
            else:
                content = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
                headers.append((b"content-type", b"application/json"))
        except ClientGone:
            return
        except Exception as error:
            status, details, headers = answer_exception(endpoint.path, error)
            content = orjson.dumps(details)
            headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _read_headers(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, float | None, bool]:
    """The content type, the deadline in seconds, and whether the client accepts the bytes of an array."""
    kind, timeout, is_raw = b"", None, False
    for name, value in headers:
        if name == b"content-type":
            kind = value
        elif name == b"accept":
            is_raw = RAW.encode() in value
        elif name == b"x-timeout-ms":
            if not value.isdigit() or len(value) > 7 or not 1 <= int(value) <= MAX_TIMEOUT:
                raise BadRequest(
                    422,
                    f"X-Timeout-Ms is {short_repr(value.decode('latin-1'))}; it must be a whole number of milliseconds "
                    f"between 1 and {MAX_TIMEOUT}.",
                )
            timeout = int(value) / 1000
    return kind, timeout, is_raw


async def _read_body(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return message["body"]
    parts = []
    while message["type"] == "http.request":
        parts.append(message["body"])
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    raise ClientGone


@contextmanager
def _until_client_leaves(receive: Receive) -> Iterator[None]:
    """Cancels the work of the block when the client disconnects, and raises `ClientGone`."""
    worker = asyncio.current_task()
    assert worker is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        worker.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        if hasattr(worker, "uncancel"):
            worker.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()


def _timing_headers(call: Call) -> Headers:
    """TEI's headers, in milliseconds, and the standard one that browsers show."""
    outcome = call.outcome
    if outcome is None:
        return call.headers
    timing = outcome.timing
    total, tokenize, queue, inference = (
        b"%.3f" % (seconds * 1000) for seconds in (timing.total, timing.tokenize, timing.queue, timing.inference)
    )
    stages = b"tokenize;dur=%b, queue;dur=%b, inference;dur=%b, total;dur=%b" % (tokenize, queue, inference, total)
    return [
        *call.headers,
        (b"x-compute-characters", str(call.characters).encode()),
        (b"x-compute-tokens", str(outcome.tokens).encode()),
        (b"x-total-time", total),
        (b"x-tokenization-time", tokenize),
        (b"x-queue-time", queue),
        (b"x-inference-time", inference),
        (b"server-timing", stages),
    ]


def count_characters(item: Any) -> int:
    """The characters of all texts of an input; token ids count as one each, as in TEI.

    Example:
        >>> count_characters(["ab", ("c", ["de"]), [7, 8]])
        7
    """
    if isinstance(item, str):
        return len(item)
    if isinstance(item, (list, tuple)):
        return sum(map(count_characters, item))
    return 1
