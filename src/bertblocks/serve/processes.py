"""Runs batches in worker processes that share one copy of the models' memory.

This process loads the models and forks a process that only forks others: it has no threads, so each of its children
starts from a clean state, at any time, and reads the weights from the same pages of memory. OpenMP does not survive a
fork once its threads exist, so models are loaded after `torch.set_num_threads(1)`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from bertblocks.core.log import logger
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.errors import WorkerLost
from bertblocks.serve.lanes import Batch
from bertblocks.serve.models import ModelSet
from bertblocks.serve.runner import Forward

_PID = struct.Struct("i")


def can_fork() -> bool:
    """Whether worker processes can share memory here. macOS has fork, but its libraries do not survive it."""
    return sys.platform.startswith("linux")


class WorkerFactory:
    """Makes worker processes; must be built before this process has threads of its own."""

    def __init__(self, models: ModelSet, threads: int) -> None:
        gc.collect()
        gc.freeze()  # the collector would write to, and so copy, the pages of all objects
        self._control, theirs = socket.socketpair()
        if os.fork() == 0:
            self._control.close()
            _close_others(theirs.fileno())
            _fork_on_request(theirs, lambda connection: work(models, threads, connection))
        theirs.close()

    def make(self) -> tuple[Connection, int]:
        """A new worker: the connection to it, and its process id."""
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            answer = self._control.recv(_PID.size)
        if not answer:
            raise WorkerLost("The process that starts workers has died; restart the server.")
        return ours, _PID.unpack(answer)[0]

    def close(self) -> None:
        """Ends the process that starts workers. Workers end when their connections are closed."""
        self._control.close()


def _close_others(kept: int) -> None:
    """Closes the sockets of the server, which would stay open for their clients as long as a worker has them too."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):  # the folder's own is closed by now
                os.close(descriptor)


def _fork_on_request(control: socket.socket, serve: Callable[[Connection], None]) -> NoReturn:
    """Forks a worker for every connection that arrives, until nobody is at the other end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server drains; it ends workers by closing their connections
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that dead workers do not stay as zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            code = 1
            try:
                serve(Connection(descriptors[0]))
                code = 0
            finally:
                os._exit(code)
        os.close(descriptors[0])
        control.sendall(_PID.pack(pid))


def work(models: ModelSet, threads: int, connection: Connection) -> None:
    """The life of a worker: runs the batches that arrive, short ones also in the middle of a long one."""

    def run_next() -> None:
        number, key, segments, is_short = connection.recv()
        try:
            result: Any = forward.run(key, segments, is_short)
        except Exception as error:
            logger.exception("A batch failed")
            result = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send((number, result))

    def give_way() -> None:
        if connection.poll():
            run_next()

    forward = Forward(models, threads, give_way)
    forward.use_all_threads()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            run_next()


class ProcessRunner(threading.Thread):
    """Sends batches of the queue to one worker process, and starts another if that dies."""

    def __init__(self, models: ModelSet, queue: BatchQueue, factory: WorkerFactory) -> None:
        super().__init__(name="bertblocks-worker", daemon=True)
        self._models, self._queue, self._factory = models, queue, factory
        self._connection, self.pid = factory.make()
        self._sent = 0
        self._pending: dict[int, Batch] = {}
        self._woken, self._wake = os.pipe()
        queue.on_short.append(self._notify)

    def _notify(self) -> None:
        if self._pending:
            os.write(self._wake, b"w")

    def run(self) -> None:
        while (batch := self._queue.take()) is not None:
            try:
                self._send(batch)
                while self._pending:
                    self._receive()
            except (EOFError, OSError):
                self._replace()
        self._connection.close()

    def _send(self, batch: Batch) -> None:
        self._sent += 1
        self._pending[self._sent] = batch
        self._connection.send((self._sent, batch.key, batch.segments, batch.is_short))

    def _receive(self) -> None:
        """Waits for a result; meanwhile a short batch may overtake a long one."""
        ready = wait([self._connection, self._woken])
        if self._connection in ready:
            number, result = self._connection.recv()
            self._end(self._pending.pop(number), result)
        if self._woken in ready:
            os.read(self._woken, 4096)
            if len(self._pending) == 1 and not next(iter(self._pending.values())).is_short:
                short = self._queue.take_short()
                if short is not None:
                    self._send(short)

    def _end(self, batch: Batch, result: Any) -> None:
        self._queue.end(batch, result, self._models[batch.key.model].name)

    def _replace(self) -> None:
        """Ends the requests of a worker that has died, and starts another."""
        logger.error(f"Worker {self.pid} has died; starting another")
        lost, self._pending = list(self._pending.values()), {}
        for batch in lost:
            self._end(batch, WorkerLost("The process that ran this request has died; try again."))
        self._connection.close()
        self._connection, self.pid = self._factory.make()
