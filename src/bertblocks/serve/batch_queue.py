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

    `tokens` counts those that wait or run. `speed` is that of full batches in tokens per second, 0 before the first.
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

    @staticmethod
    def _begin(batch: Batch | None) -> Batch | None:
        if batch is not None:
            now = time.perf_counter()
            for job in batch.jobs:
                job.started = job.started or now
        return batch

    def finish(self, batch: Batch, outputs: Sequence[Any], seconds: float, model: str) -> None:
        """Hands out the outputs of a batch that ran for some seconds."""
        now, tokens = time.perf_counter(), batch.tokens
        done = []
        with self._lock:
            self._count(-tokens)
            if 2 * tokens >= self._lanes.budget:  # smaller batches are slower, and do not occur when it matters
                speed = tokens / max(seconds, 1e-6)
                self.speed = speed if self.speed == 0 else (1 - SMOOTHING) * self.speed + SMOOTHING * speed
            for entry, output in zip(batch.entries, outputs, strict=True):
                job = entry.job
                entry.request.outputs[entry.number] = output
                job.remaining -= 1
                if job.remaining == 0 and not job.is_over:
                    job.is_over, job.ended = True, now
                    done.append(job)
        for job in done:
            job.on_done(None)
        lane = "short" if batch.is_short else "long"
        self._observer.batch(model, batch.key.method, lane, tokens, len(batch.entries), seconds)

    def fail(self, batch: Batch, error: Exception) -> None:
        """Ends all jobs of a batch with an error."""
        with self._lock:
            self._count(-batch.tokens)
        for job in batch.jobs:
            if self.drop(job):
                job.on_done(error)

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
