"""Tokenizers and token shards: exactness, resuming, and the commands that write them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from bertblocks.cli.main import app
from bertblocks.data.corpus import FileCorpus, RecordCounts
from bertblocks.data.prepare import make_shard, prepare
from bertblocks.data.tokens import TokenStore
from bertblocks.text.records import DataError
from bertblocks.text.tokenizer_training import train_tokenizer
from bertblocks.text.tokenizers import load_fast_tokenizer

WORDS = ["the", "model", "reads", "texts", "of", "many", "words", "and", "hidden", "ones", "it", "predicts"]


def make_texts(count: Any, seed: Any = 0) -> Any:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(1, 40))) + "." for _ in range(count)]


def write_texts(path: Any, texts: Any) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer("wordpiece", 120, make_texts(50))


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    write_texts(tmp_path / "a.jsonl", make_texts(600))
    return FileCorpus((str(tmp_path / "a.jsonl"),), held_out=0.1, shard_bytes=8_000)


# ---------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_trained_tokenizer_opens_in_transformers(tmp_path: Path, kind: Any) -> None:
    train_tokenizer(kind, 320, make_texts(200)).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) <= 320
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 1, 2, 3, 4]
    assert [
        tokenizer.pad_token,
        tokenizer.unk_token,
        tokenizer.cls_token,
        tokenizer.sep_token,
        tokenizer.mask_token,
    ] == special
    pair = tokenizer("the model", "it reads", return_token_type_ids=True)
    tokens = tokenizer.convert_ids_to_tokens(pair.input_ids)
    assert tokens[0] == "[CLS]"
    assert tokens[-1] == "[SEP]"
    middle = tokens.index("[SEP]")
    assert middle < len(tokens) - 1
    assert pair.token_type_ids == [0] * (middle + 1) + [1] * (len(tokens) - middle - 1)
    masked = tokenizer("the [MASK] reads", add_special_tokens=False).input_ids
    assert masked == tokenizer.convert_tokens_to_ids(["the", "[MASK]", "reads" if kind == "wordpiece" else "Ġreads"])
    assert (
        tokenizer.decode(tokenizer("the model reads.").input_ids, skip_special_tokens=True).strip()
        == "the model reads."
    )


def test_byte_level_bpe_is_lossless() -> None:
    tokenizer = train_tokenizer("bpe", 300, ["a b"])
    text = "Ünïcode 四 \t tabs\nand 🙂 lines"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_tokenizer_training_is_deterministic(kind: Any) -> None:
    """The WordPiece trainer of the tokenizers library gives a different vocabulary at every call."""
    texts = [*make_texts(80), *(f"rare{character} word{character}{character}" for character in "äßçðéfghij0123456789")]
    vocabularies = [train_tokenizer(kind, 300, texts).get_vocab() for _ in range(4)]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(vocabularies[0]) == 300 or kind == "wordpiece"


def test_wordpiece_learns_the_frequent_parts_of_words() -> None:
    texts = ["lower newest widest " * 10, "low " * 50]
    tokenizer = train_tokenizer("wordpiece", 60, texts)
    letters = set("".join(texts)) - {" "}
    vocabulary = tokenizer.get_vocab()
    assert letters | {f"##{letter}" for letter in letters} <= set(vocabulary)
    assert "low" in vocabulary
    assert tokenizer.tokenize("LOW lowest sit") == ["low", "low", "##est", "s", "##i", "##t"]
    assert tokenizer.tokenize("low¿") == ["low", "[UNK]"]


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("bpe", 100, "vocab_size is 100; a bpe tokenizer needs at least 261"),
        ("unigram", 100, "'unigram'; it must be wordpiece or bpe"),
    ],
)
def test_impossible_tokenizer_settings_raise(kind: Any, size: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(kind, size, ["a"])


def test_a_folder_without_a_tokenizer_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder with a tokenizer"):
        load_fast_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="Cannot load a tokenizer"):
        load_fast_tokenizer(tmp_path)


# ---------------------------------------------------------------------- shards


def test_token_shards_contain_what_the_tokenizer_returns(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    store = prepare(corpus, tokenizer, tmp_path / "store", workers=1)
    texts = make_texts(600)
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert len(store) == 600
    train, held_out = store.train, store.held_out
    is_held_out = [document.held_out for document in corpus.documents(RecordCounts())]
    for documents, flag in ((train, False), (held_out, True)):
        own = [ids for ids, held in zip(expected, is_held_out, strict=True) if held is flag]
        assert [documents[index].tolist() for index in range(len(documents))] == own
        assert documents.lengths[:].tolist() == [len(ids) for ids in own]
        assert documents.lengths[3:5].tolist() == [len(ids) for ids in own[3:5]]
    assert train[0].dtype == np.int32
    assert 0 < len(held_out) < 200
    with pytest.raises(IndexError, match="none of number 600"):
        train[600]
    assert store.counts == {
        "documents": 600,
        "bad_records": 0,
        "tokens": sum(map(len, expected)),
        "held_out_documents": len(held_out),
        "held_out_tokens": int(held_out.lengths[:].sum()),
    }


def test_shards_are_memory_mapped_arrow_files_of_datasets(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    import datasets

    store = prepare(corpus, tokenizer, tmp_path / "store", workers=1)
    files = sorted((tmp_path / "store").glob("*.arrow"))
    assert len(files) > 3
    table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    assert table.filter(lambda row: not row["held_out"])[7]["ids"] == store.train[7].tolist()
    assert not store.train[7].flags.owndata
    assert not store.train[7].flags.writeable


def test_names_of_special_tokens_in_a_text_are_tokenized_as_text(tmp_path: Path, tokenizer: Any) -> None:
    write_texts(tmp_path / "a.jsonl", ["the [MASK] model", "[CLS] it"])
    store = prepare(FileCorpus((str(tmp_path / "a.jsonl"),)), tokenizer, tmp_path / "store", workers=1)
    ids = np.concatenate([store.train[0], store.train[1]])
    assert not np.isin(ids, [2, 3, 4]).any()


def test_several_processes_give_the_same_files(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    for workers in (1, 2):
        prepare(corpus, tokenizer, tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def contents(folder: Any) -> Any:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_existing_shards_are_reused(
    tmp_path: Path, corpus: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    prepare(corpus, tokenizer, folder, workers=1)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    made = []
    monkeypatch.setattr("bertblocks.data.prepare.make_shard", lambda *args: made.append(args) or make_shard(*args))  # type: ignore[func-returns-value]
    prepare(corpus, tokenizer, folder, workers=1)
    assert not made
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()} == before
    (folder / "shard-00002.json").unlink()
    prepare(corpus, tokenizer, folder, workers=1)
    assert [args[-1] for args in made] == [2]


def test_overwrite_replaces_tokens_of_another_corpus_or_tokenizer(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    folder = tmp_path / "store"
    prepare(corpus, tokenizer, folder, workers=1)
    other = train_tokenizer("bpe", 300, make_texts(50))
    with pytest.raises(DataError, match="has tokens of another corpus or tokenizer"):
        prepare(corpus, other, folder, workers=1)
    store = prepare(corpus, other, folder, workers=1, overwrite=True)
    first = next(document.text for document in corpus.documents(RecordCounts()) if not document.held_out)
    assert store.train[0].tolist() == other(first, add_special_tokens=False).input_ids
    write_texts(tmp_path / "a.jsonl", make_texts(5))
    store = prepare(corpus, other, folder, workers=1, overwrite=True)
    assert len(store) == 5
    assert len(list(folder.glob("*.arrow"))) == 1


def test_bad_records_are_reported_and_raise_beyond_the_allowed_share(tmp_path: Path, tokenizer: Any) -> None:
    write_texts(tmp_path / "a.jsonl", [*make_texts(30), "", *make_texts(30, 1), "", *make_texts(30, 2)])
    corpus = FileCorpus((str(tmp_path / "a.jsonl"),), shard_bytes=3000)
    with pytest.raises(DataError, match=r"2 of 92 records cannot be used.*a\.jsonl line 31: the text is empty"):
        prepare(corpus, tokenizer, tmp_path / "store", workers=1)
    # asked again it still says so, and with a larger share it goes on without tokenizing again
    with pytest.raises(DataError, match="2 of 92"):
        prepare(corpus, tokenizer, tmp_path / "store", workers=1)
    store = prepare(corpus, tokenizer, tmp_path / "store", workers=1, max_bad_share=0.05)
    assert store.bad_records == [f"{tmp_path}/a.jsonl line {line}: the text is empty" for line in (31, 62)]
    assert store.counts["bad_records"] == 2


def test_a_folder_without_tokens_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokens\.json; write it with `bertblocks data prepare`"):
        TokenStore(tmp_path)


def test_a_flipped_byte_in_a_shard_raises(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    """A flipped token id would silently train different weights."""
    folder = tmp_path / "store"
    prepare(corpus, tokenizer, folder, workers=1)
    shard = folder / "shard-00001.arrow"
    content = shard.read_bytes()
    for position in np.random.default_rng(0).integers(0, len(content), 30).tolist():
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"shard-00001\.arrow is damaged .*; delete it and shard-00001\.json"):
            TokenStore(folder)
    # the advice of the message helps
    shard.unlink()
    (folder / "shard-00001.json").unlink()
    prepare(corpus, tokenizer, folder, workers=1)
    assert shard.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("shard-00000.arrow", b""),
        ("shard-00000.arrow", None),
        ("tokens.json", b"{oops"),
        ("tokens.json", b"{}"),
        ("tokens.json", b'{"counts": {}, "bad_records": [], "fingerprint": "x", "shards": 3}'),
        ("shard-00000.json", b"{}"),
        ("plan.json", b"[]"),
    ],
)
def test_damaged_token_shards_raise_one_clear_sentence(
    tmp_path: Path, corpus: Any, tokenizer: Any, name: Any, content: Any
) -> None:
    folder = tmp_path / "store"
    prepare(corpus, tokenizer, folder, workers=1)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    if name == "shard-00000.json":
        (folder / "tokens.json").unlink()
    with pytest.raises((OSError, ValueError), match=name):
        TokenStore(folder) if name == "tokens.json" else prepare(corpus, tokenizer, folder, workers=1)


def test_token_shards_without_checksums_still_open(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    folder = tmp_path / "store"
    prepare(corpus, tokenizer, folder, workers=1)
    info = json.loads((folder / "tokens.json").read_text())
    del info["checksums"]
    (folder / "tokens.json").write_text(json.dumps(info))
    assert len(TokenStore(folder)) == 600


def test_token_shards_of_earlier_versions_have_the_same_documents(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    """They have neither tables of documents nor the files that join them."""
    folder = tmp_path / "store"
    store = prepare(corpus, tokenizer, folder, workers=1)
    expected = [[part[index].tolist() for index in range(len(part))] for part in (store.train, store.held_out)]
    info = json.loads((folder / "tokens.json").read_text())
    for path in [*folder.glob("*.npy"), *folder.glob("*.lengths"), *folder.glob("*.starts")]:
        info["checksums"].pop(path.name, None)
        path.unlink()
    del info["documents"]
    (folder / "tokens.json").write_text(json.dumps(info))
    for opened in (TokenStore(folder), prepare(corpus, tokenizer, folder, workers=1)):
        parts = (opened.train, opened.held_out)
        assert [[part[index].tolist() for index in range(len(part))] for part in parts] == expected
    (folder / "tokens.json").unlink()
    assert prepare(corpus, tokenizer, folder, workers=1).train[3].tolist() == expected[0][3]
    assert (folder / "train.lengths").stat().st_size == 4 * len(expected[0])


@pytest.mark.parametrize("name", ["train.lengths", "held_out.starts"])
def test_a_damaged_index_is_named_with_what_helps(tmp_path: Path, corpus: Any, tokenizer: Any, name: str) -> None:
    folder = tmp_path / "store"
    prepare(corpus, tokenizer, folder, workers=1)
    content = bytearray((folder / name).read_bytes())
    content[5] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged .*; delete tokens.json and run"):
        TokenStore(folder)
    (folder / name).write_bytes(content[:-4])
    with pytest.raises(ValueError, match=f"{name} has .* bytes, not"):
        TokenStore(folder, verify=False)
    (folder / "tokens.json").unlink()
    assert len(prepare(corpus, tokenizer, folder, workers=1)) == 600


KILLED = """
import sys
from bertblocks.data.corpus import FileCorpus
from bertblocks.data.prepare import prepare
from bertblocks.text.tokenizers import load_fast_tokenizer
corpus = FileCorpus((sys.argv[1],), held_out=0.1, shard_bytes=8_000)
tokenizer = load_fast_tokenizer(sys.argv[2])
prepare(corpus, tokenizer, sys.argv[3], workers=1, on_shard=lambda done, total: print(done, flush=True))
"""


def test_a_killed_preparation_resumes_to_the_same_files(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepare(corpus, load_fast_tokenizer(tmp_path / "tokenizer"), tmp_path / "whole", workers=1)
    command = [sys.executable, "-c", KILLED, corpus.files[0], str(tmp_path / "tokenizer"), str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "3":
            break
    time.sleep(0.002)  # in the middle of the next shard
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("shard-*.json")}
    assert 3 <= len(finished) < len(corpus.shards())
    assert not (tmp_path / "killed" / "tokens.json").exists()
    prepare(corpus, load_fast_tokenizer(tmp_path / "tokenizer"), tmp_path / "killed", workers=1)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    for name, written in finished.items():
        assert (tmp_path / "killed" / name).stat().st_mtime_ns == written


SLOW = """
import sys, time
from bertblocks.data.corpus import FileCorpus
from bertblocks.data.prepare import prepare
from bertblocks.text.tokenizers import load_fast_tokenizer

