"""Ends a process whose step hangs, and says which processes are behind, so that torchrun starts all of them again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time

from bertblocks.training.distributed import World

#: The exit code of a process that the watchdog ends.
HANGING = 75
#: How often each process tells the others its step, and how long asking them may take.
INTERVAL, PATIENCE = 1.0, 5.0


class Watchdog:
    """Watches over the steps of this process in threads of its own, if there are other processes.

    A process that waits for a lost or stopped one cannot go on, and torch's own timeouts take half an hour and name no
    step. `beat` says that a step begins; after `seconds` without one, the process reports and exits.
    """

    def __init__(self, world: World, seconds: float | None) -> None:
        self.world, self.seconds = world, seconds
        self._step, self._since = 0, time.monotonic()
        self._end = threading.Event()

    def __enter__(self) -> Watchdog:
        self._since = time.monotonic()
        if self.world.store is not None and self.seconds is not None:
            for work in (self._watch, self._publish):
                threading.Thread(target=work, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def beat(self, step: int) -> None:
        self._step, self._since = step, time.monotonic()

    def _watch(self) -> None:
        assert self.seconds is not None
        while not self._end.wait(min(INTERVAL, self.seconds / 4)):
            if time.monotonic() - self._since > self.seconds:
                self._report(self.seconds)
                os._exit(HANGING)

    def _publish(self) -> None:
        """Tells the others the step and the host of this process, in a thread because the network may be gone."""
        assert self.world.store is not None
        with contextlib.suppress(RuntimeError):
            while not self._end.wait(INTERVAL):
                self.world.store.set(
                    f"watchdog/{self.world.rank}", f"{self._step} {time.time()} {socket.gethostname()}"
                )

    def _report(self, seconds: float) -> None:
        found: dict[int, str] = {}
        asking = threading.Thread(target=self._ask, args=(found,), daemon=True)
        asking.start()
        asking.join(PATIENCE)
        lines = [f"Process {self.world.rank} has been in step {self._step + 1} for more than {seconds:g} s and ends."]
        for rank in range(self.world.size):
            lines.append(f"Process {rank} {describe(found.get(rank), time.time())}.")
        print("\n".join(lines), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _ask(self, found: dict[int, str]) -> None:
        store = self.world.store
        assert store is not None
        with contextlib.suppress(RuntimeError):
            for rank in range(self.world.size):
                if store.check([f"watchdog/{rank}"]):
                    found[rank] = store.get(f"watchdog/{rank}").decode()


def describe(published: str | None, now: float) -> str:
    """What is known about a process from what it last told.

    Example:
        >>> describe("11 1000.0 node-3", 1042.0)
        'on node-3 is in step 12 and was last heard of 42 s ago'
    """
    if published is None:
        return "is unknown: it has told nothing, or the network is gone"
    step, moment, host = published.split(" ", 2)
    return f"on {host} is in step {int(step) + 1} and was last heard of {now - float(moment):.0f} s ago"
