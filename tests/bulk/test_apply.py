"""`Apply` adds the same columns to batches that jobs write to files."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from bertblocks import Predictor
from bertblocks.bulk.apply import Apply
from tests.bulk.helpers import make_rows

ROWS = make_rows(12)
FLOAT32 = {"dtype": torch.float32, "threads": 1}


def test_tables_and_arrays_get_the_same_columns(models: dict[str, str]) -> None:
    texts = [row["text"] for row in ROWS]
    expected = Predictor(models["embed"], **FLOAT32).encode(texts)
    apply = pickle.loads(pickle.dumps(Apply("embed", models["embed"], columns={"text": "body"}, predictor=FLOAT32)))
    table = apply(pa.table({"n": list(range(12)), "body": texts}))
    assert table.column_names == ["n", "body", "embedding"]
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 32)
    np.testing.assert_array_equal(table.column("embedding").to_pylist(), expected)
    arrays = apply({"n": np.arange(12), "body": np.array(texts, object)})
    assert list(arrays) == ["n", "body", "embedding"]
    np.testing.assert_array_equal(arrays["embedding"], expected)


def test_a_result_does_not_replace_a_column(models: dict[str, str]) -> None:
    table = Apply("classify", models["classify"], predictor=FLOAT32)(pa.table({"text": ["plain"], "labels": [1]}))
    assert table.column("labels").to_pylist() == [1]
    assert table.column("classify_labels").to_pylist()[0]


def test_bad_rows_end_the_work_or_have_no_result(models: dict[str, str]) -> None:
    batch = pa.table({"text": ["plain [MASK]", "plain", "words [MASK]"]})
    with pytest.raises(ValueError, match=r"row 1 of a batch: Text 1 does not contain \[MASK\]"):
        Apply("fill-mask", models["fill-mask"], predictor=FLOAT32)(batch)
    apply = Apply("fill-mask", models["fill-mask"], predictor=FLOAT32, on_error="skip", options={"top_k": 1})
    found = apply(batch)
    assert [value is None for value in found.column("masks").to_pylist()] == [False, True, False]
    assert [value is None for value in found.column("error").to_pylist()] == [True, False, True]
    vectors = Apply("embed", models["embed"], predictor=FLOAT32, on_error="skip")(pa.table({"text": ["plain", None]}))
    assert [value is None for value in vectors.column("embedding").to_pylist()] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "embd"}, "task is 'embd'.*embed"),
        ({"columns": {"txt": "a"}}, "'txt' is not a role of embed"),
        ({"options": {"dimension": 3}}, "'dimension' is not an option of embed.*dimensions"),
        ({"options": {"dimensions": "many"}}, "dimensions is 'many'"),
        ({"options": {"precision": "int8"}}, "needs ranges"),
    ],
)
def test_wrong_arguments_are_named(models: dict[str, str], arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Apply(arguments.pop("task", "embed"), models["embed"], **arguments)


def test_a_batch_without_a_text_is_an_error(models: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="The columns are a, b; embed needs text"):
        Apply("embed", models["embed"])(pa.table({"a": [1], "b": [2]}))
