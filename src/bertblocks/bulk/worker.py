"""Computes output shards: rows in, whole files out."""

from __future__ import annotations

import io
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from bertblocks.bulk.folder import OutputFolder
from bertblocks.bulk.plan import Plan
from bertblocks.core.console import to_json_line
from bertblocks.text.inputs import InputRecord
from bertblocks.text.records import BadRecord, DataError
from bertblocks.text.table_files import NpyRows, ParquetRows, to_array

if TYPE_CHECKING:
    import numpy as np

    from bertblocks.tasks.predictor import Predictor

RANGES = "ranges.npy"
#: Rows whose vectors decide the ranges of int8.
CALIBRATION_ROWS = 4096

Row = InputRecord | BadRecord


@dataclass(frozen=True)
class ShardResult:
    """The rows that a shard holds, and those that could not be used: their number in the shard, place and reason."""

    number: int
    rows: int
    bad: list[tuple[int, str, str]]
    tokens: int
    seconds: float


def shard_name(number: int, ending: str) -> str:
    """The name of the file that completes a shard; it is written last."""
    return f"part-{number:05d}.{ending}"


class Worker:
    """Runs the model of a plan over shards. It loads the model at its first shard, in the process that runs it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = OutputFolder(plan.settings.output)
        self._opened: Predictor | None = None

    @property
    def predictor(self) -> Predictor:
        if self._opened is None:
            self._opened = open_predictor(self.plan)
        return self._opened

    def check_model(self) -> None:
        """Raises an error if the model lacks what the task needs, such as its head."""
        self.predictor.pipeline(self.plan.settings.bulk_task.method, **self._model_options)

    def run(self, number: int, rows: Iterable[Row], on_rows: Callable[[int], None] = lambda count: None) -> ShardResult:
        """Writes the files of a shard. Batches depend on its rows alone, so a shard always has the same bytes."""
        started = time.perf_counter()
        options = self._options()
        task = self.plan.settings.bulk_task
        types = task.types(self.predictor, options)
        bad: list[tuple[int, str, str]] = []
        pending: deque[tuple[int, InputRecord]] = deque()
        with ExitStack() as files:
            shard = _ShardFiles(self, number, types, files)
            records: list[tuple[int, dict[str, Any]]] = []
            results = self.predictor.stream(
                task.method,
                self._inputs(rows, pending, bad),
                return_exceptions=True,
                window=self.plan.settings.window,
                **options,
            )
            for result in results:
                index, row = pending.popleft()
                if isinstance(result, Exception):
                    self._reject(bad, index, row.location, str(result))
                else:
                    records.append((index, {"row": row, **task.to_columns(result)}))
                if len(records) == self.plan.settings.window:
                    self._write(shard, records, bad)
                    on_rows(len(records))
                    records = []
            self._write(shard, records, bad)
            on_rows(len(records))
            self._write_bad(number, bad)
        return ShardResult(number, shard.count, bad, self.predictor.stats.tokens, time.perf_counter() - started)

    def _inputs(
        self, rows: Iterable[Row], pending: deque[tuple[int, InputRecord]], bad: list[tuple[int, str, str]]
    ) -> Iterator[Any]:
        for index, row in enumerate(rows):
            if isinstance(row, BadRecord):
                self._reject(bad, index, str(row.location), row.reason)
                continue
            try:
                item = self.plan.settings.bulk_task.make_input(row.value)
            except ValueError as error:
                self._reject(bad, index, row.location, str(error))
                continue
            pending.append((index, row))
            yield item

    def _reject(self, bad: list[tuple[int, str, str]], index: int, location: str, reason: str) -> None:
        reason = reason.rstrip(".")
        if self.plan.settings.on_error == "stop":
            raise DataError(f"{location}: {reason}.")
        bad.append((index, location, reason))

    def _write(
        self, shard: _ShardFiles, records: list[tuple[int, dict[str, Any]]], bad: list[tuple[int, str, str]]
    ) -> None:
        """Writes records; a row whose kept columns do not have the types of the first rows is bad."""
        if not records:
            return
        try:
            shard.write([record for _, record in records])
        except _misfits():
            good = []
            for index, record in records:
                reason = shard.find_misfit(record)
                if reason is None:
                    good.append(record)
                else:
                    self._reject(bad, index, record["row"].location, reason)
            if good:
                shard.write(good)

    def _write_bad(self, number: int, bad: list[tuple[int, str, str]]) -> None:
        bad.sort()
        if bad:
            first = number * self.plan.settings.rows_per_shard
            with self.folder.write(f"bad-rows-{number:05d}.jsonl") as file:
                for index, location, reason in bad:
                    entry = {"row": first + index, "location": location, "reason": reason}
                    file.write(to_json_line(entry).encode() + b"\n")

    # ------------------------------------------------------------------ int8 vectors

    @property
    def _model_options(self) -> dict[str, Any]:
        """The options of the model, without those that say how vectors are stored."""
        options = self.plan.settings.options
        return {name: value for name, value in options.items() if name not in ("precision", "ranges")}

    def _options(self) -> dict[str, Any]:
        options = dict(self.plan.settings.options)
        if options.get("precision") == "int8" and options.get("ranges") is None:
            options["ranges"] = self._read_ranges()
        return options

    def _read_ranges(self) -> np.ndarray:
        import numpy as np

        data = self.folder.read(RANGES)
        if data is None:
            raise DataError(f"{self.folder.name} has no {RANGES}; start the job again.")
        return np.load(io.BytesIO(data))

    def calibrate(self, rows: Iterable[Row | None]) -> None:
        """Writes the ranges of int8, those of the first rows, unless they are there."""
        import numpy as np

        from bertblocks.tasks.embed.vectors import fit_ranges

        options = self.plan.settings.options
        if options.get("precision") != "int8" or options.get("ranges") is not None or self.folder.read(RANGES):
            return
        texts = [row.value for row in islice(rows, CALIBRATION_ROWS) if isinstance(row, InputRecord)]
        found = self.predictor.stream("encode", texts, return_exceptions=True, **self._model_options)
        vectors = [vector for vector in found if not isinstance(vector, Exception)]
        with self.folder.write(RANGES) as file:
            np.save(file, fit_ranges(np.stack(vectors)) if vectors else fit_ranges(np.zeros((0, 1), np.float32)))


def open_predictor(plan: Plan) -> Predictor:
    import torch

    from bertblocks.tasks.predictor import Predictor

    settings = plan.settings
    return Predictor(
        settings.model,
        device=settings.device,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        int8=settings.int8,
        threads=settings.threads,
        token_budget=plan.manifest["batch_tokens"],
        too_long=settings.too_long,
    )


def _misfits() -> tuple[type[Exception], ...]:
    """What Arrow raises for values that do not have the type of their column."""
    import pyarrow as pa

    return (pa.ArrowException, TypeError, ValueError, OverflowError)


class _ShardFiles:
    """The open files of a shard. The one that completes it is opened first, so that it is closed and renamed last."""

    def __init__(self, worker: Worker, number: int, types: dict[str, Any], files: ExitStack) -> None:
        import pyarrow as pa

        self.keys = worker.plan.keys
        # as in the output of the predict commands
        self.names = {name: f"input_{name}" if name in ("location", *types) else name for name in self.keys}
        kept = {"location": pa.string(), **{self.names[name]: kind for name, kind in self.keys.items()}}
        folder = worker.folder
        self._vectors: NpyRows | None = None
        if worker.plan.settings.format == "npy":
            kind = types["embedding"]
            dtype = kind.value_type.to_pandas_dtype()
            vectors = files.enter_context(folder.write(shard_name(number, "npy")))
            self._vectors = files.enter_context(NpyRows(vectors, dtype, kind.list_size))
            types, ending = {}, "keys.parquet"
        else:
            ending = "parquet"
        table = files.enter_context(folder.write(shard_name(number, ending)))
        self._table = files.enter_context(ParquetRows(table, {**kept, **types}))

    @property
    def count(self) -> int:
        return self._table.count

    def write(self, records: list[dict[str, Any]]) -> None:
        self._table.write([self._flatten(record) for record in records])
        if self._vectors is not None:
            self._vectors.write(record["embedding"] for record in records)

    def _flatten(self, record: dict[str, Any]) -> dict[str, Any]:
        row: InputRecord = record["row"]
        kept = {name: row.columns.get(source) for source, name in self.names.items()}
        return {"location": row.location, **kept, **{name: record[name] for name in record if name != "row"}}

    def find_misfit(self, record: dict[str, Any]) -> str | None:
        for name, kind in self.keys.items():
            value = record["row"].columns.get(name)
            try:
                to_array([value], kind)
            except _misfits():
                shown = json.dumps(value, default=str)[:100]
                return f"{name} is {shown}, but the first rows of the input have {kind}"
        return None
