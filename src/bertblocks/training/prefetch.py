"""Prepares the next batches in a thread, and copies them to a GPU, while the current step runs."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.training.distributed import World
from bertblocks.training.task import TrainingTask

#: The number of steps to prepare ahead.
PREFETCH_STEPS = 2


@dataclass(frozen=True)
class PreparedStep:
    """This process's micro-batches of a step, and the data position of the next step."""

    step: int
    batches: list[FlatBatch]
    next_position: dict[str, Any]
    #: When the copies to a GPU are complete.
    arrival: torch.cuda.Event | None = None


@contextlib.contextmanager
def prefetch(task: TrainingTask, world: World, step: int, position: dict[str, Any]) -> Iterator[Iterator[PreparedStep]]:
    """Yields steps from `step` on, prepared ahead. An error in the thread is raised when its step is due."""
    steps = _prepare(task, world, step, position)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        waiting = deque(pool.submit(next, steps, None) for _ in range(PREFETCH_STEPS))

        def read() -> Iterator[PreparedStep]:
            while (prepared := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, steps, None))
                if prepared.arrival is not None:
                    _wait_for_copies(prepared, prepared.arrival)
                yield prepared

        try:
            yield read()
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare(task: TrainingTask, world: World, step: int, position: dict[str, Any]) -> Iterator[PreparedStep]:
    for number in range(step, task.total_steps):
        items, position = task.next_items(number, position)
        parts = split_micro_batches(items, world, task.micro_batch_size(number))
        batches = [task.collate(number, part) for part in parts]
        if world.device.type == "cuda":
            yield _copy_to_gpu(number, batches, position, world.device)
        else:
            yield PreparedStep(number, batches, position)


def _copy_to_gpu(step: int, batches: list[FlatBatch], position: dict[str, Any], device: torch.device) -> PreparedStep:
    stream = _copy_stream(device)
    with torch.cuda.stream(stream):
        copies = [batch.pin().to(device) for batch in batches]
        arrival = torch.cuda.Event()
        arrival.record(stream)
    return PreparedStep(step, copies, position, arrival)


def _wait_for_copies(prepared: PreparedStep, arrival: torch.cuda.Event) -> None:
    """Makes the computation wait for the copies, not the host, and keeps their memory until it has run."""
    stream = torch.cuda.current_stream()
    stream.wait_event(arrival)
    for batch in prepared.batches:
        for value in vars(batch).values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def split_micro_batches(items: Sequence[Any], world: World, size: int | None) -> list[Sequence[Any]]:
    """This process's items in micro-batches of about `size` items. Every process has the same number of them.

    Example:
        >>> import torch
        >>> split_micro_batches("abcdefg", World(1, 2, torch.device("cpu")), 2)
        ['de', 'fg']
    """
    if len(items) < world.size:
        raise ValueError(f"A batch has {len(items)} items for {world.size} processes; each needs at least one item.")
    own = world.local_range(len(items))
    local_items = items[own.start : own.stop]
    largest = -(-len(items) // world.size)
    count = 1 if size is None else min(-(-largest // size), len(items) // world.size)
    bounds = [part * len(local_items) // count for part in range(count + 1)]
    return [local_items[start:end] for start, end in itertools.pairwise(bounds)]
