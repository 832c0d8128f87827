"""The settings of a bulk job."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bertblocks.bulk.tasks import BulkTask, get_task
from bertblocks.core.registry import nearest
from bertblocks.text.records import ReadOptions

OutputFormat = Literal["parquet", "npy"]
ROWS_PER_SHARD, WINDOW = 50_000, 4096


@dataclass(frozen=True)
class BulkSettings:
    """A task, a model, the files to read and the folder to write.

    `inputs` and `output` are paths or fsspec addresses. Worker `shard[0]` of `shard[1]` writes every `shard[1]`-th
    output shard. `keys` are the input's columns to keep, by default all but the texts. `options` are those of the
    `Predictor`'s method. Texts are sorted by length within a `window` of rows.
    """

    task: str
    model: str
    inputs: Sequence[str]
    output: str
    shard: tuple[int, int] = (0, 1)
    keys: Sequence[str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    read: ReadOptions = field(default_factory=ReadOptions)
    options: Mapping[str, Any] = field(default_factory=dict)
    format: OutputFormat = "parquet"
    rows_per_shard: int = ROWS_PER_SHARD
    window: int = WINDOW
    on_error: Literal["stop", "skip"] = "skip"
    device: str | None = None
    dtype: str | None = None
    int8: bool = False
    threads: int | None = None
    too_long: Literal["error", "truncate", "window"] | None = None

    def __post_init__(self) -> None:
        number, count = self.shard
        if not 0 <= number < count:
            raise ValueError(f"shard is {number}/{count}; it must be i/n with i from 0 to n - 1.")
        for name in ("rows_per_shard", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.format not in get_args(OutputFormat):
            raise ValueError(f"format is {self.format!r}; it must be parquet or npy.")
        if self.format == "npy" and self.bulk_task.method != "encode":
            raise ValueError(f"format is 'npy', which holds embeddings; use parquet for {self.task}.")

    @property
    def bulk_task(self) -> BulkTask:
        return get_task(self.task)


def check_options(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task's method, with values of the right type."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from bertblocks.tasks.predictor import Predictor

    method = getattr(Predictor, get_task(task).method)
    hints = typing.get_type_hints(method)
    parameters = inspect.signature(method).parameters.values()
    names = [entry.name for entry in parameters if entry.kind is entry.KEYWORD_ONLY and entry.name != "progress"]
    checked = {}
    for name, value in options.items():
        if name not in names:
            raise ValueError(f"{name!r} is not an option of {task}; it has {', '.join(names)}{nearest(name, names)}.")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[name], config=ConfigDict(arbitrary_types_allowed=True))
            checked[name] = adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name} is {value!r}: {error.errors()[0]['msg']}.") from error
    return checked
