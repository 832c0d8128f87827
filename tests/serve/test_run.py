"""Servers in processes of their own, with real sockets and signals. The service behind them is a fake."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.fake_service import Running, serving, start

#: Seconds of the shared server's client timeout.
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(client_timeout=TIMEOUT, log_format="off", max_connections=1500) as running:
        yield running


def raw(server: Running, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(data)
    return client


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    client.close()
    return b"".join(parts)


def is_well(server: Running) -> bool:
    return server.ask("POST", "/embed", b"hello").status == 200


# ---------------------------------------------------------------------- clients that misbehave


def test_requests_are_answered_with_an_id(server: Running) -> None:
    response = server.ask("POST", "/embed", b"hello", x_request_id="job-7")
    assert (response.status, response.body) == (200, b'{"size": 5}')
    assert response.headers["x-request-id"] == "job-7"
    assert "server" not in response.headers


def test_a_failure_tells_no_details(server: Running) -> None:
    response = server.ask("POST", "/fail", b"hello")
    assert response.status == 500
    assert b"secret" not in response.body


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_is_refused_without_being_held(server: Running, chunked: bool) -> None:
    """The client sends all of it before it reads, and still gets its answer."""
    part = b"x" * 1_000_000
    before = server.memory()
    connection = server.connect()
    headers = {} if chunked else {"Content-Length": str(100 * len(part))}
    connection.request("POST", "/embed", iter([part] * 100), headers, encode_chunked=chunked)
    assert connection.getresponse().status == 413
    connection.close()
    assert server.memory() - before < 40_000_000
    assert is_well(server)


def test_a_client_that_asks_first_sends_no_large_body(server: Running) -> None:
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100000000\r\n\r\n"
    client = raw(server, head)
    assert client.recv(65536).startswith(b"HTTP/1.1 413")
    client.close()


#: What slow clients send first, what they send now and then, and how the answer begins.
SLOW = [
    (b"", b"", b""),
    (b"\r\n\r\n", b"\r\n", b""),
    (b"POST /embe", b"d", b"HTTP/1.1 408"),
    (b"POST /embed HTTP/1.1\r\nhost: x\r\nx-slow: ", b"a", b"HTTP/1.1 408"),
    (b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc", b"a", b"HTTP/1.1 408"),
    (b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nff\r\nabc", b"a", b"HTTP/1.1 408"),
]


def test_slow_clients_are_let_go(server: Running) -> None:
    """A byte now and then does not keep a connection open, wherever in the request the client is."""
    clients = [raw(server, head) for head, _, _ in SLOW]
    stopped = threading.Event()

    def drip() -> None:
        while not stopped.wait(TIMEOUT / 4):
            for client, (_, more, _) in zip(clients, SLOW, strict=True):
                with contextlib.suppress(OSError):
                    client.sendall(more)

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert is_well(server)
        assert [read_all(client)[:12] for client in clients] == [answer for _, _, answer in SLOW]
    finally:
        stopped.set()
        dripping.join()


def test_a_second_request_on_a_connection_has_time_again(server: Running) -> None:
    connection = server.connect()
    for _ in range(2):
        connection.request("POST", f"/embed?{0.6 * TIMEOUT}", b"hello")
        assert connection.getresponse().read() == b'{"size": 5}'
    connection.close()


def test_a_client_that_does_not_read_is_let_go(server: Running) -> None:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
    time.sleep(2 * TIMEOUT)
    client.settimeout(20)
    assert len(read_all(client)) < 50_000_000
    assert is_well(server)


def test_endless_headers_are_refused(server: Running) -> None:
    client = raw(server, b"GET /embed HTTP/1.1\r\nhost: x\r\n")
    answer = b""
    with contextlib.suppress(OSError):
        for _ in range(1000):
            client.sendall(b"x-a: " + b"b" * 1000 + b"\r\n")
    with contextlib.suppress(ConnectionResetError):
        answer = client.recv(65536)
    assert answer[:12] in (b"HTTP/1.1 431", b"")  # the reset may overtake it
    client.close()
    assert is_well(server)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00", b"\xff\xfe\x00garbage\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n"]
)
def test_clients_that_do_not_speak_http_get_400(server: Running, data: bytes) -> None:
    assert read_all(raw(server, data))[:12] in (b"HTTP/1.1 400", b"")
    assert is_well(server)


def test_half_closed_and_aborted_connections_hurt_nobody(server: Running) -> None:
    request = b"POST /embed?0.05 HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    for number in range(20):
        client = raw(server, request[: len(request) - number % 3])
        client.shutdown(socket.SHUT_WR)
        if number % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends a reset
        client.close()
    assert is_well(server)


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    bodies = (b"a", b"bb", b"ccc")
    data = b"".join(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(b), b) for b in bodies)
    answers = read_all(raw(server, data + b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
    sizes = [answers.index(b'{"size": %d}' % size) for size in (1, 2, 3)]
    assert sizes == sorted(sizes)
    assert answers.endswith(b'{"status": "ok"}')


@pytest.mark.slow
def test_a_thousand_connections_at_once(server: Running) -> None:
    request = b"POST /embed?2 HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello"
    clients = [raw(server, request) for _ in range(1000)]
    assert is_well(server)
    for client in clients:
        assert b'{"size": 5}' in read_all(client)


def test_connections_beyond_the_limit_get_429() -> None:
    with serving(max_connections=3) as server:
        held = [raw(server) for _ in range(3)]
        assert read_all(raw(server, b"GET /live HTTP/1.1\r\n\r\n"))[:12] == b"HTTP/1.1 429"
        held.pop().close()
        deadline = time.monotonic() + 10
        while server.ask("GET", "/live").status != 200:
            assert time.monotonic() < deadline
        for client in held:
            client.close()


# ---------------------------------------------------------------------- start


def test_a_server_is_alive_before_it_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    process = start(1.0, uds=str(path), drain=1.0)
    try:
        assert process.stdout
        assert process.stdout.readline() == "starting\n"
        assert ask_when_up(path, "/live") == (200, {"status": "ok"})
        loading = {"error": "The models are being loaded.", "error_type": "Unhealthy"}
        assert ask_when_up(path, "/ready") == ask_when_up(path, "/embed") == (503, loading)
        assert process.stdout.readline() == f"unix:{path}\n"
        assert ask_when_up(path, "/ready") == ask_when_up(path, "/health") == (200, {"status": "ok"})
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0
        assert not path.exists()
    finally:
        process.kill()
        process.communicate()


def ask_when_up(path: Path, route: str) -> tuple[int, dict[str, str]]:
    """Asks over a unix socket, which may not be there yet."""
    deadline = time.monotonic() + 20
    while True:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(path))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    connection.request("GET", route)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_a_failed_load_and_a_taken_socket_are_one_sentence(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "taken"))
        other.listen()
        taken = start(uds=str(tmp_path / "taken"))
        broken = start(0.0, "The model is broken.")
        outputs = [(*process.communicate(timeout=30), process.returncode) for process in (taken, broken)]
    assert outputs[0] == (
        "starting\n",
        f"{tmp_path}/taken is in use by another server; choose another path with --uds.\n",
        1,
    )
    assert outputs[1] == ("starting\n", "The model is broken.\n", 1)


# ---------------------------------------------------------------------- drain


def test_every_accepted_request_is_answered_after_sigterm() -> None:
    """Many clients ask all the time; connections of some wait in the kernel or are idle when the signal comes."""
    with serving(log_format="off") as server, ThreadPoolExecutor(25) as pool:
        outcomes = [pool.submit(ask_until_the_end, server, number % 2 == 0) for number in range(24)]
        slow = pool.submit(server.ask, "POST", "/embed?1", b"slow")
        time.sleep(0.5)
        code, out, err = server.stop()
        answered = sum(outcome.result() for outcome in outcomes)
        assert slow.result().status == 200
    assert (code, out) == (0, "drained\n")
    assert answered > 24
    assert "POST" not in err  # log_format is "off"


def ask_until_the_end(server: Running, keep_alive: bool) -> int:
    """Asks one request after the other, and counts the answers.

    The end is a connection that is not accepted, or the end of one that was idle, which the answer before announced or
    whose closing the client saw. A request that was sent on an accepted connection must be answered.
    """
    answered = 0
    connection = server.connect()
    while True:
        try:
            connection.connect()
        except ConnectionRefusedError:
            return answered
        while True:
            connection.request("POST", "/embed?0.02", b"hello")
            response = connection.getresponse()
            assert response.read() == b'{"size": 5}'
            assert response.status == 200
            answered += 1
            if response.will_close or not keep_alive:
                connection.close()
                break


def test_requests_on_their_way_are_answered_after_sigterm() -> None:
    """Connections that only the kernel has accepted, idle ones, and requests that arrive in parts."""
    request = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    with serving() as server:
        idle, used = raw(server), raw(server, request)
        while not used.recv(65536).endswith(b'{"size": 5}'):
            pass
        parts = [raw(server, request[:end]) for end in (10, 50, len(request) - 2)]
        time.sleep(0.1)
        server.process.send_signal(signal.SIGSTOP)
        waiting = [raw(server, request) for _ in range(50)]
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        while is_listening(server):
            pass
        for client in (idle, used):
            client.sendall(request)
        for client, end in zip(parts, (10, 50, len(request) - 2), strict=True):
            client.sendall(request[end:])
        for client in (idle, used, *parts):
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in answer
        for client in waiting:
            assert read_all(client).startswith(b"HTTP/1.1 200")
        out, _ = server.process.communicate(timeout=20)
        assert (server.process.returncode, out) == (0, "drained\n")


def test_ctrl_c_drains_too_and_a_second_signal_ends_at_once() -> None:
    with serving(drain=20.0) as server, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.ask, "POST", "/embed?15", b"hello")
        deadline = time.monotonic() + 10
        while b"requests_in_progress 1.0" not in server.ask("GET", "/metrics").body:
            assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGINT)
        while is_listening(server):
            assert time.monotonic() < deadline
        assert server.process.poll() is None
        assert server.stop()[0] == 128 + signal.SIGTERM
        assert isinstance(pending.exception(), (ConnectionError, http.client.RemoteDisconnected))


def is_listening(server: Running) -> bool:
    with socket.socket() as client:
        client.settimeout(0.2)  # a server that drains lets the kernel drop requests to connect
        return client.connect_ex(("127.0.0.1", server.port)) == 0


def test_the_drain_ends_in_time_whatever_requests_do() -> None:
    with serving(drain=0.5) as server, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.ask, "POST", "/embed?60", b"hello")
        idle = raw(server)
        time.sleep(0.3)
        code, out, err = server.stop()
        assert pending.exception() is not None
        idle.close()
    assert (code, out) == (0, "drained\n")
    assert "1 requests were not finished within 0.5 s" in err
