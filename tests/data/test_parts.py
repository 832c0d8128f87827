"""Streamed sources: datasets that are read file by file, and tokens that are written and deleted part by part."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bertblocks.cli.main import app
from bertblocks.data.corpus import (
    Corpus,
    CorpusPart,
    DatasetCorpus,
    FileCorpus,
    RecordCounts,
    StreamedCorpus,
    dataset_corpus,
)
from bertblocks.data.parts import PartOrder, TokenParts
from bertblocks.data.prepare import prepare
from bertblocks.data.stream import PackedStream, Position, StreamSource
from bertblocks.text.records import DataError
from bertblocks.text.tokenizer_training import train_tokenizer

FILES, ROWS = 5, 30


def text_of(file: int, row: int) -> str:
    return f"file{file} row{row} " + " ".join(f"word{number % 7}" for number in range((file * 31 + row * 17) % 23))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Datasets of json lines and of parquet files, which `datasets` streams from disk as it would from a hub."""
    import datasets

    target = tmp_path / "dataset"
    target.mkdir()
    for file in range(FILES):
        rows = [{"text": text_of(file, row), "number": row} for row in range(ROWS)]
        (target / f"train-{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet = tmp_path / "parquet"
    parquet.mkdir()
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(parquet / "train-0.parquet")
    return target


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer("wordpiece", 100, [text_of(file, row) for file in range(FILES) for row in range(ROWS)])


def open_parts(corpus: Any, tokenizer: Any, target: Path, size: int = 2, seed: int = 0) -> TokenParts:
    first = CorpusPart(corpus, PartOrder(len(corpus.shards()), size, seed).shards_of(0))
    prepare(first, tokenizer, target, 1)
    return TokenParts("web", corpus, tokenizer, target, size, seed)


def open_stream(parts: TokenParts, **options: Any) -> PackedStream:
    return PackedStream([StreamSource(parts, **options)], length=24, overhead=2, seed=0, pool_rows=5)


def ids_of(rows: Any) -> list[list[list[int]]]:
    return [[chunk.ids.tolist() for chunk in row] for row in rows]


def test_a_streamed_dataset_has_the_texts_of_its_files(folder: Path) -> None:
    corpus = StreamedCorpus(str(folder))
    assert len(corpus.shards()) == FILES
    counts = RecordCounts()
    texts = [document.text for document in corpus.documents(counts)]
    assert sorted(texts) == sorted(text_of(file, row) for file in range(FILES) for row in range(ROWS))
    assert counts.bad == 0
    assert [document.text for document in counts.count(corpus.read(3))] == [text_of(3, row) for row in range(ROWS)]
    parquet = StreamedCorpus(str(folder.parent / "parquet"))
    assert [document.text for document in parquet.documents(RecordCounts())] == ["one", "two"]


def test_streaming_reads_rows_only_as_they_are_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: pytest.fail("it was downloaded"))
    records = StreamedCorpus(str(folder), column="text").read(1)
    assert next(RecordCounts().count(records)).text == text_of(1, 0)


def test_missing_columns_splits_and_datasets_are_named(folder: Path, tmp_path: Path) -> None:
    bad = next(iter(StreamedCorpus(str(folder), column="txt").read(0)))
    assert str(bad) == f"{folder} file 1 row 1: there is no 'txt' (did you mean 'text'?)"
    with pytest.raises(DataError, match="Bad split: test"):
        StreamedCorpus(str(folder), "test").shards()
    with pytest.raises(DataError, match="`datasets` cannot load it"):
        StreamedCorpus(str(tmp_path / "none")).shards()


