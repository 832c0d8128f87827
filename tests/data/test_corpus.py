"""Corpora: every kind of file, bad records, held-out texts, docstrings."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bertblocks.data.corpus import DatasetCorpus, FileCorpus, RecordCounts
from bertblocks.data.docstrings import (
    choose_held_out,
    clean,
    docstring_corpus,
    gather_docstrings,
    python_roots,
    read_docstrings,
)
from bertblocks.data.prepare import prepare
from bertblocks.data.stream import PackedStream, Position, StreamSource
from bertblocks.data.workers import worker_pool
from bertblocks.text.records import DataError
from bertblocks.text.tokenizer_training import train_tokenizer

TEXTS = ["One text.", 'Two "quoted", with comma.', "Drei: äöü\nand a second line.", "四"]


def read(corpus: Any) -> Any:
    counts = RecordCounts()
    return [document.text for document in corpus.documents(counts)], counts


def write_kind(path: Any, kind: Any, texts: Any) -> None:
    if kind == "jsonl":
        data = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
    elif kind == "csv":
        quoted = ('"' + text.replace('"', '""') + '"' for text in texts)
        data = b"id,text\n" + "".join(f"1,{text}\n" for text in quoted).encode()
    elif kind == "txt":
        data = "\n\n".join(texts).encode()
    else:
        parquet.write_table(pa.table({"id": [1] * len(texts), "text": texts}), path, row_group_size=2)
        data = path.read_bytes()
    path.write_bytes(data)


def zstd(data: Any) -> Any:
    return pa.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_every_kind_of_file_gives_its_texts(tmp_path: Path, kind: Any, compression: Any) -> None:
    plain = tmp_path / f"a.{kind}"
    write_kind(plain, kind, TEXTS)
    packers = {".gz": gzip.compress, ".zst": zstd}
    path = plain
    if compression:
        path = tmp_path / f"a.{kind}{compression}"
        path.write_bytes(packers[compression](plain.read_bytes()))
    texts, counts = read(FileCorpus((str(path),)))
    assert texts == TEXTS
    assert (counts.good, counts.bad) == (4, 0)


def test_folders_globs_and_files_are_read_in_order_and_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "deep/a.txt", "notes.md"):
        (tmp_path / name).write_text(f"from {name}")
    assert read(FileCorpus((str(tmp_path),)))[0] == ["from b.txt", "from deep/a.txt"]
    assert read(FileCorpus((str(tmp_path / "**/*.txt"), str(tmp_path / "b.txt"))))[0] == [
        "from b.txt",
        "from deep/a.txt",
    ]


@pytest.mark.parametrize(
    ("one_per", "expected"),
    [("paragraph", ["a\nb", "c"]), ("line", ["a", "b", "c"]), ("file", ["a\nb\n\n\nc\n"])],
)
def test_one_per_defines_the_documents_of_a_text_file(tmp_path: Path, one_per: Any, expected: Any) -> None:
    (tmp_path / "a.txt").write_text("a\nb\n\n\nc\n")
    assert read(FileCorpus((str(tmp_path),), one_per=one_per))[0] == expected


@given(
    st.lists(st.text(alphabet="ab \né", max_size=12), max_size=20),
    st.integers(1, 60),
    st.sampled_from(["txt", "jsonl"]),
)
@settings(max_examples=80, deadline=None)
def test_a_file_cut_into_shards_gives_the_same_texts(
    tmp_path_factory: pytest.TempPathFactory, texts: Any, shard_bytes: Any, kind: Any
) -> None:
    path = tmp_path_factory.mktemp("cut") / f"a.{kind}"
    write_kind(path, kind, texts)
    for one_per in ("paragraph", "line"):
        whole, counts = read(FileCorpus((str(path),), one_per=one_per))
        parts, other = read(FileCorpus((str(path),), one_per=one_per, shard_bytes=shard_bytes))
        assert parts == whole
        assert other.bad == counts.bad
        assert other.named == counts.named  # lines are counted from the top of the file


def test_a_parquet_file_is_cut_between_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"text {number}" for number in range(50)]}), path, row_group_size=7)
    corpus = FileCorpus((str(path),), shard_bytes=200)
    assert len(corpus.shards()) > 2
    assert read(corpus)[0] == [f"text {number}" for number in range(50)]


def test_large_files_are_cut_and_small_ones_share_a_shard(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_text('{"text": "a line"}\n' * 1000)
    for number in range(30):
        (tmp_path / f"small{number:02}.txt").write_text("a text")
    shards = FileCorpus((str(tmp_path),), shard_bytes=4000).shards()
    assert 4 <= len(shards) <= 7
    assert json.loads(json.dumps(shards)) == shards


# ---------------------------------------------------------------------- bad records


def test_bad_records_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n'
        b"\n"  # an empty line is no record
        b'{"text": "cut off\n'
        b'{"text": "not \xff UTF-8"}\n'
        b'{"txt": "x"}\n'
        b'{"text": "  "}\n'
        b'{"text": null}\n'
        b'{"text": 3}\n'
        b"[1]\n"
        b'{"text": "half a pair \\ud800"}\n'
        b'{"text": "good too"}\n'
    )
    texts, counts = read(FileCorpus((str(path),)))
    assert texts == ["good", "good too"]
    assert counts.bad == 8
    lines = [problem.removeprefix(f"{path} line ").split(":", 1) for problem in counts.named]
    assert [int(line) for line, _ in lines] == [3, 4, 5, 6, 7, 8, 9, 10]
    reasons = [
        "not JSON",
        "not UTF-8",
        "no 'text' (did you mean 'txt'?)",
        "empty",
        "empty",
        "holds int, not text",
        "[1] is not an object or a string",
        "not UTF-8",
    ]
    for (_, found), reason in zip(lines, reasons, strict=True):
        assert reason in found


def test_bad_rows_of_tables_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,id\n"two\nlines",1\nshort\n\xff,2\n,3\nlast,4\n')
    texts, counts = read(FileCorpus((str(tmp_path / "a.csv"),)))
    assert texts == ["two\nlines", "last"]
    assert [problem.removeprefix(f"{tmp_path}/a.csv ") for problem in counts.named] == [
        "line 4: the row has 1 columns, the first row has 2: ['short']",
        "line 5: the text is not UTF-8",
        "line 6: the text is empty",
    ]
    parquet.write_table(pa.table({"body": ["a", "b", "c"]}), tmp_path / "a.parquet")
    _, counts = read(FileCorpus((str(tmp_path / "a.parquet"),)))
    assert counts.bad == 3
    assert counts.named == [f"{tmp_path}/a.parquet row 1: there is no column 'text'; the columns are body"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_raises_an_error_that_names_it(tmp_path: Path, name: Any) -> None:
    generator = random.Random(0)
    lines = [json.dumps({"text": f"{generator.getrandbits(400):x}"}) for _ in range(4000)]
    data = ("\n".join(lines) + "\n").encode()
    packed = gzip.compress(data) if name.endswith("gz") else zstd(data)
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    texts, counts = read(FileCorpus((str(tmp_path / name),)))
    assert 0 <= len(texts) < 4000
    assert counts.bad >= 1
    assert "damaged from here on" in counts.named[-1]
    assert name in counts.named[-1]


def test_a_broken_parquet_file_raises_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet at all")
    texts, counts = read(FileCorpus((str(tmp_path / "a.parquet"),)))
    assert (texts, counts.bad) == ([], 1)
    assert "damaged" in counts.named[0]


def test_too_many_bad_records_raise_and_few_do_not() -> None:
    counts = RecordCounts(
        good=98, bad=2, named=["a.jsonl line 3: the text is empty", "a.jsonl line 9: the text is empty"]
    )
    counts.check(0.02, "a.jsonl")
    with pytest.raises(DataError, match=r"2 of 100 records cannot be used.*0\.01 allows: a\.jsonl line 3: the text"):
        counts.check(0.01, "a.jsonl")
    with pytest.raises(DataError, match=r"a\.txt, b\.txt: there are no documents among 0 records"):
        RecordCounts().check(1.0, FileCorpus(("a.txt", "b.txt")).name_source())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "no such file or folder, and no file matches it as a pattern"),
        ("*.csv", "no file matches it"),
        ("a.md", r"the ending '\.md' is not one of \.txt, \.jsonl, \.csv, \.parquet"),
        ("empty", r"has no \.txt, \.jsonl"),
    ],
)
def test_missing_or_unreadable_files_raise(tmp_path: Path, name: Any, message: Any) -> None:
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        FileCorpus((str(tmp_path / name),)).shards()


# ---------------------------------------------------------------------- held out, samples, datasets


def test_the_held_out_share_depends_only_on_the_text(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(4000)]
    write_kind(tmp_path / "a.jsonl", "jsonl", texts)
    write_kind(tmp_path / "b.jsonl", "jsonl", texts[::-3])
    sides = [
        {
            document.text: document.held_out
            for document in FileCorpus((str(tmp_path / name),), held_out=0.1).documents(RecordCounts())
        }
        for name in ("a.jsonl", "b.jsonl")
    ]
    # 400 expected, with a standard deviation of 19
    assert abs(sum(sides[0].values()) - 400) < 5 * 19
    assert all(sides[0][text] == side for text, side in sides[1].items())


def test_a_sample_is_spread_over_the_corpus_without_held_out_texts(tmp_path: Path) -> None:
    texts = [f"text {number:05}" for number in range(4000)]
    write_kind(tmp_path / "a.jsonl", "jsonl", texts)
    corpus = FileCorpus((str(tmp_path),), held_out=0.2, shard_bytes=20_000)
    sample = list(corpus.sample(10_000))
    numbers = [int(text.split()[1]) for text in sample]
    assert 10_000 <= sum(map(len, sample)) < 10_000 + 10 * len(corpus.shards()) + 10
    assert min(numbers) < 400
    assert max(numbers) > 3600
    held_out = {document.text for document in corpus.documents(RecordCounts()) if document.held_out}
    assert not held_out & set(sample)
    everything = set(corpus.sample(10**9))
    assert everything == set(texts) - held_out


def test_a_sample_respects_its_size_whatever_the_documents(tmp_path: Path) -> None:
    write_kind(tmp_path / "a.jsonl", "jsonl", ["\u00e4" * 10**6, "short"])
    (text,) = FileCorpus((str(tmp_path / "a.jsonl"),)).sample(1000)
    assert len(text.encode()) <= 1000 + 2**16


def test_a_sample_without_documents_names_the_files_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a\.txt: there are no documents among 0 records\."):
        list(FileCorpus((str(tmp_path / "a.txt"),)).sample(1000))
    (tmp_path / "a.jsonl").write_text("oops\n")
    with pytest.raises(DataError, match=r"among 1 records: .*a\.jsonl line 1: the line is not JSON"):
        list(FileCorpus((str(tmp_path / "a.jsonl"),)).sample(1000))


def test_a_dataset_is_read_by_rows(tmp_path: Path) -> None:
    import datasets

    rows = {"text": [f"text {number}" for number in range(30)] + [""], "other": list(range(31))}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    texts, counts = read(DatasetCorpus(str(tmp_path / "saved")))
    assert texts == rows["text"][:-1]
    assert counts.named == [f"{tmp_path}/saved row 31: the text is empty"]
    _, counts = read(DatasetCorpus(str(tmp_path / "saved"), column="txt"))
    assert counts.bad == 31
    assert "there is no column 'txt' (did you mean 'text'?)" in counts.named[0]


def test_a_missing_dataset_raises(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="`datasets` cannot load it"):
        DatasetCorpus(str(tmp_path / "nothing")).shards()


# ---------------------------------------------------------------------- docstrings


MODULE = '''"""A module of many words that speak."""
import missing_module_that_must_not_be_imported


class Thing:
    r"""A class with a \\backslash and words.

        Indented more here.
    And back.
    """

    async def method(self):
        \'\'\'Says what the method does here.\'\'\'

    def short(self):
        """Too short."""

    def example(self):
        """
        >>> one two three four five six
        ... seven
        """


if True:

    def inner():
        """A function inside of a condition."""
        def deeper():
            """A function inside of a function."""
'''


def test_docstrings_are_read_without_importing() -> None:
    assert read_docstrings(MODULE.encode()) == [
        "A module of many words that speak.",
        "A class with a \\backslash and words.\n\n    Indented more here.\nAnd back.",
        "Says what the method does here.",
        "A function inside of a condition.",
        "A function inside of a function.",
    ]
    assert read_docstrings(b"x = 'no docstring at all'") == []
    assert clean("half of a pair \ud800 is no text") == ""


def make_packages(root: Any) -> None:
    for package, number in (("alpha", 40), ("beta", 3), ("gamma", 2), ("delta", 3)):
        (root / package / "tests").mkdir(parents=True)
        lines = [f'def f{i}():\n    """The {package} function says number {i}."""\n' for i in range(number)]
        (root / package / "code.py").write_text("".join(lines))
        (root / package / "copy.py").write_text(
            lines[0] + 'def g():\n    """This one is everywhere the same text."""\n'
        )
        (root / package / "tests" / "test.py").write_text('"""A test that is not a part of the corpus."""')
    (root / "single.py").write_text('"""A module that is a file by itself."""')
    (root / "broken.py").write_text('"""A file that does not parse at all."""\ndef (')
    (root / "latin.py").write_bytes(
        '# -*- coding: latin-1 -*-\n"""Text in another encoding: \xe9 it is."""'.encode("latin-1")
    )


def test_the_docstring_corpus_reads_each_package_once(tmp_path: Path) -> None:
    root = tmp_path / "packages"
    make_packages(root)
    target = tmp_path / "docstrings.jsonl"
    counts = gather_docstrings(target, held_out=0.2, roots=[root], workers=1)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    texts = [record["text"] for record in records]
    assert len(texts) == len(set(texts)) == counts["documents"] == 40 + 3 + 2 + 3 + 1 + 1 + 1
    assert counts["broken"] == 1
    assert not any("test that" in text for text in texts)
    assert any("\xe9" in text for text in texts)
    # whole packages are held out, within the share
    sides = {record["package"]: record["held_out"] for record in records}
    assert all(sides[record["package"]] == record["held_out"] for record in records)
    size = sum(map(len, texts))
    held = sum(len(record["text"]) for record in records if record["held_out"])
    assert 0 < held <= 0.2 * size
    assert not sides["alpha"]
    # the same bytes wherever the packages are
    (tmp_path / "elsewhere").mkdir()
    root.rename(tmp_path / "elsewhere" / "moved")
    gather_docstrings(tmp_path / "again.jsonl", 0.2, [tmp_path / "elsewhere" / "moved"], workers=1)
    assert (tmp_path / "again.jsonl").read_bytes() == target.read_bytes()
    corpus = docstring_corpus(target)  # what is there is not gathered again
    assert {document.text: document.held_out for document in corpus.documents(RecordCounts())} == {
        record["text"]: record["held_out"] for record in records
    }


def test_a_killed_worker_raises_one_clear_sentence() -> None:
    with pytest.raises(DataError, match="A worker process was killed"), worker_pool(1) as pool:
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


@given(st.dictionaries(st.text(min_size=1, max_size=6), st.integers(1, 1000), min_size=1), st.floats(0.01, 0.9))
@settings(max_examples=60, deadline=None)
def test_packages_are_held_out_within_the_share(sizes: Any, share: Any) -> None:
    chosen = choose_held_out(sizes, share)
    assert chosen
    total = sum(sizes.values())
    assert sum(sizes[name] for name in chosen) <= share * total or chosen == {min(sizes, key=lambda name: sizes[name])}


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 512])
def test_packing_docstrings_fills_at_least_98_percent_of_the_slots(tmp_path: Path, length: Any) -> None:
    """Uses only the standard library's documentation, which is small."""
    gather_docstrings(tmp_path / "docstrings.jsonl", roots=python_roots()[:1])
    corpus = docstring_corpus(tmp_path / "docstrings.jsonl")
    tokenizer = train_tokenizer("wordpiece", 8192, corpus.sample(4 * 10**6))
    store = prepare(corpus, tokenizer, tmp_path / "tokens", workers=1)
    train = store.train
    assert 0 < store.held_out.lengths[:].sum() < 0.05 * train.lengths[:].sum()
    stream = PackedStream([StreamSource(train)], length, 2, seed=0)
    rows, _ = stream.take(Position(), 2500)
    assert sum(len(chunk.ids) + 2 for row in rows for chunk in row) >= 0.98 * 2500 * length
