"""`Apply`: a task as a function of batches of rows, for Ray, Spark and any other engine that maps batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bertblocks.bulk.settings import WINDOW, check_options
from bertblocks.bulk.tasks import get_task
from bertblocks.core.registry import nearest
from bertblocks.text.headers import KNOWN_NAMES
from bertblocks.text.records import DataError, find_key
from bertblocks.text.table_files import to_array

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

#: A batch of rows: columns of numpy arrays, or a pyarrow.Table.
Batch = TypeVar("Batch", bound=Any)


class Apply:
    """Adds the result columns of a task to batches of rows.

    `columns` names the column of a role (text, text_pair, query, document, question, context, words) where it does not
    have a usual name. `options` are those of the `Predictor`'s method, and `predictor` those of the `Predictor` itself.
    int8 embeddings need `ranges`. A row that cannot be used is an error, or with `on_error="skip"` has no result and a
    reason in the column `error`. Each process loads the model at its first batch; a pickled `Apply` does not hold it.
    """

    def __init__(
        self,
        task: str,
        model: str,
        *,
        columns: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        predictor: Mapping[str, Any] | None = None,
        on_error: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.task, self.model = task, str(model)
        self.columns, self.settings, self.on_error = dict(columns or {}), dict(predictor or {}), on_error
        roles = get_task(task).roles.names
        for role in self.columns:
            if role not in roles:
                raise ValueError(f"{role!r} is not a role of {task}; it has {', '.join(roles)}{nearest(role, roles)}.")
        self.options = check_options(task, options or {})
        if self.options.get("precision") == "int8" and self.options.get("ranges") is None:
            raise ValueError("precision is 'int8', which needs ranges, such as ranges.npy of a bulk job.")

    @property
    def predictor(self) -> Predictor:
        return _open(self.model, tuple(sorted(self.settings.items())))

    def types(self) -> dict[str, Any]:
        """The Arrow types of the result columns."""
        import pyarrow as pa

        found = get_task(self.task).types(self.predictor, self.options)
        return found if self.on_error == "stop" else {**found, "error": pa.string()}

    def __call__(self, batch: Batch) -> Batch:
        task = get_task(self.task)
        is_table = not isinstance(batch, Mapping)
        names = batch.column_names if is_table else list(batch)
        used = self._choose(names)
        cells = [batch.column(name).to_pylist() if is_table else batch[name].tolist() for name in used]
        inputs = [task.make_input(row if len(used) > 1 else row[0]) for row in zip(*cells, strict=True)]
        results = self.predictor.stream(task.method, inputs, return_exceptions=True, window=WINDOW, **self.options)
        records = []
        for number, result in enumerate(results):
            if not isinstance(result, Exception):
                records.append(task.to_columns(result))
            elif self.on_error == "skip":
                records.append({"error": str(result)})
            else:
                raise DataError(f"row {number} of a batch: {result}")
        return self._add(batch, names, records, is_table)

    def _add(self, batch: Any, names: list[str], records: list[dict[str, Any]], is_table: bool) -> Any:
        columns = {}
        for name, kind in self.types().items():
            values = [record.get(name) for record in records]
            own = f"{self.task}_{name}" if name in names else name
            columns[own] = to_array(values, kind) if is_table else _to_numpy(values)
        if not is_table:
            return {**batch, **columns}
        for name, array in columns.items():
            batch = batch.append_column(name, array)
        return batch

    def _choose(self, names: list[str]) -> list[str]:
        """The columns of the first set of roles that a batch has, and of the optional roles."""
        roles = get_task(self.task).roles
        found = {role: self._find(role, names) for role in roles.names}
        group = next((group for group in roles.sets if all(found[role] for role in group)), None)
        if group is None:
            needed = " or ".join(" and ".join(self.columns.get(role, role) for role in group) for group in roles.sets)
            raise DataError(
                f"The columns are {', '.join(names)}; {self.task} needs {needed}: say which with "
                f"columns={{{roles.names[0]!r}: NAME}}."
            )
        return [name for role in (*group, *roles.optional) if (name := found[role]) is not None]

    def _find(self, role: str, names: list[str]) -> str | None:
        if role in self.columns:
            return find_key(self.columns[role], names)
        return next((key for name in KNOWN_NAMES[role] if (key := find_key(name, names)) is not None), None)


@lru_cache(maxsize=1)  # engines use a process for several tasks, each with its own copy of `Apply`
def _open(model: str, settings: tuple[tuple[str, Any], ...]) -> Predictor:
    from bertblocks.tasks.predictor import Predictor

    return Predictor(model, **dict(settings))


def _to_numpy(values: list[Any]) -> Any:
    """Vectors as one array, other values as objects."""
    import numpy as np

    if values and all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values)
    found = np.empty(len(values), object)
    found[:] = values
    return found
