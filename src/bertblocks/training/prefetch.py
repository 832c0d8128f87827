"""The next batches, made in a thread while the current step runs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bertblocks.training.distributed import World
from bertblocks.training.task import Task, TaskBatch

#: Steps that are prepared ahead.
AHEAD = 2


@dataclass(frozen=True)
class Prepared:
    """This process's part of a step, in micro-batches, and where the next step begins."""

    step: int
    batches: list[TaskBatch]
    next_position: dict[str, Any]


@contextlib.contextmanager
def prefetch(task: Task, world: World, step: int, position: dict[str, Any]) -> Iterator[Iterator[Prepared]]:
    """Steps from `step` on, prepared ahead; an error of the thread is raised where its step is asked for."""
    steps = _prepare(task, world, step, position)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        waiting = deque(pool.submit(next, steps, None) for _ in range(AHEAD))

        def read() -> Iterator[Prepared]:
            while (prepared := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, steps, None))
                yield prepared

        try:
            yield read()
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare(task: Task, world: World, step: int, position: dict[str, Any]) -> Iterator[Prepared]:
    for number in range(step, task.total_steps):
        items, position = task.take(number, position)
        parts = split(items, world, task.micro_batch(number))
        yield Prepared(number, [task.batch(number, part) for part in parts], position)


def split(items: Sequence[Any], world: World, most: int | None) -> list[Sequence[Any]]:
    """This process's items in micro-batches of about `most`; their number is the same in every process.

    Example:
        >>> import torch
        >>> split("abcdefg", World(1, 2, torch.device("cpu")), 2)
        ['de', 'fg']
    """
    if len(items) < world.size:
        raise ValueError(f"A batch has {len(items)} items for {world.size} processes; each needs at least one.")
    mine = items[world.part(len(items)).start : world.part(len(items)).stop]
    largest = -(-len(items) // world.size)
    count = 1 if most is None else min(-(-largest // most), len(items) // world.size)
    return [mine[part * len(mine) // count : (part + 1) * len(mine) // count] for part in range(count)]
