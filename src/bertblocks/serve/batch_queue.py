"""The queue between the event loop, which adds jobs, and the threads that run models, which take batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bertblocks.serve.lanes import Batch, Job, Lanes
from bertblocks.serve.observer import Observer

#: The share of the latest batch in the running mean of the speed.
SMOOTHING = 0.1


class BatchQueue:
    """Lanes that several threads share.

    `tokens` counts those that wait or run. `speed` is that of full batches, all that run at the same time taken
    together, in tokens per second; 0 before the first.
    """

    def __init__(self, budget: int, observer: Observer) -> None:
        self._lanes = Lanes(budget)
        self._observer = observer
        self._lock = threading.Lock()
        #: The threads that wait, in the order in which they are woken, the first at the end.
        self._idle: list[threading.Condition] = []
        self._is_closed = False
        #: Called when a short job arrives, from the thread that adds it.
        self.on_short: list[Callable[[], None]] = []
        #: Batches that have been taken and have not ended.
        self._running = 0
        self.tokens = 0
        self.speed = 0.0

    def add(self, job: Job) -> None:
        with self._lock:
            self._lanes.add(job)
            self._count(job.tokens)
            if self._idle:
                self._idle.pop().notify()
        if job.is_short:
            for notify in self.on_short:
                notify()

    def take(self, is_primary: bool = True) -> Batch | None:
        """Waits for the next batch; returns None when the queue is closed and empty.

        A primary thread is woken before others.
        """
        with self._lock:
            while True:
                batch = self._lanes.take(time.perf_counter())
                if batch is not None or self._is_closed:
                    return self._begin(batch)
                own = threading.Condition(self._lock)
                self._idle.insert(len(self._idle) if is_primary else 0, own)
                own.wait()

    def take_short(self) -> Batch | None:
        """The next batch of short requests, without waiting."""
        with self._lock:
            return self._begin(self._lanes.take_short())

    @property
    def has_short(self) -> bool:
        return self._lanes.has_short

    def _begin(self, batch: Batch | None) -> Batch | None:
        if batch is not None:
            self._running += 1
            now = time.perf_counter()
            for job in batch.jobs:
                job.started = job.started or now
        return batch

    def end(self, batch: Batch, result: tuple[Sequence[Any], float] | Exception, model: str) -> None:
        """Hands out the outputs of a batch, which took some seconds, or ends its jobs with an error."""
        with self._lock:
            self._count(-batch.tokens)
            together, self._running = self._running, self._running - 1
        if isinstance(result, Exception):
            for job in batch.jobs:
                if self.drop(job):
                    job.on_done(result)
            return
        outputs, seconds = result
        for job in self._hand_out(batch, outputs):
            job.on_done(None)
        if 2 * batch.tokens >= self._lanes.budget:  # smaller batches are slower, and do not occur when it matters
            self._learn_speed(together * batch.tokens / max(seconds, 1e-6))
        lane = "short" if batch.is_short else "long"
        self._observer.batch(model, batch.key.method, lane, batch.tokens, len(batch.entries), seconds)

    def _hand_out(self, batch: Batch, outputs: Sequence[Any]) -> list[Job]:
        """The jobs that are complete with these outputs."""
        now = time.perf_counter()
        done = []
        with self._lock:
            for entry, output in zip(batch.entries, outputs, strict=True):
                job = entry.job
                entry.request.outputs[entry.number] = output
                job.remaining -= 1
                if job.remaining == 0 and not job.is_over:
                    job.is_over, job.ended = True, now
                    done.append(job)
        return done

    def _learn_speed(self, speed: float) -> None:
        with self._lock:
            self.speed = speed if self.speed == 0 else (1 - SMOOTHING) * self.speed + SMOOTHING * speed

    def drop(self, job: Job) -> bool:
        """Forgets what has not run of a job that nobody waits for. Returns whether it was not over yet."""
        with self._lock:
            if job.is_over:
                return False
            job.is_over = True
            self._count(-job.waiting)
        return True

    def close(self) -> None:
        """Lets threads that wait return once the queue is empty."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().notify()

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self._observer.queued(self.tokens)
