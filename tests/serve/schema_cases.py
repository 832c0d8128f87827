"""Requests that schemathesis makes from the OpenAPI document: `python -m tests.serve.schema_cases 10000`.

Answers must not be server errors, and must be as the document says: their statuses, types, headers and bodies. Requests
that do not fit the document must be rejected.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from bertblocks.serve.api.endpoint import MAX_TIMEOUT
from tests.serve.live import serve

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


def run_cases(url: str, count: int, show: bool = False) -> Counter[int]:
    """Sends at least `count` requests, equally many to each route with a body, and counts the statuses."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    share = -(-count // sum(len(modes) for operation in operations if operation.body))
    statuses: Counter[int] = Counter()
    session = requests.Session()
    for operation in operations:
        before = sum(statuses.values())
        for mode in modes if operation.body else modes[:1]:
            _run(operation, mode, share, url, session, statuses)
        if show:
            sent = sum(statuses.values()) - before
            print(f"{operation.method.upper():5} {operation.path:20} {sent:5} requests", flush=True)
    return statuses


def _run(
    operation: Any, mode: GenerationMode, count: int, url: str, session: requests.Session, statuses: Counter[int]
) -> None:
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if str(case.headers.get("X-Timeout-Ms", "")).isdigit():
            headers = case.meta.components.get(ParameterLocation.HEADER)
            assume(headers is None or headers.mode is GenerationMode.POSITIVE)  # digits are valid
            case.headers["X-Timeout-Ms"] = str(MAX_TIMEOUT)  # a short deadline rightly ends with 504
        response = case.call(base_url=url, session=session)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    send()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "tokens") as live:
        found = run_cases(live.url, int(sys.argv[1]), show=True)
    print(f"{sum(found.values())} requests, no failure; statuses: {dict(sorted(found.items()))}")
