"""The listener at the end of a server: real sockets, and clients that connect while it closes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bertblocks.serve.listening import listen, stop_connections
from bertblocks.serve.settings import ServeSettings

Address = tuple[str, int] | str


def open_listener(kind: str, folder: Path) -> tuple[socket.socket, Address]:
    if kind == "unix":
        path = folder / "socket"
        return listen(ServeSettings(uds=path)), str(path)
    if kind == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("the machine has no IPv6")
    listener = listen(ServeSettings(host=kind, port=0))
    return listener, listener.getsockname()[:2]


def try_to_connect(listener: socket.socket, address: Address) -> bool:
    with socket.socket(listener.family) as client:
        client.settimeout(0.2)
        try:
            client.connect(address)
        except (ConnectionRefusedError, TimeoutError):
            return False
        return True


@pytest.mark.parametrize("kind", ["127.0.0.1", "::1", "unix"])
def test_who_connected_is_taken_and_nobody_connects_any_more(kind: str, tmp_path: Path) -> None:
    """A connection that the kernel accepted but `accept` did not take would be reset when the listener closes."""
    listener, address = open_listener(kind, tmp_path)
    with listener, socket.socket(listener.family) as early:
        assert try_to_connect(listener, address)
        listener.accept()[0].close()
        early.connect(address)
        early.sendall(b"hello")
        stop_connections(listener)
        assert not try_to_connect(listener, address)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(5) == b"hello"
            connection.sendall(b"answer")
            listener.setblocking(False)
            with pytest.raises(OSError):
                listener.accept()
            listener.close()
            assert early.recv(6) == b"answer"
    assert not try_to_connect(listener, address)
