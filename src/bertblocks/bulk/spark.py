"""A task as a transformation of Spark data frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bertblocks.bulk.apply import Apply
from bertblocks.core.requirements import require_packages


def map_frame(frame: Any, task: str, model: str, *, threads: int = 1, **options: Any) -> Any:
    """Adds the result columns of a task to a Spark data frame, by `mapInArrow`.

    Every task of Spark loads the model once and runs it with `threads` threads; set `spark.task.cpus` to the same
    number. The driver loads the model too, to know the columns. `options` are those of `Apply`. Spark has no float16,
    and no unsigned bytes: these columns become float32 and int16.
    """
    require_packages(["pyspark", "pyarrow"], "map_frame")
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructField, StructType

    options["predictor"] = {**options.get("predictor", {}), "threads": threads}
    apply = Apply(task, model, **options)
    types = {name: _widen(kind) for name, kind in apply.types().items()}
    names = {name: f"{task}_{name}" if name in frame.columns else name for name in types}
    added = [StructField(names[name], from_arrow_type(kind), nullable=True) for name, kind in types.items()]
    kinds = [types[name] for name in types]

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            table = apply(pa.Table.from_batches([batch]))
            own = table.num_columns - len(kinds)
            for index, kind in enumerate(kinds, start=own):
                table = table.set_column(index, table.column_names[index], table.column(index).cast(kind))
            yield from table.combine_chunks().to_batches()

    return frame.mapInArrow(run, StructType([*frame.schema.fields, *added]))


def _widen(kind: Any) -> Any:
    """The nearest type that Spark has."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_widen(kind.value_type))
    return {pa.float16(): pa.float32(), pa.uint8(): pa.int16()}.get(kind, kind)
