"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """How the server listens, what it accepts, and how long it waits."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    max_body: int = 16 * 2**20
    max_inputs: int = 1024
    max_text_tokens: int | None = None
    queue_tokens: int = 200_000
    timeout: float = 30.0
    batch_tokens: int | None = None
    workers: int = 0
    drain: float = 30.0
    docs: bool = True
    log_format: str = "text"
