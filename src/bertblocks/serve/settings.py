"""The settings of a server, checked when they are made."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

LogFormat = Literal["text", "json", "off"]
MIB = 2**20
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class ServeSettings:
    """What a server is told at its start.

    Example:
        >>> ServeSettings(port=8080).url
        'http://127.0.0.1:8080'
    """

    host: str = "127.0.0.1"
    port: int = 8000
    #: A unix socket to listen on in place of host and port.
    uds: Path | None = None
    #: Bearer keys; any of them opens the server, none means that it is open.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    #: Whether /metrics and /stats require a key too.
    protect_metrics: bool = False
    #: Origins of pages in browsers that may call the server.
    cors: tuple[str, ...] = ()
    #: Bytes of a request's body.
    max_body: int = 16 * MIB
    #: Texts, pairs or documents of a request.
    max_inputs: int = 1024
    #: Tokens of a text, by default as many as the model reads with its way to handle long texts.
    max_text_tokens: int | None = None
    max_connections: int = 4096
    #: Seconds in which a client must have sent its request, and must take its answer.
    client_timeout: float = 30.0
    #: Tokens that wait for a model; a request beyond them is answered with 429.
    queue_tokens: int = 200_000
    #: Seconds that the tokens of the queue may take at the measured speed; a request beyond them is answered with 429.
    queue_seconds: float = 5.0
    #: Seconds until a request is given up, unless it says so itself.
    timeout: float = 30.0
    #: Tokens of a batch, by default what suits the machine.
    batch_tokens: int | None = None
    #: Processes that run the models; with 0 they run in the server's own.
    workers: int = 0
    #: Seconds that accepted requests have to finish after SIGTERM.
    drain: float = 30.0
    #: Whether /docs and /openapi.json are served.
    docs: bool = True
    log_format: LogFormat = "text"
    #: Where traces are sent (OTLP over HTTP), without the path of traces.
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host is empty; give an address such as 127.0.0.1, or 0.0.0.0 for every network.")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 1 and 65535, or 0 for any free one.")
        for name in ("max_body", "max_inputs", "max_text_tokens", "max_connections", "queue_tokens", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; it must be 0 (the server's own process) or more.")
        for name in ("client_timeout", "queue_seconds", "timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a number of seconds above 0.")
        if not (math.isfinite(self.drain) and self.drain >= 0):
            raise ValueError(f"drain is {self.drain}; it must be a number of seconds, 0 or more.")
        if self.log_format not in get_args(LogFormat):
            raise ValueError(f"log_format is {self.log_format!r}; it must be one of {', '.join(get_args(LogFormat))}.")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("An API key is empty or holds a character that no HTTP header can carry.")
        for origin in self.cors:
            _check_origin(origin)
        if self.otlp_endpoint is not None and urlsplit(self.otlp_endpoint).scheme not in ("http", "https"):
            raise ValueError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; it must be a URL such as http://localhost:4318."
            )

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach a server that asks for no key."""
        if self.uds is not None or self.api_keys or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


def _check_origin(origin: str) -> None:
    if origin == "*":
        return
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query or parts.fragment:
        raise ValueError(f"cors is {origin!r}; it must be an origin such as https://example.org, or * for all.")


def parse_bytes(text: str) -> int:
    """Reads a number of bytes with or without a unit.

    Example:
        >>> parse_bytes("16MiB"), parse_bytes("2 MB"), parse_bytes("500")
        (16777216, 2000000, 500)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write a number of bytes, or one with a unit such as 16MiB or 2MB.")
    return int(float(match[1]) * _UNITS[match[2].lower()])