def test_a_saved_dataset_is_not_streamed(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a b", "c"]}).save_to_disk(tmp_path / "saved")
    corpus = dataset_corpus(str(tmp_path / "saved"), "train", "text", 0.0, is_streamed=True)
    assert isinstance(corpus, DatasetCorpus)
    assert [document.text for document in corpus.documents(RecordCounts())] == ["a b", "c"]


@pytest.mark.parametrize(("shards", "size"), [(5, 2), (4, 4), (3, 10), (7, 1)])
def test_every_epoch_visits_every_shard_once_in_another_order(shards: int, size: int) -> None:
    order = PartOrder(shards, size, seed=3)
    epochs = []
    for epoch in range(4):
        parts = [order.shards_of(epoch * order.per_epoch + rank) for rank in range(order.per_epoch)]
        epochs.append(sum(parts, ()))
        assert sorted(epochs[-1]) == list(range(shards))
        assert max(map(len, parts)) <= size
    assert len(set(epochs)) > 1


@pytest.mark.parametrize("kind", ["dataset", "files"])
def test_an_epoch_of_a_stream_has_every_token_once(folder: Path, tokenizer: Any, tmp_path: Path, kind: str) -> None:
    corpus: Corpus = StreamedCorpus(str(folder))
    if kind == "files":
        corpus = FileCorpus((str(folder),), shard_bytes=3000)
        assert len(corpus.shards()) > FILES
    stream = open_stream(open_parts(corpus, tokenizer, tmp_path / "tokens"))
    rows, _ = stream.take(Position(), 400)
    seen = Counter(tuple(chunk.ids.tolist()) for row in rows for chunk in row if chunk.epoch == 0)
    expected: Counter[tuple[int, ...]] = Counter()
    for document in corpus.documents(RecordCounts()):
        ids = tokenizer(document.text, add_special_tokens=False).input_ids
        expected.update(tuple(ids[start : start + 22]) for start in range(0, len(ids), 22))
    assert seen == expected
    keys = [(chunk.epoch, chunk.index) for row in rows for chunk in row]
    assert len(set(keys)) == len(keys), "masks would repeat"
    assert max(epoch for epoch, _ in keys) >= 1


def test_a_stream_continues_exactly_from_any_position_in_another_folder(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """The second process has none of the parts of the first on its disk, and gets the same rows."""
    corpus = StreamedCorpus(str(folder))
    stream = open_stream(open_parts(corpus, tokenizer, tmp_path / "one"))
    position = Position()
    for number, count in enumerate((1, 7, 2, 90, 3)):
        recorded = json.loads(json.dumps({name: list(cursor) for name, cursor in position.cursors.items()}))
        start = Position(position.pool, position.row, {name: tuple(cursor) for name, cursor in recorded.items()})
        again, following = open_stream(open_parts(corpus, tokenizer, tmp_path / f"other{number}")).take(start, count)
        rows, position = stream.take(position, count)
        assert ids_of(again) == ids_of(rows)
        assert following == position
    assert position.cursors["web"][0] >= 2, "several parts were used"


def test_used_parts_are_deleted_and_held_out_documents_left_out(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    corpus = StreamedCorpus(str(folder), held_out=0.3)
    parts = open_parts(corpus, tokenizer, tmp_path / "tokens", size=1)
    held_out = {document.text for document in corpus.documents(RecordCounts()) if document.held_out}
    assert 20 < len(held_out) < 80
    for part in range(1, 2 * FILES):
        documents = parts.open(part)
        decoded = {tokenizer.decode(documents[index]) for index in range(len(documents))}
        assert decoded.isdisjoint(held_out)
        parts.delete_before(part)
        kept = sorted(path.name for path in (tmp_path / "tokens").glob("part-*"))
        # the next part may have been written ahead
        assert kept in ([f"part-{part:08d}"], [f"part-{number:08d}" for number in (part, part + 1)])
    assert len(parts.first.held_out) > 0


def test_a_changed_corpus_raises(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    open_parts(StreamedCorpus(str(folder)), tokenizer, tmp_path / "tokens")
    with pytest.raises(DataError, match="the texts have changed since"):
        TokenParts("web", StreamedCorpus(str(folder), column="number"), tokenizer, tmp_path / "tokens", 2, 0)


def test_data_prepare_streams_a_dataset_into_shards(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["data", "prepare", str(tmp_path / "tokens"), "--dataset", str(folder), "--stream", "--json"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["documents"] == FILES * ROWS
    assert len(list((tmp_path / "tokens").glob("*.arrow"))) == FILES
    wrong = CliRunner().invoke(app, ["data", "prepare", "x", "a.txt", "--stream", *command[-4:]])
    assert "--stream goes with --dataset" in wrong.stderr


def test_documents_of_few_tokens_are_skipped(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    corpus = StreamedCorpus(str(folder))
    parts = open_parts(corpus, tokenizer, tmp_path / "tokens")
    rows, _ = open_stream(parts, min_tokens=20).take(Position(), 200)
    taken = Counter(ids[0] for row in ids_of(rows) for ids in row if len(ids) < 20)
    ends: set[int] = set()
    for document in corpus.documents(RecordCounts()):
        ids = tokenizer(document.text, add_special_tokens=False).input_ids
        if len(ids) >= 20:
            ends.update(ids[start] for start in range(22, len(ids), 22))
    assert set(taken) <= ends, "only the ends of longer documents are shorter"
    with pytest.raises(ValueError, match="Source 0 has no document of at least 1000 tokens"):
        open_stream(parts, min_tokens=1000)
