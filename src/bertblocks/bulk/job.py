"""A bulk job: reads rows, computes the output shards that are missing, and continues after any interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal, Protocol

from bertblocks.bulk.folder import OutputFolder
from bertblocks.bulk.manifest import MANIFEST, check_folder, claim_folder, read_manifest
from bertblocks.bulk.plan import make_plan
from bertblocks.bulk.settings import BulkSettings
from bertblocks.bulk.worker import Row, ShardResult, Worker, shard_name
from bertblocks.core.log import logger
from bertblocks.text.inputs import count_rows, read_rows
from bertblocks.text.records import DataError

#: How many rows that cannot be used are shown.
SHOWN_PROBLEMS = 10
#: Receives what happens: `start`, `shard` and, last, `result`.
OnEvent = Callable[[dict[str, Any]], None]
#: Receives the number of rows of this worker that are done, and how many there are if that is known.
OnRows = Callable[[int, int | None], None]


class Runner(Protocol):
    """Turns numbered shards of rows into results, here or on a cluster."""

    def __call__(
        self, worker: Worker, shards: Iterator[tuple[int, Iterable[Row]]], on_rows: Callable[[int], None]
    ) -> Iterator[ShardResult]: ...


@dataclass(frozen=True)
class BulkResult:
    """The rows that this call has written and those it could not use, and whether all shards of the job are there."""

    folder: str
    rows: int
    bad_rows: int
    shards: int
    seconds: float
    is_complete: bool
    #: The rows of the input, once a worker has read all of them.
    input_rows: int | None


def run_here(
    worker: Worker, shards: Iterator[tuple[int, Iterable[Row]]], on_rows: Callable[[int], None]
) -> Iterator[ShardResult]:
    for number, rows in shards:
        yield worker.run(number, rows, on_rows)


def run_bulk(
    settings: BulkSettings,
    on_event: OnEvent = lambda event: None,
    on_rows: OnRows = lambda done, total: None,
    on: Literal["ray"] | None = None,
) -> BulkResult:
    """Applies a model to all rows of the input and writes shards of `rows_per_shard` rows to the output folder.

    Shard k holds rows k * N to (k + 1) * N of the input, in order. A shard appears once it is complete, and does not
    depend on when or where it was computed. So the same call continues a job that was killed, and several workers share
    one. Rows that cannot be used are named in `bad-rows-*.jsonl`.
    """
    started = time.perf_counter()
    plan = make_plan(settings)
    for note in plan.notes:
        logger.info(note)
    folder = OutputFolder(settings.output)
    worker = Worker(plan)
    if check_folder(folder, plan.manifest) is None:  # before a lock leaves its file in a foreign folder
        worker.check_model()  # before a job that cannot run claims the folder
    with folder.claimed(*settings.shard):
        with folder.locked():
            manifest = claim_folder(folder, plan.manifest)
        if manifest["batch_tokens"] != plan.manifest["batch_tokens"]:
            worker = Worker(replace(plan, manifest=manifest))
        job = _Job(worker, manifest["rows"], on_event, on_rows)
        if job.is_done:
            logger.info(f"{folder.name}: all shards of this worker are there already")
        else:
            job.run(_choose_runner(on))
        result = job.result(time.perf_counter() - started)
    on_event({"event": "result", **vars(result)})
    return result


def _choose_runner(on: Literal["ray"] | None) -> Runner:
    if on is None:
        return run_here
    from bertblocks.bulk.ray import run_on_ray

    return run_on_ray


@dataclass
class _Job:
    """The work of one worker."""

    worker: Worker
    input_rows: int | None
    on_event: OnEvent
    on_rows: OnRows
    rows: int = 0
    bad_rows: int = 0
    shards: int = 0
    done: set[int] = field(default_factory=set)
    _seen: int = 0

    def __post_init__(self) -> None:
        self.plan, self.folder = self.worker.plan, self.worker.folder
        self._find_done()

    def _find_done(self) -> None:
        ending = self.plan.settings.format
        names = self.folder.list_names()
        self.done = {number for name in names if (number := _parse_name(name, ending)) is not None}

    def is_own(self, number: int) -> bool:
        worker, count = self.plan.settings.shard
        return number % count == worker

    def missing(self, rows: int) -> list[int]:
        """The shards that are not there, of an input with this many rows."""
        count = -(-rows // self.plan.settings.rows_per_shard)
        return [number for number in range(count) if number not in self.done]

    @property
    def is_done(self) -> bool:
        return self.input_rows is not None and not any(map(self.is_own, self.missing(self.input_rows)))

    def run(self, runner: Runner) -> None:
        settings, plan = self.plan.settings, self.plan
        size = settings.rows_per_shard
        roles, columns = settings.bulk_task.roles, settings.columns

        def is_wanted(row: int) -> bool:
            return self.is_own(row // size) and row // size not in self.done

        total = count_rows(plan.sources, settings.read) if self.input_rows is None else self.input_rows
        expected = None if total is None else self._count_rows(total)
        self.on_event(
            {
                "event": "start",
                "task": settings.task,
                "model": settings.model,
                "folder": self.folder.name,
                "worker": "/".join(map(str, settings.shard)),
                "rows": expected,
                "done_shards": len(self.done),
            }
        )
        self.worker.calibrate(read_rows(plan.sources, roles, columns, settings.read))
        finished = 0

        def count(rows: int) -> None:
            nonlocal finished
            finished += rows
            self.on_rows(finished, expected)

        rows = read_rows(plan.sources, roles, columns, settings.read, is_wanted)
        started = time.perf_counter()
        for result in runner(self.worker, self._cut(rows), count):
            self._finish(result, time.perf_counter() - started, expected)
        if self.input_rows is None:
            self.input_rows = self._seen
            if not self._seen:
                raise DataError(f"{', '.join(plan.sources)}: the input has no rows.")
            with self.folder.locked():
                manifest = read_manifest(self.folder) or {}
                self.folder.write_json(MANIFEST, {**manifest, "rows": self._seen})

    def _count_rows(self, total: int) -> int:
        size = self.plan.settings.rows_per_shard
        return sum(min(size, total - number * size) for number in self.missing(total) if self.is_own(number))

    def _cut(self, rows: Iterator[Row | None]) -> Iterator[tuple[int, Iterable[Row]]]:
        """The missing shards of this worker. The rows of one must be used up before the next is asked for."""
        size = self.plan.settings.rows_per_shard
        last = None if self.input_rows is None else max(filter(self.is_own, self.missing(self.input_rows)))
        number = 0

        def seen(part: Iterable[Row | None]) -> Iterator[Row]:
            for row in part:
                self._seen += 1
                if row is not None:
                    yield row

        while last is None or number <= last:
            part = islice(rows, size)
            first = list(islice(part, 1))
            if not first:
                return
            kept = seen(chain(first, part))
            if first[0] is not None:
                yield number, kept
            for _ in kept:
                pass
            number += 1

    def _finish(self, result: ShardResult, seconds: float, expected: int | None) -> None:
        self.done.add(result.number)
        self.shards += 1
        self.rows += result.rows
        self.bad_rows += len(result.bad)
        handled = self.rows + self.bad_rows
        rate = handled / max(seconds, 1e-9)
        event = {
            "event": "shard",
            "shard": result.number,
            "rows": result.rows,
            "bad_rows": len(result.bad),
            "tokens": result.tokens,
            "seconds": round(result.seconds, 3),
            "rows_per_second": round(rate, 1),
            "seconds_left": None if expected is None else round(max(expected - handled, 0) / max(rate, 1e-9), 1),
        }
        shown = max(0, SHOWN_PROBLEMS - self.bad_rows + len(result.bad))
        event["problems"] = [f"{location}: {reason}" for _, location, reason in result.bad[:shown]]
        self.on_event(event)

    def result(self, seconds: float) -> BulkResult:
        self._find_done()  # other workers may have finished theirs meanwhile
        is_complete = self.input_rows is not None and not self.missing(self.input_rows)
        return BulkResult(
            self.folder.name, self.rows, self.bad_rows, self.shards, seconds, is_complete, self.input_rows
        )


def _parse_name(name: str, ending: str) -> int | None:
    number = name.removeprefix("part-").removesuffix(f".{ending}")
    return int(number) if number.isdigit() and name == shard_name(int(number), ending) else None
