from __future__ import annotations

from typing import Any

import pytest

from bertblocks.serve.settings import ServeSettings, parse_bytes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": ""}, "host is empty"),
        ({"port": 70000}, "port is 70000; it must be between 1 and 65535"),
        ({"max_body": 0}, "max_body is 0; it must be at least 1"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"timeout": float("nan")}, "timeout is nan; it must be a number of seconds above 0"),
        ({"drain": float("inf")}, "drain is inf"),
        ({"log_format": "xml"}, "log_format is 'xml'; it must be one of text, json, off"),
        ({"api_keys": ("",)}, "An API key is empty"),
        ({"api_keys": ("a b",)}, "An API key is empty or holds"),
        ({"cors": ("example.org",)}, "cors is 'example.org'; it must be an origin"),
        ({"cors": ("https://example.org/",)}, "cors is"),
        ({"otlp_endpoint": "localhost:4318"}, "otlp_endpoint is 'localhost:4318'; it must be a URL"),
    ],
)
def test_impossible_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings(**values)


def test_keys_do_not_show_in_the_repr() -> None:
    assert "hush" not in repr(ServeSettings(api_keys=("hush",)))


@pytest.mark.parametrize(
    ("values", "is_exposed"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "example.org"}, True),
        ({"host": "0.0.0.0", "api_keys": ("key",)}, False),
    ],
)
def test_an_open_server_on_the_network_is_noticed(values: dict[str, Any], is_exposed: bool) -> None:
    assert ServeSettings(**values).is_exposed is is_exposed


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    assert ServeSettings(host="::1", port=80).url == "http://[::1]:80"


@pytest.mark.parametrize("text", ["", "MB", "16 lightyears", "-1", "1e9"])
def test_sizes_must_have_known_units(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)
