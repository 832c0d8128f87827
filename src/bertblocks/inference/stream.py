"""From inputs to results, in order: read ahead, tokenised beside the model, run in flat batches of equal size."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from bertblocks.inference.job import Job, Work
from bertblocks.inference.splitting import Segment

Result = TypeVar("Result")

#: How far inputs are read ahead of their results. Memory is bounded by this, however long the stream is.
MAX_ITEMS, MAX_CHARACTERS = 1024, 2_000_000
#: A source that is silent for so many seconds gets results for what it gave.
PAUSE = 0.05


def run_stream(
    items: Iterable[Any],
    job: Job[Result],
    run_pieces: Callable[[list[Segment]], Sequence[Any]],
    token_budget: int,
    on_batch: Callable[[int], None],
    on_items: Callable[[int], None],
) -> Generator[Result, None, None]:
    """Results in the order of the inputs. `on_batch` is told tokens as they are done, `on_items` inputs."""
    source = _Slices(items) if isinstance(items, (list, tuple)) else _Ahead(items)

    def prepare() -> list[Work] | None:
        chunk, first = source.next_chunk()
        return job.prepare(chunk, first) if chunk else None

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bertblocks-tokenizer")
    try:
        prepared = pool.submit(prepare)
        while (works := prepared.result()) is not None:
            prepared = pool.submit(prepare)
            for batch in _pack(works, token_budget):
                pieces = [work.pieces[number] for work, number in batch]
                for (work, number), output in zip(batch, run_pieces(pieces), strict=True):
                    work.outputs[number] = output
                on_batch(sum(len(piece.framed.ids) for piece in pieces))
            on_items(len(works))
            for work in works:
                yield job.read(work)
    finally:
        source.close()
        pool.shutdown(cancel_futures=True)


def _pack(works: list[Work], token_budget: int) -> Iterator[list[tuple[Work, int]]]:
    """Pieces by length, the longest first, in batches of at most the budget; one that is larger goes alone."""
    pieces = [(work, number) for work in works for number in range(len(work.pieces))]
    pieces.sort(key=lambda one: len(one[0].pieces[one[1]].framed.ids), reverse=True)
    batch: list[tuple[Work, int]] = []
    tokens = 0
    for work, number in pieces:
        size = len(work.pieces[number].framed.ids)
        if batch and tokens + size > token_budget:
            yield batch
            batch, tokens = [], 0
        batch.append((work, number))
        tokens += size
    if batch:
        yield batch


def _characters(item: Any) -> int:
    return len(item) if isinstance(item, str) else sum(map(_characters, item)) if isinstance(item, (list, tuple)) else 0


class _Slices:
    """The chunks of a list."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.place = 0

    def next_chunk(self) -> tuple[list[Any], int]:
        first, characters = self.place, 0
        while self.place < min(first + MAX_ITEMS, len(self.items)) and characters < MAX_CHARACTERS:
            characters += _characters(self.items[self.place])
            self.place += 1
        return list(self.items[first : self.place]), first

    def close(self) -> None:
        """There is nothing to stop."""


class _Ahead:
    """The chunks of an iterator that may wait for its items: what has arrived is not held back for what has not.

    A thread of its own reads, because an iterator cannot be asked whether it would wait.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.arrived: queue.Queue[tuple[str, Any]] = queue.Queue(MAX_ITEMS)
        self.is_closed = threading.Event()
        self.is_over = False
        self.place = 0
        threading.Thread(target=self._read, args=(items,), daemon=True, name="bertblocks-reader").start()

    def _read(self, items: Iterable[Any]) -> None:
        try:
            for item in items:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # whatever it is, it is raised again by the thread that asked
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
                characters += _characters(value)
            else:
                self.is_over = True
                if kind == "error":
                    raise value
        first, self.place = self.place, self.place + len(chunk)
        return chunk, first

    def close(self) -> None:
        self.is_closed.set()
