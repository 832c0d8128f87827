from __future__ import annotations

import hmac
import json
from pathlib import Path

import pytest

from bertblocks.serve.auth import BearerKeys, gather_keys
from bertblocks.serve.front import wrap
from bertblocks.serve.settings import ServeSettings
from tests.serve.asgi import call, ok

APP = BearerKeys(ok, ServeSettings(api_keys=("first-key", "second-key")))


@pytest.mark.parametrize("key", ["Bearer first-key", "Bearer second-key", "bearer  second-key "])
def test_each_key_opens_the_server(key: str) -> None:
    assert call(APP, authorization=key).status == 200


@pytest.mark.parametrize(
    "key",
    ["", "Bearer", "Bearer ", "Bearer first-ke", "Bearer first-key2", "first-key", "Basic first-key", "Bearer \xe9"],
)
def test_other_keys_get_401(key: str) -> None:
    answer = call(APP, authorization=key)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_request_without_a_key_gets_401_in_the_form_of_its_route() -> None:
    assert set(json.loads(call(APP, "/embed").body)) == {"error", "error_type"}
    assert json.loads(call(APP, "/v1/embeddings").body)["error"]["type"] == "authentication_error"
    assert set(json.loads(call(APP, "/v2/rerank").body)) == {"message"}


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first one fits already, and always on strings of one length."""
    lengths = []
    original = hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        lengths.append((len(given), len(known)))
        return original(given, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in ("first-key", "x", "a much longer key than any of those that are known"):
        lengths.clear()
        call(APP, authorization=f"Bearer {key}")
        assert lengths == [(32, 32)] * 2


@pytest.mark.parametrize(
    "path", ["/live", "/ready", "/health", "/metrics", "/stats", "/", "/docs", "/docs.css", "/page.js"]
)
def test_probes_metrics_and_the_page_are_open(path: str) -> None:
    assert call(APP, path, "GET").status == 200


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/a.js", "GET"),
        ("/a\n.js", "GET"),
        ("/live/", "GET"),
        ("//live", "GET"),
    ],
)
def test_other_paths_are_closed(path: str, method: str) -> None:
    assert call(APP, path, method).status == 401


def test_metrics_can_be_closed_but_probes_stay_open() -> None:
    app = BearerKeys(ok, ServeSettings(api_keys=("key",), protect_metrics=True))
    assert call(app, "/metrics", "GET").status == call(app, "/stats", "GET").status == 401
    assert call(app, "/metrics", "GET", authorization="Bearer key").status == 200
    assert call(app, "/live", "GET").status == 200


def test_without_keys_the_server_is_open() -> None:
    assert call(BearerKeys(ok, ServeSettings())).status == 200


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfrom-file\n\n  spaced  \n")
    monkeypatch.setenv("BERTBLOCKS_API_KEY", "from-variable, given")
    assert gather_keys(["given"], file) == ("given", "from-file", "spaced", "from-variable")


def test_a_file_or_variable_without_keys_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave the server open although its owner meant to close it."""
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ValueError, match="does not hold a key"):
        gather_keys([], tmp_path / "keys")
    monkeypatch.setenv("BERTBLOCKS_API_KEY", " ")
    with pytest.raises(ValueError, match="BERTBLOCKS_API_KEY is empty"):
        gather_keys([], None)


# ---------------------------------------------------------------------- CORS


def preflight(settings: ServeSettings, origin: str) -> dict[str, str]:
    headers = {"origin": origin, "access_control_request_method": "POST"}
    return call(wrap(ok, settings, []), "/embed", "OPTIONS", **headers).headers


def test_pages_of_other_origins_are_kept_out_by_default() -> None:
    app = wrap(ok, ServeSettings(), [])
    assert not [name for name in call(app, origin="https://example.org").headers if name.startswith("access-control")]


def test_a_named_origin_may_ask_before_it_has_a_key() -> None:
    settings = ServeSettings(cors=("https://example.org",), api_keys=("key",))
    assert preflight(settings, "https://example.org")["access-control-allow-origin"] == "https://example.org"
    assert "access-control-allow-origin" not in preflight(settings, "https://other.org")
    answer = call(wrap(ok, settings, []), origin="https://example.org")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "https://example.org")
