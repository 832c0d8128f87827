"""`bertblocks serve`: what it says before a server runs. `tests/serve/` tests the rest."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bertblocks.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("a-model")
    assert result.exit_code == 1
    assert "Serving needs starlette and uvicorn" in result.output
    assert "bertblocks[serve]" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-body", "16 lightyears"], "'16 lightyears' is not a size"),
        (["--port", "70000"], "port is 70000"),
        (["--cors", "example.org"], "cors is 'example.org'"),
        (["--api-key", "a b"], "An API key is empty or holds a character"),
        (["--api-key-file", "does-not-exist"], "does-not-exist: No such file"),
        (["--host", "192.0.2.1", "--api-key", "key"], "host is '192.0.2.1', which is not an address of this machine"),
    ],
)
def test_impossible_options_are_one_sentence(options: list[str], message: str) -> None:
    result = run("a-model", *options)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("a-model", "--port", port)
    assert result.exit_code == 1
    assert result.output == f"bertblocks: Port {port} of 127.0.0.1 is in use; choose another with --port.\n"


def test_a_socket_path_that_is_a_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    result = run("a-model", "--uds", file)
    assert result.exit_code == 1
    assert "is a file, not a socket" in result.output.replace("\n", " ")
    assert file.read_text() == "data"
