"""Streams inputs through a pipeline: read ahead, preprocess while the model runs, batch by length, keep the order."""

from __future__ import annotations

import queue
import threading
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
) -> Generator[Result, None, None]:
    """Yields results in the order of the inputs.

    `forward` runs the model on segments. `on_batch` receives the number of tokens after each batch, `on_items` the
    number of inputs after each chunk.
    """
    source = _ListChunks(items) if isinstance(items, (list, tuple)) else _IteratorChunks(items)

    def preprocess() -> list[Request] | None:
        chunk, first = source.next_chunk()
        return pipeline.preprocess(chunk, first) if chunk else None

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bertblocks-tokenizer")
    try:
        upcoming = pool.submit(preprocess)
        while (requests := upcoming.result()) is not None:
            upcoming = pool.submit(preprocess)
            for batch in _pack(requests, token_budget):
                segments = [request.segments[number] for request, number in batch]
                for (request, number), output in zip(batch, forward(segments), strict=True):
                    request.outputs[number] = output
                on_batch(sum(len(segment.sequence.ids) for segment in segments))
            on_items(len(requests))
            for request in requests:
                yield pipeline.postprocess(request)
    finally:
        source.close()
        pool.shutdown(cancel_futures=True)


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


def _count_characters(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    return sum(map(_count_characters, item)) if isinstance(item, (list, tuple)) else 0


class _ListChunks:
    """The chunks of a list."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.position = 0

    def next_chunk(self) -> tuple[list[Any], int]:
        first, characters = self.position, 0
        while self.position < min(first + MAX_ITEMS, len(self.items)) and characters < MAX_CHARACTERS:
            characters += _count_characters(self.items[self.position])
            self.position += 1
        return list(self.items[first : self.position]), first

    def close(self) -> None:
        """Lists have nothing to close."""


class _IteratorChunks:
    """The chunks of an iterator that may block: inputs that have arrived do not wait for those that have not.

    A thread reads the iterator, because there is no way to ask an iterator whether it would block.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.arrived: queue.Queue[tuple[str, Any]] = queue.Queue(MAX_ITEMS)
        self.is_closed = threading.Event()
        self.is_over = False
        self.position = 0
        threading.Thread(target=self._read, args=(items,), daemon=True, name="bertblocks-reader").start()

    def _read(self, items: Iterable[Any]) -> None:
        try:
            for item in items:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # re-raised on the thread that asked for the results
            self._put(("error", error))

    def _put(self, event: tuple[str, Any]) -> bool:
        while not self.is_closed.is_set():
            try:
                self.arrived.put(event, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def next_chunk(self) -> tuple[list[Any], int]:
        chunk: list[Any] = []
        characters = 0
        while not self.is_over and len(chunk) < MAX_ITEMS and characters < MAX_CHARACTERS:
            try:
                kind, value = self.arrived.get(timeout=PAUSE)
            except queue.Empty:
                if chunk or self.is_closed.is_set():
                    break
                continue
            if kind == "item":
                chunk.append(value)
                characters += _count_characters(value)
            else:
                self.is_over = True
                if kind == "error":
                    raise value
        first, self.position = self.position, self.position + len(chunk)
        return chunk, first

    def close(self) -> None:
        self.is_closed.set()
