"""Streaming, files, hardware choices and MTEB."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertblocks
from bertblocks import BertBlocksConfig, BertBlocksModel, Predictor
from bertblocks.core import cpu
from bertblocks.evaluation.mteb import MTEBEncoder
from bertblocks.inference import hardware, stream
from bertblocks.inference.progress import RunStats
from bertblocks.text.lines import Lines
from bertblocks.training.precision import choose_precision
from tests.small_tokenizers import wrap

WORDS = ["plain", "words", "are", "here", "two", "leading", "trailing"]


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(BertBlocksModel(BertBlocksConfig.from_preset("mini")), wrap("wordpiece"), token_budget=64)


def texts_of(count: int) -> list[str]:
    """Texts of all lengths, with neighbours that differ."""
    return [" ".join(WORDS[index % 5 : index % 5 + 1 + 3 * index % 7]) for index in range(count)]


# ---------------------------------------------------------------------- order and memory


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_results_are_in_the_order_of_the_texts(predictor: Any, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(stream, "MAX_ITEMS", 16)
    texts = texts_of(50)
    alone = np.concatenate([predictor.encode([text]) for text in texts])
    np.testing.assert_allclose(predictor.encode(kind(texts)), alone, atol=1e-6)
    assert predictor.stats.items == 50
    assert predictor.stats.tokens == sum(len(predictor.tokenizer(text)["input_ids"]) for text in texts)


def test_reading_ahead_from_an_endless_source_is_bounded(predictor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_ITEMS", 8)
    read = 0

    def endless() -> Iterator[Any]:
        nonlocal read
        for read in itertools.count(1):
            yield WORDS[read % 7]

    results = predictor.stream("encode", endless())
    for taken in range(1, 60):
        next(results)
        # one chunk being returned, one preprocessed, one in the queue, and one item held by the reader
        assert read <= taken + 4 * 8
    results.close()
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("bertblocks-tokenizer")}
    assert not threads


def test_reading_ahead_counts_characters_of_long_texts(predictor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_CHARACTERS", 100)
    sizes = []
    preprocess = predictor.pipeline("encode").preprocess
    source = stream._ListChunks(["x" * 60] * 5)
    while (chunk := source.next_chunk())[0]:
        sizes.append(len(preprocess(*chunk)))
    assert sizes == [2, 2, 1]


def test_results_do_not_wait_for_a_source_that_pauses(predictor: Any) -> None:
    """The next text is sent only after the result of the last one: a held-back result would hang the test."""
    questions: queue.Queue[str | None] = queue.Queue()
    results = predictor.stream("encode", iter(questions.get, None))
    for word in WORDS[:3]:
        questions.put(word)
        np.testing.assert_allclose(next(results), predictor.encode([word])[0], atol=1e-6)
    questions.put(None)
    assert list(results) == []


def test_errors_of_the_input_iterator_reach_the_caller(predictor: Any) -> None:
    def broken() -> Iterator[Any]:
        yield "plain"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        predictor.encode(broken())


def test_an_error_of_the_input_iterator_comes_after_earlier_results(predictor: Any) -> None:
    def broken() -> Iterator[Any]:
        yield from WORDS
        raise OSError("the disk is gone")

    results = predictor.stream("encode", broken())
    assert len([next(results) for _ in WORDS]) == len(WORDS)
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


@pytest.mark.parametrize("kind", [list, iter])
def test_a_bad_input_raises_after_the_results_before_it(predictor: Any, kind: Any) -> None:
    results = predictor.stream("encode", kind(["plain", "words", None, "here"]))
    np.testing.assert_allclose([next(results), next(results)], predictor.encode(["plain", "words"]), atol=1e-6)
    with pytest.raises(TypeError, match="Text 2 is None; it must be a string"):
        next(results)


@pytest.mark.parametrize("kind", [list, iter])
def test_errors_can_be_returned_in_place_of_results(predictor: Any, kind: Any) -> None:
    results = list(predictor.stream("encode", kind(["plain", None, "here", "\ud83d"]), return_exceptions=True))
    assert [type(result) for result in results] == [np.ndarray, TypeError, np.ndarray, ValueError]
    np.testing.assert_allclose([results[0], results[2]], predictor.encode(["plain", "here"]), atol=1e-6)
    assert str(results[3]).startswith("Text 3 contains half of a surrogate pair")


def test_read_ahead_is_bounded_in_characters(predictor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_CHARACTERS", 1000)
    read = 0

    def long_texts() -> Iterator[Any]:
        nonlocal read
        while read < 100:
            read += 1
            yield "plain " * 200

    results = predictor.stream("encode", long_texts())
    next(results)
    time.sleep(0.3)
    # one text being returned, one preprocessed, one waiting, and one held by the reader
    assert read <= 4
    results.close()


def test_bad_inputs_are_numbered_across_the_whole_stream(predictor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_ITEMS", 4)
    results = predictor.stream("encode", iter([*texts_of(10), 7]))
    with pytest.raises(TypeError, match="Text 10 is 7; it must be a string"):
        list(results)


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    seen = []

    class Watching(BertBlocksModel):
        def encode(self, *arguments: Any, **options: Any) -> Any:
            seen.append(torch.get_num_threads())
            return super().encode(*arguments, **options)

    Predictor(Watching(BertBlocksConfig.from_preset("mini")), wrap("wordpiece"), threads=2).encode(["plain"])
    assert seen == [2]
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- files


def test_a_path_means_the_lines_of_the_file(predictor: Any, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeffplain words\r\n\ntwo 北京".encode())
    assert list(Lines(path)) == ["plain words", "", "two 北京"]
    assert Lines(path).count() == 3
    np.testing.assert_allclose(predictor.encode(path), predictor.encode(["plain words", "", "two 北京"]), atol=1e-6)
    (tmp_path / "empty.txt").touch()
    assert predictor.encode(tmp_path / "empty.txt").shape == (0, 64)


def test_a_line_that_is_not_utf8_raises_an_error_that_names_it(predictor: Any, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("plain\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt line 2: byte 0xe9 is not UTF-8"):
        predictor.encode(path)
    with pytest.raises(FileNotFoundError):
        predictor.encode(tmp_path / "missing.txt")


# ---------------------------------------------------------------------- progress


def test_progress_shows_counts_speed_and_time_left(
    predictor: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    predictor.encode(texts_of(20), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "20/20" in shown.err
    assert f"{predictor.stats.tokens:,} tokens" in shown.err
    assert "tokens/s" in shown.err


def test_run_stats_are_written_as_a_sentence() -> None:
    stats = RunStats(items=1200, tokens=30_000, seconds=2.0)
    assert str(stats) == "1,200 texts, 30,000 tokens in 2.0 s (15,000 tokens/s)"


# ---------------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        ({}, 8),
    ],
)
def test_threads_stay_within_the_container(monkeypatch: pytest.MonkeyPatch, files: Any, cpus: Any) -> None:
    class FakePath:
        def __init__(self, name: Any) -> None:
            self.name = name

        def read_text(self) -> Any:
            if self.name not in files:
                raise FileNotFoundError(self.name)
            return files[self.name]

    monkeypatch.setattr(cpu, "Path", FakePath)
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(hardware.torch, "get_num_threads", lambda: 64)
    assert hardware.choose_threads() == cpus


@pytest.mark.parametrize(
    ("vendor", "flags", "level", "has_units"),
    [
        ("AuthenticAMD", "avx512f", 16, False),
        ("AuthenticAMD", "avx512f avx512_bf16", 16, True),
        ("GenuineIntel", "avx512f avx512_bf16", 31, False),  # no faster than fp32
        ("GenuineIntel", "avx512f avx512_bf16 amx_tile amx_bf16", 31, True),
        ("GenuineIntel", "avx512f avx512_bf16 amx_tile amx_bf16", 28, False),  # a virtual machine that hides the tiles
    ],
)
def test_bfloat16_is_chosen_where_the_cpu_multiplies_it_faster(
    monkeypatch: pytest.MonkeyPatch, vendor: Any, flags: Any, level: Any, has_units: Any
) -> None:
    info = {"vendor_id": vendor, "flags": flags, "cpuid level": str(level)}
    monkeypatch.setattr(cpu, "cpu_info", lambda: info)
    monkeypatch.setattr(hardware.torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512_bf16" in flags)
    assert hardware.choose_dtype(torch.device("cpu")) == (torch.bfloat16 if has_units else torch.float32)
    assert choose_precision("auto", torch.device("cpu")) == ("bf16" if has_units else "fp32")
    assert choose_precision("fp32", torch.device("cpu")) == "fp32"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cpu.configure_onednn()
    assert ("ONEDNN_MAX_CPU_ISA" in os.environ) == ("amx_tile" in flags and level == 28)


# ---------------------------------------------------------------------- MTEB


@pytest.fixture
def task() -> Any:
    """Pairs of sentences with scores, in memory."""
    pytest.importorskip("mteb")
    datasets = pytest.importorskip("datasets")
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class SmallSTS(AbsTaskSTS):
        min_score, max_score = 0, 5
        metadata = TaskMetadata(
            name="SmallSTS",
            description="A few pairs.",
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            dataset={"path": "none/none", "revision": "none"},
        )

        def load_data(self, num_proc: int | None = None, *, timer: Any = None, **options: Any) -> None:
            rows = {
                "sentence1": texts_of(12),
                "sentence2": texts_of(17)[5:],
                "score": [float(i % 6) for i in range(12)],
            }
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
            self.data_loaded = True

    return SmallSTS()


def test_mteb_accepts_the_encoder(predictor: Any, task: Any) -> None:
    import mteb
    from mteb.models import EncoderProtocol

    encoder = MTEBEncoder(predictor, name="me/mini")
    assert isinstance(encoder, EncoderProtocol)
    results = mteb.evaluate(encoder, task, cache=None)
    first, second = predictor.encode(texts_of(12)), predictor.encode(texts_of(17)[5:])
    expected = np.corrcoef((first * second).sum(-1), [float(i % 6) for i in range(12)])[0, 1]
    score = results.task_results[0].scores["test"][0]["cosine_pearson"]
    assert score == pytest.approx(expected, abs=1e-4)
    assert results.model_name == "me/mini"


def test_mteb_similarities_are_cosines(predictor: Any) -> None:
    encoder = MTEBEncoder(predictor)
    a, b = np.random.default_rng(0).normal(size=(2, 3, 4))
    expected = (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(encoder.similarity(a, b), expected)
    np.testing.assert_allclose(encoder.similarity_pairwise(a, torch.tensor(b)), np.diag(expected))


def test_the_predictor_is_exported_lazily() -> None:
    assert bertblocks.Predictor is Predictor
