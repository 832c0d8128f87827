"""The adapters on a real Ray cluster and a real Spark, both on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from bertblocks import Predictor
from bertblocks.bulk.job import run_bulk
from bertblocks.bulk.settings import BulkSettings
from tests.bulk.helpers import make_rows, read_files, run, write_jsonl

pytestmark = pytest.mark.slow
ROWS = make_rows(200)
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed; it is no development dependency because of its size")
    ray.init(num_cpus=4, log_to_driver=False)  # Ray Data needs some for its own tasks
    yield ray
    ray.shutdown()


def test_ray_data(ray_cluster: Any, models: dict[str, str]) -> None:
    from bertblocks.bulk.ray import map_dataset

    dataset = ray_cluster.data.from_arrow(
        [pa.Table.from_pylist(ROWS[start : start + 50]) for start in range(0, 200, 50)]
    )
    options: dict[str, Any] = {"workers": 2, "rows": 32, "predictor": {"dtype": torch.float32}}
    found = {row["id"]: row for row in map_dataset(dataset, "embed", models["embed"], **options).take_all()}
    assert sorted(found) == list(range(200))
    expected = Predictor(models["embed"], dtype=torch.float32).encode(TEXTS)
    np.testing.assert_allclose([found[number]["embedding"] for number in range(200)], expected, atol=1e-5)
    labelled = map_dataset(dataset, "classify", models["classify"], **options).take_all()
    labels = {row["id"]: list(row["labels"]) for row in labelled}
    expected_labels = Predictor(models["classify"], dtype=torch.float32).classify(TEXTS)
    assert [labels[number] for number in range(200)] == [result.labels for result in expected_labels]


def test_a_job_on_ray_writes_the_same_files(ray_cluster: Any, models: dict[str, str], tmp_path: Path) -> None:
    rows = [*ROWS[:50], {"id": 50, "text": None, "kind": "a"}, *ROWS[51:]]
    inputs = [write_jsonl(tmp_path / "in.jsonl", rows)]
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "rows_per_shard": 16, "window": 8}
    for options in ({}, {"precision": "int8"}):
        here, there = tmp_path / f"here{len(options)}", tmp_path / f"there{len(options)}"
        run("embed", models["embed"], inputs, here, **common, options=options)
        settings = BulkSettings("embed", models["embed"], inputs, str(there), **common, options=options)
        result = run_bulk(settings, on="ray")
        assert (result.rows, result.bad_rows, result.is_complete) == (199, 1, True)
        assert read_files(there) == read_files(here)
    with pytest.raises(ValueError, match=r"in\.jsonl line 51: None is not a text"):
        run_bulk(
            BulkSettings("embed", models["embed"], inputs, str(tmp_path / "stop"), **common, on_error="stop"), on="ray"
        )


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    sql = pytest.importorskip(
        "pyspark.sql", reason="pyspark is not installed; it is no development dependency because of its size"
    )
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = sql.SparkSession.builder.master("local[2]")
    for name, value in {"ui.enabled": "false", "driver.host": "127.0.0.1", "driver.bindAddress": "127.0.0.1"}.items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    yield session
    session.stop()


def test_spark(spark: Any, models: dict[str, str]) -> None:
    from bertblocks.bulk.spark import map_frame

    frame = spark.createDataFrame([(row["id"], row["text"]) for row in ROWS], ["id", "text"]).repartition(2)
    options: dict[str, Any] = {"predictor": {"dtype": torch.float32}}
    found = {row.id: row for row in map_frame(frame, "embed", models["embed"], **options).collect()}
    assert sorted(found) == list(range(200))
    expected = Predictor(models["embed"], dtype=torch.float32).encode(TEXTS)
    np.testing.assert_allclose([found[number].embedding for number in range(200)], expected, atol=1e-5)
    bits = map_frame(frame, "embed", models["embed"], options={"precision": "binary"}, **options).collect()
    packed = np.array([row.embedding for row in sorted(bits, key=lambda row: row.id)], np.uint8)
    np.testing.assert_array_equal(np.unpackbits(packed, axis=1), expected > 0)
    labelled = map_frame(frame, "classify", models["classify"], **options).collect()
    labels = {row.id: row.labels for row in labelled}
    expected_labels = Predictor(models["classify"], dtype=torch.float32).classify(TEXTS)
    assert [labels[number] for number in range(200)] == [result.labels for result in expected_labels]


def test_tokens_written_on_ray_are_those_of_one_process(ray_cluster: Any, tmp_path: Path) -> None:
    """One of Ray's workers is killed meanwhile, so its shard is written again."""
    from bertblocks.data.corpus import FileCorpus
    from bertblocks.data.prepare import write_shards
    from bertblocks.text.tokenizer_training import train_tokenizer

    (tmp_path / "texts.txt").write_text("one text of words\n\nanother text\n\n" * 500)
    tokenizer = train_tokenizer("wordpiece", 60, ["one text of words", "another text"])
    corpus = FileCorpus((str(tmp_path / "texts.txt"),), shard_bytes=4_000)
    killed: list[int] = []

    def kill_worker(done: int, total: int) -> None:
        processes = psutil.Process().children(recursive=True)
        busy = [process for process in processes if "ray::make_shard" in " ".join(process.cmdline())]
        if 0 < done < total and busy and not killed:
            busy[0].kill()
            killed.append(busy[0].pid)

    assert write_shards(corpus, tokenizer, tmp_path / "here", workers=1)
    assert write_shards(corpus, tokenizer, tmp_path / "ray", on="ray", on_shard=kill_worker)
    assert killed
    files = sorted(path.name for path in (tmp_path / "here").iterdir() if path.is_file())
    assert files == sorted(path.name for path in (tmp_path / "ray").iterdir() if path.is_file())
    assert len(files) > 10
    assert all((tmp_path / "here" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes() for name in files)
