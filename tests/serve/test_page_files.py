"""The files of the page: small, guarded by a policy, asked for again only when they change."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from bertblocks.serve.page import FILES
from tests.serve.page_server import PageServer, run_server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with run_server(PageServer().app) as url:
        yield url


def test_files_are_small_guarded_and_asked_for_once(address: str) -> None:
    total = 0
    for path, (kind, _) in FILES.items():
        with urllib.request.urlopen(address + path[1:]) as answer:
            total += len(answer.read())
            assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            tag = answer.headers["ETag"]
        request = urllib.request.Request(address + path[1:], headers={"If-None-Match": f'"other", W/{tag}'})
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(request)
        request = urllib.request.Request(address + path[1:], headers={"If-None-Match": '"other"'})
        assert urllib.request.urlopen(request).status == 200
    assert total < 60_000


def test_every_field_of_the_page_has_a_label(address: str) -> None:
    fields, labels = set(), set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            values = dict(attributes)
            assert "style" not in values, "the policy forbids styles in the markup"
            assert not any(name.startswith("on") for name in values), "the policy forbids scripts in the markup"
            if tag in ("input", "textarea", "select"):
                fields.add(values["id"])
            if tag == "label":
                labels.add(values["for"])

    Reader().feed(urllib.request.urlopen(address).read().decode())
    assert len(fields) > 10
    assert fields == labels
