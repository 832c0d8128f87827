"""Streams inputs through a pipeline: read ahead, preprocess while the model runs, batch by length, keep the order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from bertblocks.inference.pipeline import Pipeline, Request
from bertblocks.inference.splitting import Segment

Result = TypeVar("Result")

#: How far inputs are read ahead of their results. This bounds memory, however long the stream is.
MAX_ITEMS, MAX_CHARACTERS = 1024, 2_000_000
#: When a source pauses for this many seconds, the inputs received so far are processed.
PAUSE = 0.05


def run_stream(
    items: Iterable[Any],
    pipeline: Pipeline[Result],
    forward: Callable[[list[Segment]], Sequence[Any]],
    token_budget: int,
    on_batch: Callable[[int], None],
    on_items: Callable[[int], None],
    return_exceptions: bool = False,
    window: int | None = None,
) -> Generator[Result | Exception, None, None]:
    """Yields results in the order of the inputs.

    `forward` runs the model on segments. `on_batch` receives the number of tokens after each batch, `on_items` the
    number of inputs after each chunk. An input that the pipeline rejects raises its error after the results of all
    inputs before it; with `return_exceptions` the error is yielded in place of a result.

    Inputs are sorted in chunks. With a `window`, a chunk has that many inputs whenever they arrive, so the batches, and
    the last bits of the results, depend on the inputs alone.
    """
    is_list = isinstance(items, (list, tuple))
    source = _ListChunks(items, window) if is_list else _IteratorChunks(items, window)  # type: ignore[arg-type]

    def preprocess() -> list[Request | Exception]:
        chunk, first = source.next_chunk()
        requests = _preprocess(pipeline, chunk, first) if chunk else []
        if not return_exceptions:  # nothing after the first error is needed
            for number, request in enumerate(requests):
                if isinstance(request, Exception):
                    return requests[: number + 1]
        return requests

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bertblocks-tokenizer")
    try:
        upcoming = pool.submit(preprocess)
        while entries := upcoming.result():
            if return_exceptions or not isinstance(entries[-1], Exception):
                upcoming = pool.submit(preprocess)
            requests = [entry for entry in entries if isinstance(entry, Request)]
            for batch in _pack(requests, token_budget):
                segments = [request.segments[number] for request, number in batch]
                for (request, number), output in zip(batch, forward(segments), strict=True):
                    request.outputs[number] = output
                on_batch(sum(len(segment.sequence.ids) for segment in segments))
            on_items(len(entries))
            for entry in entries:
                if isinstance(entry, Request):
                    yield pipeline.postprocess(entry)
                elif return_exceptions:
                    yield entry
                else:
                    raise entry
    finally:
        source.close()
        pool.shutdown(cancel_futures=True)


def _preprocess(pipeline: Pipeline[Any], chunk: list[Any], first: int) -> list[Request | Exception]:
    """Preprocesses a chunk; if that fails, preprocesses its inputs one by one to find those that are at fault."""
    try:
        return _number(pipeline.preprocess(chunk, first), first)
    except (TypeError, ValueError):
        results: list[Request | Exception] = []
        for index, item in enumerate(chunk, start=first):
            try:
                results += _number(pipeline.preprocess([item], index), index)
            except (TypeError, ValueError) as error:
                results.append(error)
        return results


def _number(requests: list[Request], first: int) -> list[Request | Exception]:
    for index, request in enumerate(requests, start=first):
        request.index = index
    return list(requests)


def _pack(requests: list[Request], token_budget: int) -> Iterator[list[tuple[Request, int]]]:
    """Packs segments, the longest first, into batches within the token budget; a longer segment gets its own batch."""
    segments = [(request, number) for request in requests for number in range(len(request.segments))]
    segments.sort(key=lambda entry: len(entry[0].segments[entry[1]].sequence.ids), reverse=True)
    batch: list[tuple[Request, int]] = []
    tokens = 0
    for request, number in segments:
        size = len(request.segments[number].sequence.ids)
        if batch and tokens + size > token_budget:
            yield batch
            batch, tokens = [], 0
        batch.append((request, number))
        tokens += size
    if batch:
        yield batch


def _most(window: int | None) -> tuple[int, int]:
    """The most inputs of a chunk, and the most characters."""
    return (MAX_ITEMS, MAX_CHARACTERS) if window is None else (window, max(window * MAX_CHARACTERS // MAX_ITEMS, 1))


def _count_characters(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    return sum(map(_count_characters, item)) if isinstance(item, (list, tuple)) else 0


class _ListChunks:
    """The chunks of a list."""

    def __init__(self, items: Sequence[Any], window: int | None = None) -> None:
        self.items = items
        self.most = _most(window)
        self.position = 0

    def next_chunk(self) -> tuple[list[Any], int]:
        first, characters = self.position, 0
        most_items, most_characters = self.most
        while self.position < min(first + most_items, len(self.items)) and characters < most_characters:
            characters += _count_characters(self.items[self.position])
            self.position += 1
        return list(self.items[first : self.position]), first

    def close(self) -> None:
        """Lists have nothing to close."""


class _IteratorChunks:
    """The chunks of an iterator that may block: inputs that have arrived do not wait for those that have not.

    A thread reads the iterator, because there is no way to ask an iterator whether it would block. It stops reading
    when as many items or characters as make a chunk are waiting.
    """

    def __init__(self, items: Iterable[Any], window: int | None = None) -> None:
        self.most = _most(window)
        self.pause = PAUSE if window is None else None
        self.changed = threading.Condition()
        self.arrived: deque[tuple[Any, int]] = deque()
        self.characters = 0
        self.is_closed = self.is_over = False
        self.error: BaseException | None = None
        self.position = 0
        threading.Thread(target=self._read, args=(items,), daemon=True, name="bertblocks-reader").start()

    def _read(self, items: Iterable[Any]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self._add(item):
                    return
        except BaseException as raised:  # re-raised on the thread that asked for the results
            error = raised
        with self.changed:
            self.is_over, self.error = True, error
            self.changed.notify_all()

    def _add(self, item: Any) -> bool:
        """Adds an item once there is room; returns False if the results are no longer wanted."""
        size = _count_characters(item)
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or not self._is_full)
            self.arrived.append((item, size))
            self.characters += size
            self.changed.notify_all()
            return not self.is_closed

    @property
    def _is_full(self) -> bool:
        return len(self.arrived) >= self.most[0] or self.characters >= self.most[1]

    def next_chunk(self) -> tuple[list[Any], int]:
        chunk: list[Any] = []
        characters = 0
        with self.changed:
            while len(chunk) < self.most[0] and characters < self.most[1]:
                timeout = self.pause if chunk else None
                self.changed.wait_for(lambda: self.arrived or self.is_over or self.is_closed, timeout)
                if not self.arrived:
                    break
                item, size = self.arrived.popleft()
                chunk.append(item)
                characters += size
                self.characters -= size
                self.changed.notify_all()
            if not chunk and self.error is not None:
                raise self.error
        first, self.position = self.position, self.position + len(chunk)
        return chunk, first

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
