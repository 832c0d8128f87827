"""Results in files: rows keep their columns, bad rows can be skipped, and interrupted runs resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertblocks import Predictor
from bertblocks.cli.result_file import ResultFile
from bertblocks.text.tables import read_records
from tests.cli.test_predict import folders, run, run_json  # noqa: F401

ROWS = [
    {"id": "a7", "text": "plain words", "score": 3},
    {"id": "b2", "text": "two here", "score": None},
    {"id": "c9", "text": "leading words are here", "score": 5},
]


@pytest.fixture
def table(tmp_path: Path) -> Any:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read_jsonl(path: Any) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_output_rows_keep_their_columns_and_location(folders: Any, table: Any, tmp_path: Path) -> None:  # noqa: F811
    output = tmp_path / "out.jsonl"
    printed = run_json("classify", folders["classify"], "--file", table)
    result = run("classify", folders["classify"], "--file", table, "--output", output)
    assert result.stdout == ""
    assert f"3 results are in {output}" in result.stderr
    found = read_jsonl(output)
    assert found == printed
    assert [row["id"] for row in found] == ["a7", "b2", "c9"]
    assert [row["score"] for row in found] == [3, None, 5]
    assert [row["location"] for row in found] == [f"{table} line {number}" for number in (1, 2, 3)]
    expected = Predictor(folders["classify"]).classify([row["text"] for row in ROWS])
    assert [row["labels"] for row in found] == [result.labels for result in expected]
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_column_with_the_name_of_a_result_is_kept(folders: Any, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "plain", "labels": ["mine"], "location": "here"}\n')
    found = run_json("classify", folders["classify"], "--file", path)[0]
    assert found["input_labels"] == ["mine"]
    assert found["input_location"] == "here"
    assert found["labels"] != ["mine"]


def test_every_output_format_contains_the_same_rows(folders: Any, table: Any, tmp_path: Path) -> None:  # noqa: F811
    parquet = pytest.importorskip("pyarrow.parquet")
    arguments = ("embed", folders["embed"], "--file", table, "--dtype", "float32", "--device", "cpu", "--output")
    for ending in ("jsonl", "csv", "parquet", "npy"):
        run(*arguments, tmp_path / f"out.{ending}")
    expected = Predictor(folders["embed"], dtype=torch.float32).encode([row["text"] for row in ROWS])
    vectors = np.load(tmp_path / "out.npy")
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected)
    np.testing.assert_array_equal(
        np.float32([row["embedding"] for row in read_jsonl(tmp_path / "out.jsonl")]), expected
    )
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    np.testing.assert_array_equal(np.float32([row["embedding"] for row in rows]), expected)
    assert [row["score"] for row in rows] == [3, None, 5]
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    assert [row["id"] for row in cells] == ["a7", "b2", "c9"]
    np.testing.assert_array_equal(np.float32([json.loads(row["embedding"]) for row in cells]), expected)


def test_bad_rows_stop_the_run_after_earlier_results_or_are_skipped(folders: Any, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "plain"}\n{"text": null}\n{"text": "words"}\n{oops\n{"text": "here"}\n')
    result = run("embed", folders["embed"], "--file", path, "--json", expect=1)
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["plain"]
    assert f"{path} line 2" in result.stderr
    result = run("embed", folders["embed"], "--file", path, "--json", "--on-error", "skip")
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["plain", "words", "here"]
    assert "2 inputs were skipped" in result.stderr
    assert f"{path} line 4" in result.stderr


def test_inputs_that_the_model_cannot_use_are_reported_and_skipped(folders: Any, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "in.txt"
    path.write_text("plain [MASK]\nwords\ntwo [MASK]\n")
    result = run("fill-mask", folders["fill-mask"], "--file", path, "--json", expect=1)
    assert len(result.stdout.splitlines()) == 1
    assert f"{path} line 2: Text 1 does not contain [MASK]." in result.stderr
    result = run("fill-mask", folders["fill-mask"], "--file", path, "--json", "--on-error", "skip")
    assert len(result.stdout.splitlines()) == 2


def test_limit_ends_the_run(folders: Any, table: Any) -> None:  # noqa: F811
    assert len(run_json("embed", folders["embed"], "--file", table, "--limit", "2")) == 2


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_columns_of_any_values_are_kept(tmp_path: Path, ending: str) -> None:
    """Values of several types, huge numbers and halves of surrogate pairs must not lose the results of a long run."""
    values = [1, "a", None, [1, {"b": 2}], 2**70, 0.5, True, "\ud800"]
    results = ResultFile(tmp_path / f"out{ending}", {})
    for index, value in enumerate(values):
        results.add(index, {"text": "t", "any": value, "number": index})
    assert results.finish() == len(values)
    rows = read_records(tmp_path / f"out{ending}").rows if ending != ".jsonl" else []
    if ending == ".jsonl":
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["any"] for row in rows] == values
    elif ending == ".parquet":
        expected = ["1", "a", None, '[1, {"b": 2}]', str(2**70), "0.5", "true", "\\ud800"]
        assert [row["any"] for row in rows] == expected
        assert [row["number"] for row in rows] == list(range(8))
    else:
        assert [row["any"] for row in rows][3:5] == ['[1, {"b": 2}]', str(2**70)]


def test_a_command_that_fails_before_its_first_result_leaves_nothing(tmp_path: Path) -> None:
    run("embed", str(tmp_path), "a", "--output", str(tmp_path / "out.jsonl"), expect=1)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_resumes(folders: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run("classify", folders["classify"], "--file", table, "--output", whole)
    add = ResultFile.add

    def stop(self: Any, index: Any, record: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        add(self, index, record)

    with monkeypatch.context() as patch:
        patch.setattr(ResultFile, "add", stop)
        run("classify", folders["classify"], "--file", table, "--output", output, expect=130)
    assert not output.exists()
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(partial.read_bytes() + b'[2, {"loc')  # killed while writing
    error = run("classify", folders["classify"], "--file", table, "--output", output, "--int8", expect=1).stderr
    assert f"{partial} belongs to another command" in error
    result = run("classify", folders["classify"], "--file", table, "--output", output)
    assert "after 2 inputs" in result.stderr
    assert "1 texts" in result.stderr
    for found, expected in zip(read_jsonl(output), read_jsonl(whole), strict=True):
        assert found.pop("scores") == pytest.approx(expected.pop("scores"), abs=1e-6)
        assert found == expected
    error = run("classify", folders["classify"], "--file", table, "--output", output, expect=1).stderr
    assert f"{output} already exists" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "out.txt"], "it must end in one of .jsonl, .csv, .parquet, .npy."),
        (["--output", "out.npy"], "a .npy file holds embeddings only."),
        (["--device", "nonsense"], "--device is 'nonsense', which is not available here"),
    ],
)
def test_invalid_output_options_give_one_sentence(
    folders: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: Any,
    message: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run("classify", folders["classify"], "plain", *options, expect=1).stderr
    assert list(tmp_path.iterdir()) == []


def test_escapes_in_data_do_not_reach_the_terminal(folders: Any, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "in.txt"
    path.write_text("plain \x1b[31m words \x9b31m\n", encoding="utf-8")
    table = run("classify", folders["classify"], "--file", path)
    assert "\\x1b[31m words" in table.stdout
    lines = run("classify", folders["classify"], "--file", path, "--json")
    assert json.loads(lines.stdout)["text"] == "plain \x1b[31m words \x9b31m"
    for output in (table.output, lines.output):
        assert "\x1b" not in output
        assert "\x9b" not in output
