"""`bertblocks bulk`: events, lines for people, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertblocks import Predictor
from tests.bulk.conftest import models  # noqa: F401
from tests.bulk.helpers import make_rows, read_table, write_jsonl
from tests.cli.test_predict import run

ROWS = make_rows(20)


@pytest.fixture
def table(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "in.jsonl", [*ROWS[:5], {"id": 5, "text": 7}, *ROWS[6:]])


def test_a_job_prints_lines_and_continues(models: dict[str, str], table: str, tmp_path: Path) -> None:  # noqa: F811
    arguments = ["bulk", "embed", models["embed"], table, "--output", tmp_path / "out", "--rows-per-shard", "8"]
    arguments += ["--key", "id", "--option", "dimensions=8", "--dtype", "float32"]
    lines = run(*arguments, "--shard", "0/2").stdout.splitlines()
    assert lines[0] == f"12 rows to do, 0 shards are there; writing to {tmp_path / 'out'}"
    assert lines[1] == f"bad row: {table} line 6: 7 is not a text"
    assert lines[2].startswith("shard 0: 7 rows, 1 bad, ")
    assert lines[-1].endswith("s; other workers have shards to write")
    lines = run(*arguments, "--shard", "1/2").stdout.splitlines()
    assert lines[-1].startswith("8 rows in 1 shards, ")
    assert lines[-1].endswith("the job is complete")
    done = run(*arguments)
    assert "all shards of this worker are there already" in done.stderr
    assert done.stdout.startswith("0 rows in 0 shards, ")
    expected = Predictor(models["embed"], dtype=torch.float32).encode([row["text"] for row in ROWS], dimensions=8)
    found = read_table(tmp_path / "out")
    assert list(found[0]) == ["location", "id", "embedding"]
    kept = [number for number in range(20) if number != 5]
    assert [row["id"] for row in found] == kept
    np.testing.assert_allclose([row["embedding"] for row in found], expected[kept], atol=1e-5)


def test_json_prints_events(models: dict[str, str], table: str, tmp_path: Path) -> None:  # noqa: F811
    arguments = ["bulk", "classify", models["classify"], table, "-o", tmp_path / "out", "--rows-per-shard", "16"]
    events = [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", "shard", "shard", "result"]
    assert events[0]["rows"] == 20
    assert (events[1]["shard"], events[1]["rows"], events[1]["bad_rows"]) == (0, 15, 1)
    assert events[1]["tokens"] > 15
    assert (events[-1]["rows"], events[-1]["bad_rows"], events[-1]["is_complete"]) == (19, 1, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "2/2"], "--shard is '2/2'; it must be I/N"),
        (["--shard", "one"], "--shard is 'one'; it must be I/N"),
        (["--option", "dimension=3"], "'dimension' is not an option of embed"),
        (["--option", "dimensions"], "--option is 'dimensions'; it must be KEY=VALUE."),
        (["--key", "idd"], "there is no column 'idd' to keep; the columns are id, text, kind"),
        (["--column", "txt=text"], "--column is 'txt=text'; it must be ROLE=NAME"),
        (["--on-error", "stop"], "in.jsonl line 6: 7 is not a text."),
        (["--read", "format=csvv"], "format is 'csvv'"),
    ],
)
def test_mistakes_give_one_sentence(
    models: dict[str, str],  # noqa: F811
    table: str,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    result = run("bulk", "embed", models["embed"], table, "--output", tmp_path / "out", *options, expect=1)
    assert message in result.stderr
    assert not list((tmp_path / "out").glob("part-*"))


def test_npy_holds_embeddings_only(models: dict[str, str], table: str, tmp_path: Path) -> None:  # noqa: F811
    arguments: list[Any] = ["bulk", "tag", models["tag"], table, "-o", tmp_path / "out", "--format", "npy"]
    assert "npy', which holds embeddings; use parquet for tag" in run(*arguments, expect=1).stderr
