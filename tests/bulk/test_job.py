"""Bulk jobs: right values in the order of the input, no row lost, and the same bytes whatever happens."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from pyarrow import csv, feather, parquet

from bertblocks import Predictor
from bertblocks.bulk.folder import OutputFolder
from bertblocks.bulk.manifest import describe_inputs
from tests.bulk.helpers import make_rows, read_files, read_table, run, write_jsonl
from tests.bulk.kills import kill_jobs
from tests.search.kill_worker import dying_at, run_in_child
from tests.small_tokenizers import wrap

ROWS = make_rows(20)


def pool_by_hand(model: str, texts: list[str]) -> np.ndarray:
    """Mean pooling and unit length, one text at a time, by transformers."""
    encoder, tokenizer, found = transformers.AutoModel.from_pretrained(model).eval(), wrap("wordpiece"), []
    for text in texts:
        with torch.no_grad():
            states = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append((states.mean(0) / states.mean(0).norm()).numpy())
    return np.stack(found)


@pytest.fixture
def table(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "in.jsonl", ROWS)


def test_rows_keep_their_order_and_columns(models: dict[str, str], table: str, tmp_path: Path) -> None:
    result = run("embed", models["embed"], [table], tmp_path / "out")
    assert (result.rows, result.shards, result.input_rows, result.is_complete) == (20, 3, 20, True)
    assert sorted(path.name for path in (tmp_path / "out").glob("*")) == [
        ".workers",
        "manifest.json",
        *(f"part-0000{number}.parquet" for number in range(3)),
    ]
    found = read_table(tmp_path / "out")
    assert [row["id"] for row in found] == list(range(20))
    assert [row["kind"] for row in found] == [row["kind"] for row in ROWS]
    assert [row["location"] for row in found] == [f"{table} line {number}" for number in range(1, 21)]
    assert list(found[0]) == ["location", "id", "kind", "embedding"]
    expected = pool_by_hand(models["embed"], [row["text"] for row in ROWS])
    np.testing.assert_allclose([row["embedding"] for row in found], expected, atol=1e-5)
    schema = parquet.read_schema(tmp_path / "out" / "part-00002.parquet")
    assert schema.field("embedding").type == pa.list_(pa.float32(), 32)
    assert schema.field("id").type == pa.int64()


def write_every_format(folder: Path) -> dict[str, str]:
    """The rows in each format that can be read, by name."""
    data = pa.Table.from_pylist(ROWS)
    paths = {name: folder / f"in.{name}" for name in ("csv", "tsv", "jsonl", "json", "parquet", "arrow", "feather")}
    csv.write_csv(data, paths["csv"])
    csv.write_csv(data, paths["tsv"], csv.WriteOptions(delimiter="\t"))
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    paths["jsonl"].write_text(lines)
    paths["json"].write_text(json.dumps(ROWS))
    parquet.write_table(data, paths["parquet"], row_group_size=6)
    with pa.ipc.new_stream(paths["arrow"], data.schema) as stream:
        stream.write_table(data)
    feather.write_feather(data, paths["feather"])
    found = {name: str(path) for name, path in paths.items()}
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pa.CompressedOutputStream(folder / "in.jsonl.zst", "zstd") as stream:
        stream.write(lines.encode())
    for name in ("ab", "c"):
        (folder / name).mkdir()
    write_jsonl(folder / "ab" / "2.jsonl", ROWS[7:])
    write_jsonl(folder / "ab" / "1.jsonl", ROWS[:7])
    memory = fsspec.filesystem("memory")
    memory.pipe("/bulk-in/1.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[:7]).encode())
    parquet.write_table(data.slice(7), memory.open("/bulk-in/2.parquet", "wb"))
    found |= {name: str(folder / f"in.{name}") for name in ("jsonl.gz", "jsonl.zst")}
    found |= {"folder": str(folder / "ab"), "pattern": str(folder / "ab" / "*.jsonl")}
    found |= {"file://": f"file://{paths['csv']}", "memory://": "memory://bulk-in", "remote *": "memory://bulk-in/*"}
    return found


def test_every_format_gives_the_same_rows(models: dict[str, str], tmp_path: Path) -> None:
    expected = pool_by_hand(models["embed"], [row["text"] for row in ROWS])
    for name, source in write_every_format(tmp_path).items():
        output = tmp_path / f"out {name.replace('/', '').replace('*', 'star')}"
        run("embed", models["embed"], [source], output, keys=["id"], rows_per_shard=50)
        found = read_table(output)
        assert [int(row["id"]) for row in found] == list(range(20)), name
        np.testing.assert_allclose([row["embedding"] for row in found], expected, atol=1e-5, err_msg=name)


def test_tasks_give_what_the_predictor_gives(models: dict[str, str], tmp_path: Path) -> None:
    texts = [row["text"] for row in ROWS]
    pairs = [{"question": text, "context": text, "query": text, "document": "plain words"} for text in texts]
    tables = {name: write_jsonl(tmp_path / "pairs.jsonl", pairs) for name in ("answer", "rerank")}
    masked = [{"text": f"{text} [MASK]"} for text in texts]
    tables["fill-mask"] = write_jsonl(tmp_path / "masked.jsonl", masked)
    found: dict[str, Any] = {}
    for task, options in {
        "classify": {"top_k": 2},
        "sparse": {"top_k": 4},
        "tag": {"level": "words"},
        "answer": {"n_best": 2},
        "rerank": {},
        "fill-mask": {"top_k": 2},
    }.items():
        source = tables.get(task) or write_jsonl(tmp_path / "in.jsonl", ROWS)
        run(task, models[task], [source], tmp_path / task, options=options)
        found[task] = read_table(tmp_path / task)

    def open_predictor(task: str) -> Predictor:
        return Predictor(models[task], dtype=torch.float32, threads=1)

    for row, expected in zip(found["classify"], open_predictor("classify").classify(texts, top_k=2), strict=True):
        assert row["labels"] == expected.labels
        scores = {name: score for name, score in row["scores"].items() if score is not None}
        assert scores == pytest.approx(expected.scores, abs=1e-5)
    for row, vector in zip(found["sparse"], open_predictor("sparse").encode_sparse(texts, top_k=4), strict=True):
        assert [entry["index"] for entry in row["sparse_embedding"]] == vector.indices.tolist()
        assert [entry["value"] for entry in row["sparse_embedding"]] == pytest.approx(vector.values, abs=1e-4)
    for row, tags in zip(found["tag"], open_predictor("tag").tag(texts, level="words"), strict=True):
        assert [(tag["label"], tag["start"], tag["end"]) for tag in row["tags"]] == [
            (tag.label, tag.start, tag.end) for tag in tags
        ]
    answers = open_predictor("answer").answer([(text, text) for text in texts], n_best=2)
    assert [(row["text"], row["start"]) for row in found["answer"]] == [(a.text, a.start) for a in answers]
    assert [row["query"] for row in found["answer"]] == texts
    ranked = open_predictor("rerank").rerank(texts, [["plain words"]] * 20)
    assert [row["documents"][0]["score"] for row in found["rerank"]] == pytest.approx(
        [documents[0].score for documents in ranked], abs=1e-5
    )
    fillings = open_predictor("fill-mask").fill_mask([row["text"] for row in masked], top_k=2)
    assert [[f["id"] for f in row["masks"][0]] for row in found["fill-mask"]] == [
        [filling.id for filling in masks[0]] for masks in fillings
    ]


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "binary"])
def test_vectors_have_the_numbers_of_their_precision(
    models: dict[str, str], table: str, tmp_path: Path, precision: str
) -> None:
    exact = pool_by_hand(models["embed"], [row["text"] for row in ROWS])
    for form in ("parquet", "npy"):
        run("embed", models["embed"], [table], tmp_path / form, format=form, options={"precision": precision})
    rows = read_table(tmp_path / "parquet")
    arrays = [np.load(path) for path in sorted((tmp_path / "npy").glob("part-*.npy"))]
    stacked = np.concatenate(arrays)
    assert [len(array) for array in arrays] == [8, 8, 4]
    assert [row["embedding"] for row in rows] == stacked.tolist()
    keys = [parquet.read_table(path) for path in sorted((tmp_path / "npy").glob("part-*.keys.parquet"))]
    assert pa.concat_tables(keys).column("id").to_pylist() == list(range(20))
    if precision == "binary":
        np.testing.assert_array_equal(np.unpackbits(stacked, axis=1), exact > 0)
    elif precision == "int8":
        low, high = np.load(tmp_path / "npy" / "ranges.npy")
        np.testing.assert_allclose([low, high], [exact.min(0), exact.max(0)], atol=1e-5)
        restored = low + (stacked.astype(np.float32) + 128.5) * (high - low) / 255
        np.testing.assert_allclose(restored, exact, atol=float((high - low).max()) / 200)
    else:
        assert stacked.dtype == precision
        np.testing.assert_allclose(stacked, exact, atol=1e-5 if precision == "float32" else 1e-3)


def test_bad_rows_are_named_and_no_other_row_is_lost(models: dict[str, str], tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[3], lines[4], lines[17] = "{oops", '{"id": 4, "text": null}', '{"id": 17}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    result = run("embed", models["embed"], [str(tmp_path / "in.jsonl")], tmp_path / "out")
    assert (result.rows, result.bad_rows, result.input_rows) == (17, 3, 20)
    assert [row["id"] for row in read_table(tmp_path / "out")] == [n for n in range(20) if n not in (3, 4, 17)]
    bad = [path.read_text().splitlines() for path in sorted((tmp_path / "out").glob("bad-rows-*.jsonl"))]
    assert [[json.loads(line)["row"] for line in lines] for lines in bad] == [[3, 4], [17]]
    assert json.loads(bad[1][0])["location"] == f"{tmp_path / 'in.jsonl'} line 18"
    assert "must be among them" in json.loads(bad[1][0])["reason"]
    with pytest.raises(ValueError, match=r"in\.jsonl line 4: the line is not JSON"):
        run("embed", models["embed"], [str(tmp_path / "in.jsonl")], tmp_path / "stop", on_error="stop")


def test_rows_that_the_model_or_the_columns_reject_are_bad(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.bulk.plan.SAMPLE_RECORDS", 5)
    rows = [{"id": number, "text": f"{row['text']} [MASK]"} for number, row in enumerate(ROWS)]
    rows[6]["text"], rows[9]["id"] = "plain", "nine"
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    result = run("fill-mask", models["fill-mask"], [source], tmp_path / "out")
    assert (result.rows, result.bad_rows) == (18, 2)
    assert [row["id"] for row in read_table(tmp_path / "out")] == [n for n in range(20) if n not in (6, 9)]
    files = sorted((tmp_path / "out").glob("bad-rows-*.jsonl"))
    reasons = [json.loads(line)["reason"] for path in files for line in path.read_text().splitlines()]
    assert "does not contain [MASK]" in reasons[0]
    assert reasons[1] == 'id is "nine", but the first rows of the input have int64'


def test_two_workers_write_what_one_writes(models: dict[str, str], table: str, tmp_path: Path) -> None:
    run("embed", models["embed"], [table], tmp_path / "one")
    second = run("embed", models["embed"], [table], tmp_path / "two", shard=(1, 2))
    assert (second.rows, second.is_complete) == (8, False)
    first = run("embed", models["embed"], [table], tmp_path / "two", shard=(0, 2))
    assert (first.rows, first.is_complete) == (12, True)
    assert read_files(tmp_path / "two") == read_files(tmp_path / "one")


def test_a_job_continues_at_the_first_missing_shard(
    models: dict[str, str], table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("embed", models["embed"], [table], tmp_path / "out")
    before = read_files(tmp_path / "out")
    again = run("embed", models["embed"], [table], tmp_path / "out")
    assert (again.rows, again.shards, again.is_complete) == (0, 0, True)
    (tmp_path / "out" / "part-00001.parquet").unlink()
    (tmp_path / "out" / ".part-00001.parquet-abc.partial").write_text("left by a kill")
    texts: list[str] = []
    stream = Predictor.stream

    def remember(self: Any, method: str, inputs: Any, **options: Any) -> Any:
        def noted() -> Any:
            for text in inputs:
                texts.append(text)
                yield text

        return stream(self, method, noted(), **options)

    monkeypatch.setattr(Predictor, "stream", remember)
    assert run("embed", models["embed"], [table], tmp_path / "out").rows == 8
    assert texts == [row["text"] for row in ROWS[8:16]]
    assert read_files(tmp_path / "out") == before


def test_batches_do_not_depend_on_when_rows_arrive(models: dict[str, str]) -> None:
    predictor = Predictor(models["embed"], dtype=torch.float32, threads=1)
    texts = [row["text"] for row in make_rows(40)]
    sizes: list[list[int]] = []

    def pausing(seconds: float) -> Any:
        for number, text in enumerate(texts):
            if number % 9 == 4:
                time.sleep(seconds)
            yield text

    forward = predictor._engine.forward

    def watch(pipeline: Any, segments: Any) -> Any:
        sizes[-1].append(len(segments))
        return forward(pipeline, segments)

    predictor._engine.forward = watch  # type: ignore[method-assign]
    for seconds in (0.0, 0.08):  # longer than the pause after which a stream without a window starts
        sizes.append([])
        list(predictor.stream("encode", pausing(seconds), window=16))
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_per_shard": 9}, r"rows_per_shard is 9, but its manifest\.json has 8"),
        ({"window": 6}, "window is 6"),
        ({"options": {"dimensions": 8}}, "options.dimensions is 8"),
        ({"keys": ["id"]}, "keys.kind is None"),
        ({"dtype": "bfloat16"}, "numbers is 'bfloat16'"),
        ({"format": "npy"}, "output_format is 'npy'"),
        ({"task": "sparse"}, "task is 'sparse'"),
        ({"model": "other"}, r"model\.sha256"),
        ({"inputs": "other"}, r"inputs\[0\]\.sha256"),
        ({"version": "9.9"}, "bertblocks is '9.9'"),
    ],
)
def test_another_job_is_refused(
    models: dict[str, str], table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    run("embed", models["embed"], [table], tmp_path / "out")
    before = read_files(tmp_path / "out")
    options = dict(change)
    task = options.pop("task", "embed")
    model = models[task] if options.pop("model", None) is None else models["tag"]
    if options.pop("inputs", None):
        write_jsonl(Path(table), [*ROWS[:-1], {**ROWS[-1], "kind": "c"}])  # as many bytes as before
    if "version" in options:
        monkeypatch.setattr("bertblocks.bulk.manifest.__version__", options.pop("version"))
    with pytest.raises(ValueError, match=message):
        run(task, model, [table], tmp_path / "out", **options)
    assert read_files(tmp_path / "out") == before


def test_a_foreign_folder_and_a_second_worker_are_refused(models: dict[str, str], table: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"is not empty and has no manifest\.json: it holds mine\.txt"):
        run("embed", models["embed"], [table], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with OutputFolder(str(tmp_path / "two")).claimed(0, 2):
        with pytest.raises(ValueError, match="another process is running as worker 0/2"):
            run("embed", models["embed"], [table], tmp_path / "two", shard=(0, 2))
        with pytest.raises(ValueError, match="worker 0/2 is running; wait for it"):
            run("embed", models["embed"], [table], tmp_path / "two")
        run("embed", models["embed"], [table], tmp_path / "two", shard=(1, 2))


def test_a_model_without_the_head_claims_no_folder(models: dict[str, str], table: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="classif"):
        run("classify", models["embed"], [table], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert run("embed", models["embed"], [table], tmp_path / "out").is_complete


def test_the_hash_of_a_large_file_sees_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertblocks.bulk.manifest.BLOCK_BYTES", 4)
    path, found = tmp_path / "in.txt", set()
    data = bytearray(1000)
    for position in (None, 0, 500, 997):
        if position is not None:
            data[position] += 1
        path.write_bytes(data)
        (entry,) = describe_inputs([str(path)])
        found.add(entry["sha256"])
    assert entry["hashed"].startswith("64 blocks")
    assert len(found) >= 3  # the first and the last block are always read


def test_output_goes_to_an_address(models: dict[str, str], table: str, tmp_path: Path) -> None:
    run("embed", models["embed"], [table], tmp_path / "out")
    run("embed", models["embed"], [table], "memory://bulk-out/job", shard=(1, 2))
    result = run("embed", models["embed"], [table], "memory://bulk-out/job")
    assert result.is_complete
    memory = fsspec.filesystem("memory")
    found = {path.rsplit("/", 1)[-1]: memory.cat(path) for path in memory.find("/bulk-out/job")}
    assert found == read_files(tmp_path / "out")


def test_a_job_survives_kills(models: dict[str, str], table: str, tmp_path: Path) -> None:
    """Processes that are killed when a file is flushed, before or after it."""

    def work() -> None:
        run("embed", models["embed"], [table], tmp_path / "killed")

    run("embed", models["embed"], [table], tmp_path / "straight")
    assert not any(run_in_child(dying_at(flush, work)) for flush in (3, 4, 1))
    work()
    assert read_files(tmp_path / "killed") == read_files(tmp_path / "straight")


@pytest.mark.slow
def test_jobs_survive_60_random_kills(tmp_path: Path) -> None:
    counts = kill_jobs(tmp_path, 60)
    assert counts["kills"] >= 60
    assert counts["unfinished files"] >= 10


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input() -> None:
    command = [sys.executable, "-m", "tests.bulk.memory"]
    peaks = []
    for rows in ("100000", "1000000"):
        done = subprocess.run(
            [*command, rows], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
        )
        peaks.append(json.loads(done.stdout.splitlines()[-1])["peak MiB"])
    assert peaks[1] < 1.1 * peaks[0], peaks