class SlowCorpus(FileCorpus):
    def read(self, shard):
        for document in super().read(shard):
            time.sleep(0.02)
            yield document

if __name__ == "__main__":
    corpus = SlowCorpus((sys.argv[1],), held_out=0.1, shard_bytes=8_000)
    prepare(corpus, load_fast_tokenizer(sys.argv[2]), sys.argv[3], workers=2)
"""


def test_workers_end_with_a_killed_parent_and_a_restart_succeeds(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    import psutil

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "slow.py").write_text(SLOW)
    folder = tmp_path / "store"
    command = [sys.executable, tmp_path / "slow.py", corpus.files[0], tmp_path / "tokenizer", folder]
    process = subprocess.Popen([str(part) for part in command])
    wait_for(lambda: list(folder.glob(".shard-*.partial")), 120)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    with pytest.raises(DataError, match="Another process is writing tokens to"):
        prepare(corpus, tokenizer, folder, workers=1)
    process.kill()
    process.wait()
    store = prepare(corpus, tokenizer, folder, workers=1)
    assert sorted([*store.train.lengths[:].tolist(), *store.held_out.lengths[:].tolist()]) == sorted(
        len(tokenizer(text, add_special_tokens=False).input_ids) for text in make_texts(600)
    )
    wait_for(lambda: not any(worker.is_running() for worker in workers), 20)
    assert not list(folder.glob("*.partial"))


def wait_for(condition: Any, seconds: Any) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------------- commands


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_commands_train_a_tokenizer_and_prepare_a_corpus(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", [*make_texts(200), ""])
    done = run("tokenizer", "train", tmp_path / "tokenizer", tmp_path / "a.jsonl", "--vocab-size", 100)
    assert done.exit_code == 0, done.output
    size = len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    assert f"a wordpiece tokenizer of {size} entries" in done.output
    prepared = run(
        "data", "prepare", tmp_path / "store", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "tokenizer", "--json"
    )
    assert prepared.exit_code == 0, prepared.output
    counts = json.loads(prepared.stdout)
    assert (counts["documents"], counts["bad_records"]) == (200, 1)
    assert counts["tokens"] == TokenStore(tmp_path / "store").train.lengths[:].sum()
    assert f"bad record: {tmp_path}/a.jsonl line 201: the text is empty" in prepared.stderr


def test_a_complete_folder_has_nothing_of_workers_that_were_killed(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    """A worker of a cluster may die while others write, and one of them writes its shard."""
    folder = tmp_path / "tokens"

    def kill_one(done: int, total: int) -> None:
        if done < total:
            (folder / f".shard-{done:05d}.arrow-killed.partial").write_bytes(b"half")

    prepare(corpus, tokenizer, folder, workers=1, on_shard=kill_one)
    assert not list(folder.glob(".*.partial"))


def test_workers_with_shards_of_their_own_write_the_files_of_one(tmp_path: Path, tokenizer: Any) -> None:
    for number in range(5):
        write_texts(tmp_path / f"{number}.jsonl", make_texts(300, number))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = [tmp_path / "*.jsonl", "--tokenizer", tmp_path / "tokenizer", "--held-out", "0.1", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertblocks.data.corpus.SHARD_BYTES", 8_000)
        patch.setattr("bertblocks.data.corpus.FileCorpus.shard_bytes", 8_000)
        assert run("data", "prepare", tmp_path / "one", *arguments, "--workers", 1).exit_code == 0
        results = []
        for worker in ("1/3", "2/3", "0/3"):
            done = run("data", "prepare", tmp_path / "three", *arguments, "--workers", 1, "--shard", worker)
            assert done.exit_code == 0, done.output
            results.append(json.loads(done.stdout))
    assert [result.get("is_complete") for result in results] == [False, False, None]
    assert results[-1]["documents"] == 1500
    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    verified = [run("data", "verify", tmp_path / "three", "--json", "--shard", f"{i}/2") for i in range(2)]
    assert (
        sum(json.loads(done.stdout)["files"] for done in verified)
        == len(list((tmp_path / "three").glob("*.arrow"))) + 4
    )
    wrong = run("data", "prepare", tmp_path / "three", *arguments, "--shard", "3/3")
    assert wrong.exit_code == 1
    assert "--shard is '3/3'; it must be I/N" in wrong.stderr


def test_texts_and_tokens_may_be_at_an_address(
    tmp_path: Path, corpus: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files come when they are first used, and are compared with their checksums."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("BERTBLOCKS_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path / "a.jsonl"), "/texts/a.jsonl")
    remote = FileCorpus(("memory://texts/*.jsonl",), held_out=0.1)
    texts = [document.text for document in remote.documents(RecordCounts())]
    assert texts == make_texts(600)
    here = prepare(corpus, tokenizer, tmp_path / "store", workers=1)
    system.put(str(tmp_path / "store"), "/tokens", recursive=True)
    store = TokenStore("memory://tokens")
    assert not list(store.folder.glob("*.arrow"))
    assert store.train[0].tolist() == here.train[0].tolist()
    assert [path.name for path in store.folder.glob("*.arrow")] == ["shard-00000.arrow"]
    last = len(here.train) - 1
    system.pipe_file("/tokens/" + here.shards[-1], b"damaged!")
    with pytest.raises(ValueError, match="does not have the checksum"):
        store.train[last]
    system.put(str(tmp_path / "store" / here.shards[-1]), "/tokens/" + here.shards[-1])
    assert TokenStore("memory://tokens").train[last].tolist() == here.train[last].tolist()
    with pytest.raises(FileNotFoundError, match=r"memory://none has no tokens\.json"):
        TokenStore("memory://none")


def test_verify_names_a_damaged_file(tmp_path: Path, corpus: Any, tokenizer: Any) -> None:
    prepare(corpus, tokenizer, tmp_path / "store", workers=1)
    shard = tmp_path / "store" / "shard-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    done = run("data", "verify", tmp_path / "store")
    assert done.exit_code == 1
    assert "shard-00001.arrow is damaged (its checksum differs)" in done.stderr


def test_a_full_disk_while_a_tokenizer_is_written_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    write_texts(tmp_path / "a.jsonl", make_texts(50))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python does not notice that a file is cut
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # writing beyond fails as on a full disk
    try:
        result = run("tokenizer", "train", tmp_path / "tokenizer", tmp_path / "a.jsonl", "--vocab-size", 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 1
    assert "Cannot write the tokenizer" in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_data_commands_report_errors_in_one_sentence(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_texts(tmp_path / "a.jsonl", [""])
    common = ["--tokenizer", tmp_path / "tokenizer"]
    cases = [
        (["data", "prepare", tmp_path / "store", *common], "Give exactly one of FILES, --dataset and --docstrings."),
        (["data", "prepare", tmp_path / "store", tmp_path / "b.txt", *common], "b.txt: no such file or folder"),
        (["data", "prepare", tmp_path / "store", tmp_path / "a.jsonl", *common], "1 of 1 records cannot be used"),
        (
            ["data", "prepare", tmp_path / "store", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "x"],
            "is not a folder with",
        ),
        (
            ["tokenizer", "train", tmp_path / "t", tmp_path / "a.jsonl", "--kind", "bpe", "--vocab-size", 20],
            "at least 261",
        ),
    ]
    for arguments, message in cases:
        result = run(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr
        assert "Traceback" not in result.output
