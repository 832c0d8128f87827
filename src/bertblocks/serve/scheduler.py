"""Takes requests of all clients, tokenizes them, and answers them when the model has run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bertblocks.core.log import logger
from bertblocks.inference.pipeline import Pipeline, Request
from bertblocks.inference.splitting import CHARACTERS_PER_TOKEN, TooLong
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.errors import DeadlineExceeded, Overloaded, ServeError, ShuttingDown, TooLarge
from bertblocks.serve.lanes import Job
from bertblocks.serve.models import METHODS, ModelSet, PipelineKey, Pipelines, ServedModel
from bertblocks.serve.observer import Observer

#: Requests of at most this many characters are tokenized on the event loop; a thread would take longer.
INLINE_CHARACTERS = 2000
#: Results of at most this many segments are made on the event loop.
INLINE_SEGMENTS = 8
#: Characters per token, for an estimate before a text is tokenized.
TYPICAL_CHARACTERS = 4
#: The seconds that a model may take for its first run, which may compile kernels.
WARM_UP_SECONDS = 600.0

#: Makes the threads that take batches from a queue.
Runners = Callable[[BatchQueue], Sequence[threading.Thread]]


@dataclass(frozen=True)
class Timing:
    """The seconds of a request by stage; `inference` is from the start of its first batch to the end of its last."""

    tokenize: float
    queue: float
    inference: float
    total: float


@dataclass(frozen=True)
class Outcome:
    """The results of a request, one for each input, and what they cost."""

    results: list[Any]
    tokens: int
    timing: Timing


class Scheduler:
    """Runs requests in shared batches.

    `queue_tokens` bounds what waits and runs, and `queue_seconds` the time that it will take. `timeout` is the default
    deadline of a request in seconds, `batch_tokens` the size of batches, small enough that one takes a few hundredths
    of a second.
    `max_text_tokens` bounds the tokens of an input.
    """

    def __init__(
        self,
        models: ModelSet,
        runners: Runners,
        *,
        queue_tokens: int = 200_000,
        queue_seconds: float = 5.0,
        timeout: float = 30.0,
        batch_tokens: int = 512,
        max_text_tokens: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.models = models
        self.queue_tokens, self.queue_seconds, self.timeout = queue_tokens, queue_seconds, timeout
        self.max_text_tokens, self.batch_tokens = max_text_tokens, batch_tokens
        self._observer = observer or Observer()
        self._queue = BatchQueue(self.batch_tokens, self._observer)
        self._runners = runners
        self._threads: Sequence[threading.Thread] = ()
        self._pipelines = Pipelines(models)
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="bertblocks-tokenizer")
        self._numbers = {id(model): number for number, model in enumerate(models)}
        #: Estimated tokens of requests that are being tokenized.
        self._reserved = 0
        self._running = 0
        self._is_warm = self._is_draining = False

    @property
    def is_ready(self) -> bool:
        return self._is_warm and not self._is_draining

    @property
    def tokens(self) -> int:
        """Tokens that wait or run."""
        return self._queue.tokens + self._reserved

    async def start(self) -> None:
        """Starts the threads and runs every task of every model once, so that the first request finds them warm."""
        self._threads = self._runners(self._queue)
        for thread in self._threads:
            thread.start()
        for model in self.models:
            for task in model.tasks:
                try:
                    await self._run(model, METHODS[task], [warm_up(task, model)], {}, None, WARM_UP_SECONDS)
                except ValueError as error:  # such as a prompt that fills the whole sequence
                    logger.warning(f"{model.name} could not warm up {task}: {error}")
        self._is_warm = True

    async def drain(self, seconds: float) -> bool:
        """Takes nothing new, waits until all requests are answered, and stops the threads."""
        self._is_draining = True
        ends = time.perf_counter() + seconds
        while self._running and time.perf_counter() < ends:
            await asyncio.sleep(0.01)
        self._queue.close()
        self._tokenizers.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(ends - time.perf_counter(), 1.0))
        return not self._running

    async def run(
        self,
        model: ServedModel,
        method: str,
        items: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        *,
        truncate: bool | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        """The results of a method of `Predictor` for some inputs.

        `truncate` cuts long texts, or makes them an error; None does what the method does by default. Cancelling the
        call drops what has not run.
        """
        if self._is_draining:
            raise ShuttingDown("The server is shutting down; ask another one.")
        self._running += 1
        try:
            timeout = self.timeout if timeout is None else min(timeout, self.timeout)
            return await self._run(model, method, items, options or {}, truncate, timeout)
        except ServeError as error:
            self._observer.rejected(type(error).__name__)
            raise
        finally:
            self._running -= 1

    async def _run(
        self,
        model: ServedModel,
        method: str,
        items: Sequence[Any],
        options: Mapping[str, Any],
        truncate: bool | None,
        timeout: float,
    ) -> Outcome:
        arrived = time.perf_counter()
        too_long: TooLong | None = None if truncate is None else "truncate" if truncate else "error"
        key = PipelineKey(self._numbers[id(model)], method, too_long, tuple(sorted(options.items())))
        pipeline = self._pipelines[key]
        requests = await self._tokenize(pipeline, items, timeout, arrived + timeout)
        tokenized = time.perf_counter()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        job = Job(
            key,
            (key.model, pipeline.batch_key),
            requests,
            tokenized,
            on_done=lambda error: loop.call_soon_threadsafe(_settle, done, error),
        )
        if job.remaining:
            self._check_tokens(job, timeout)
            late = DeadlineExceeded(f"There is no result after {timeout:g} seconds, the deadline.")
            deadline = loop.call_later(max(arrived + timeout - tokenized, 0), _settle, done, late)
            self._queue.add(job)
            try:
                await done
            finally:
                deadline.cancel()
                waiting = job.waiting
                if self._queue.drop(job):
                    self._observer.cancelled(waiting)
        results = await self._postprocess(pipeline, requests)
        ended = time.perf_counter()
        started = job.started or tokenized
        timing = Timing(tokenized - arrived, started - tokenized, max(job.ended - started, 0.0), ended - arrived)
        outcome = Outcome(results, job.tokens, timing)
        loop.call_soon(self._observer.finished, model.name, method, outcome)  # once the answer is on its way
        return outcome

    # ------------------------------------------------------------------ before the model

    async def _tokenize(
        self, pipeline: Pipeline[Any], items: Sequence[Any], timeout: float, deadline: float
    ) -> list[Request]:
        texts = _texts(items)
        self._check_texts(texts, pipeline)
        limit = pipeline.splitter.max_length if pipeline.splitter.too_long == "truncate" else None
        estimate = sum(_estimate(text, limit) for text in texts)
        self._admit(estimate, timeout)
        characters = sum(map(len, texts))
        if characters <= INLINE_CHARACTERS:
            return pipeline.preprocess(items, 0)
        self._reserved += estimate
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizers, _tokenize_in_time, pipeline, items, deadline)
        finally:
            self._reserved -= estimate

    def _check_texts(self, texts: Sequence[str], pipeline: Pipeline[Any]) -> None:
        """Rejects texts that certainly have too many tokens without tokenizing them."""
        if self.max_text_tokens is None or pipeline.splitter.too_long == "truncate":
            return
        for text in texts:
            if len(text) > CHARACTERS_PER_TOKEN * self.max_text_tokens:
                raise TooLarge(
                    f"A text has {len(text):,} characters; this server reads at most {self.max_text_tokens:,} tokens. "
                    'Set "truncate" to true to cut it.'
                )

    def _check_tokens(self, job: Job, timeout: float) -> None:
        most = max(sum(len(part.sequence.ids) for part in request.segments) for request in job.requests)
        if self.max_text_tokens is not None and most > self.max_text_tokens and job.key.method != "rerank":
            raise TooLarge(f"An input has {most:,} tokens; this server reads at most {self.max_text_tokens:,}.")
        self._admit(job.tokens, timeout)

    def _admit(self, tokens: int, timeout: float) -> None:
        """Rejects what the queue has no room for, or cannot be done in time."""
        if tokens > self.queue_tokens:
            raise TooLarge(
                f"The request has about {tokens:,} tokens; this server takes at most {self.queue_tokens:,} at once."
            )
        speed = self._queue.speed
        wait = self.tokens / speed if speed else 0.0
        longest = min(timeout, self.queue_seconds)
        if self.tokens + tokens > self.queue_tokens or wait > longest:
            excess = self.tokens + tokens - self.queue_tokens
            retry = max(excess / speed if speed else 1.0, wait - longest, 0.1)
            raise Overloaded(f"The queue is full with {self.tokens:,} tokens; try again later.", retry)

    # ------------------------------------------------------------------ after the model

    async def _postprocess(self, pipeline: Pipeline[Any], requests: Sequence[Request]) -> list[Any]:
        if sum(len(request.segments) for request in requests) <= INLINE_SEGMENTS:
            return [pipeline.postprocess(request) for request in requests]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizers, lambda: list(map(pipeline.postprocess, requests)))


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    """Lets a request that waits go on, unless it already has."""
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _tokenize_in_time(pipeline: Pipeline[Any], items: Sequence[Any], deadline: float) -> list[Request]:
    if time.perf_counter() > deadline:
        raise DeadlineExceeded("The deadline passed before the texts were tokenized.")
    return pipeline.preprocess(items, 0)


def _texts(items: Iterable[Any]) -> list[str]:
    """All strings in inputs of any shape."""
    found: list[str] = []
    for item in items:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            found += _texts(item.values())
        elif isinstance(item, (list, tuple)):
            found += _texts(item)
    return found


def _estimate(text: str, limit: int | None) -> int:
    tokens = len(text) // TYPICAL_CHARACTERS + 2
    return tokens if limit is None else min(tokens, limit)


def warm_up(task: str, model: ServedModel) -> Any:
    """An input of a task, for the first run of a model."""
    text = "a short text to warm up"
    items: dict[str, Any] = {
        "rerank": (text, [text, f"{text} {text}"]),
        "answer": (text, text),
        "fill-mask": f"{text} {model.predictor.tokenizer.mask_token}",
    }
    return items.get(task, text)
