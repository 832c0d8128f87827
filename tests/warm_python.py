"""A Python that starts in milliseconds: each process is forked from a server that has imported the package already.

`warm_python()` returns the words of a command that replaces `python` in a shell or in `subprocess`. What it runs has a
process of its own, the caller's standard streams, folder and environment, and ends as every interpreter does.
"""

from __future__ import annotations

import array
import gc
import io
import json
import os
import select
import signal
import socket
import sys

STREAMS = (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w"))


def call(path: str, arguments: list[str]) -> int:
    """The client: hands everything to the server and returns the exit code."""
    streams = [number for _, number, _ in STREAMS if _is_open(number)]
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "streams": streams}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        message = json.dumps(request).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))
        connection.sendmsg([len(message).to_bytes(8, "big")], [rights] if streams else [])
        connection.sendall(message)
        return int(connection.makefile().read())


def serve(path: str) -> None:
    """The server. It never runs a command itself, so every command finds the same clean state."""
    import bertblocks.checkpoints.convert
    import bertblocks.checkpoints.quantize
    import bertblocks.cli.main
    import bertblocks.tasks.predictor
    import bertblocks.training.finetune  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    gc.freeze()  # commands then end without visiting what they share with the server
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # the test process has ended, however it did
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _answer(connection)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Starts the command in a child and tells the client its exit code; the child returns to run the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(connection, 8, len(STREAMS))
    size, message = int.from_bytes(head, "big"), b""
    while len(message) < size:
        message += connection.recv(size - len(message))
    request = json.loads(message)
    child = os.fork()
    if child:
        for descriptor in (*descriptors, *range(3)):
            os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    connection.close()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _take_streams(dict(zip(request["streams"], descriptors, strict=True)))
    _run(request["arguments"])


def _take_streams(given: dict[int, int]) -> None:
    for name, number, mode in STREAMS:
        os.close(number)
        if number in given:
            os.dup2(given[number], number)
        stream = open(number, mode, closefd=False, encoding="utf-8") if number in given else None  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper) and number == 2:
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for descriptor in given.values():
        os.close(descriptor)


def _run(arguments: list[str]) -> None:
    import runpy

    kind, what, *rest = arguments
    sys.argv = ["-c" if kind == "-c" else what, *rest]
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
