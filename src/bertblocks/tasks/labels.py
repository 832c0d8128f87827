"""Reads labels as people write them: names, numbers, or several per text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bertblocks.core.registry import nearest
from bertblocks.text.headers import is_number
from bertblocks.text.records import DataError
from bertblocks.text.tables import Records

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class Labels:
    """The labels that a classifier predicts; `names` is empty for regression."""

    problem: Problem
    names: list[str]
    #: Separates the labels of one cell, if a text may have several.
    separator: str | None = None

    @property
    def size(self) -> int:
        return max(len(self.names), 1)

    def encode(self, value: Any, place: str) -> int | float | list[float]:
        """Returns the target of one cell: a class index, a number, or a 0 or 1 for each name."""
        if self.problem == "regression":
            if not is_number(value):
                raise DataError(f"{place}: the label is {value!r}; it must be a number.")
            return float(value)
        if self.problem == "single_label_classification":
            return self._index(read_label(value, place), place)
        named = {self._index(name, place) for name in split_labels(value, self.separator, place)}
        return [float(index in named) for index in range(len(self.names))]

    def _index(self, name: str, place: str) -> int:
        if name not in self.names:
            name = without_zeros(name)
        if name not in self.names:
            raise DataError(
                f"{place}: the label {name!r} is not one of the model's {len(self.names)}{nearest(name, self.names)}."
            )
        return self.names.index(name)


def read_label(value: Any, place: str) -> str:
    """Returns a label as text and rejects None, empty cells and NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    text = "" if value is None or is_nan else str(value).strip()
    if not text or text.lower() == "nan":
        raise DataError(f"{place}: the label is {value!r}; every row needs a label.")
    return text


def without_zeros(name: str) -> str:
    """An integer that is written as a float, without its zeros; any other label unchanged.

    Example:
        >>> without_zeros("1.0"), without_zeros("1.5"), without_zeros("v1.0")
        ('1', '1.5', 'v1.0')
    """
    return name.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", name) else name


def split_labels(value: Any, separator: str | None, place: str) -> list[str]:
    """Returns the labels of one text; an empty list or cell means no labels."""
    parts = value if isinstance(value, (list, tuple)) else str("" if value is None else value).split(separator)
    names = [read_label(part, place) for part in parts if str(part).strip()]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{place}: the label {name!r} appears twice in {value!r}; give a list of names, not of 0 and 1."
            )
    return names


def find_labels(records: Records, column: str, problem: Problem | None = None, separator: str | None = None) -> Labels:
    """Finds the labels of a column.

    Lists, or cells with a `separator`, hold several labels; numbers with a fraction are scores; everything else is one
    class per text. Integers written as floats, as pandas does for a column with gaps, are classes: `1.0` becomes `1`.
    Names are sorted (numbers by value) unless the data defines their order.

    Example:
        >>> records = Records("a.csv", ["label"], [{"label": "10"}, {"label": "9"}], [1, 2])
        >>> find_labels(records, "label").names
        ['9', '10']
    """
    values = records.column(column)
    if problem is None:
        problem = _find_problem(values, separator)
    if problem == "regression":
        return Labels(problem, [])
    if problem == "multi_label_classification":
        cells = (split_labels(value, separator, records.place(i)) for i, value in enumerate(values))
        names = {name for cell in cells for name in cell}
    else:
        names = {without_zeros(read_label(value, records.place(index))) for index, value in enumerate(values)}
    if len(names) < 2:
        has = f"the only label is {next(iter(names))!r}" if names else "there is no label"
        raise DataError(f"{records.source}: in column {column!r}, {has}; a classifier needs at least two.")
    if names <= set(records.label_names.get(column, [])):
        return Labels(problem, records.label_names[column], separator)
    by_number = all(is_number(name) for name in names)
    return Labels(problem, sorted(names, key=(lambda name: float(name)) if by_number else str), separator)


def _find_problem(values: Sequence[Any], separator: str | None) -> Problem:
    if separator is not None or any(isinstance(value, (list, tuple)) for value in values):
        return "multi_label_classification"
    written = [str(value) for value in values]
    if all(is_number(value) for value in written) and not all(float(value).is_integer() for value in written):
        return "regression"
    return "single_label_classification"


_NEGATIVE = re.compile(r"0|-1|no|false|neg|negative|(not|non|no)[ _-].*", re.IGNORECASE)


def find_positive(names: Sequence[str], wanted: str | None = None) -> int:
    """The positive one of two labels, whose F1 is reported: as wanted, else the second unless it negates the first.

    Example:
        >>> find_positive(["no", "yes"]), find_positive(["equivalent", "not_equivalent"])
        (1, 0)
    """
    if wanted is not None:
        if wanted not in names:
            raise DataError(f"positive is {wanted!r}; it must be one of the labels {', '.join(names)}.")
        return list(names).index(wanted)
    return 0 if _NEGATIVE.fullmatch(names[1]) and not _NEGATIVE.fullmatch(names[0]) else 1


def labels_of_config(names: Mapping[int, str], problem: Problem | None, separator: str | None = None) -> Labels:
    """Returns the labels in the config of a fine-tuned model."""
    if problem is None:
        problem = "regression" if len(names) == 1 else "single_label_classification"
    return Labels(problem, [] if problem == "regression" else [names[index] for index in sorted(names)], separator)
