"""One server for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.live import Live, serve


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("serve") / "tokens") as running:
        yield running


@pytest.fixture(scope="session")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=30) as client:
        yield client
