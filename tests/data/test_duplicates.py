"""Near-duplicate removal against brute-force Jaccard similarities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from bertblocks.cli.main import app
from bertblocks.data.corpus import FileCorpus, RecordCounts
from bertblocks.data.duplicates import HASHES, compare_signatures, find_duplicates, remove_duplicates, shingles
from bertblocks.text.tokenizer_training import train_tokenizer

WORDS = [f"w{number}" for number in range(2000)]


def jaccard(first: str, second: str) -> float:
    """The similarity of two texts by an independent count of their 5-word sequences."""
    sets = [{tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (first.split(), second.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def make_texts() -> list[str]:
    """Groups of copies with few or many changed words, so that no pair is near the threshold; in a random order."""
    random = np.random.default_rng(0)
    texts = []
    for changed in (0, 1, 2, 60, 100):
        for _ in range(6):
            words = random.choice(WORDS, size=200)
            texts.append(" ".join(words))
            for _ in range(2):
                copy = words.copy()
                copy[random.choice(200, size=changed, replace=False)] = "other"
                texts.append(" ".join(copy))
    return [texts[place] for place in random.permutation(len(texts))]


def write(path: Path, texts: list[str]) -> FileCorpus:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return FileCorpus((str(path),), shard_bytes=20_000)


def test_the_same_documents_stay_as_by_comparing_all_pairs(tmp_path: Path) -> None:
    texts = make_texts()
    kept: list[str] = []
    for number, text in enumerate(texts):
        closest = max((jaccard(text, other) for other in texts[:number]), default=0.0)
        assert not 0.4 < closest < 0.8, "the test should be clear-cut"
        if closest < 0.6:
            kept.append(text)
    assert 50 < len(kept) < len(texts) - 20
    corpus = write(tmp_path / "a.jsonl", texts)
    assert len(corpus.shards()) > 3
    counts = RecordCounts()
    distinct = remove_duplicates(corpus, tmp_path / "duplicates.json", 0.6, workers=1)
    assert [document.text for document in distinct.documents(counts)] == kept
    assert (counts.good, counts.duplicates) == (len(kept), len(texts) - len(kept))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "duplicates.json"]


def test_only_equal_texts_go_at_threshold_one_and_short_texts_are_compared_whole(tmp_path: Path) -> None:
    texts = ["A b c.", "a  B, c", "a b d", "a b c d e f", "a b c d e g", "", "a b c d e f"]
    corpus = write(tmp_path / "a.jsonl", texts)
    assert find_duplicates(corpus, tmp_path, 1.0, workers=1) == [[1, 5]]  # the empty text is not a document


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_bands_find_nearly_all_pairs_at_the_threshold(tmp_path: Path, threshold: float) -> None:
    """Of pairs of signatures that agree in each hash with the probability of the threshold, at least 93 % are found."""
    random = np.random.default_rng(0)
    first = random.integers(0, 2**32, (2000, HASHES), dtype=np.uint32)
    agrees = random.random(first.shape) < threshold
    second = np.where(agrees, first, random.integers(0, 2**32, first.shape, dtype=np.uint32))
    similar = np.mean(first == second, axis=1) >= threshold
    removed = compare_signatures([first, second], threshold)
    assert removed[0] == []
    assert set(removed[1]) <= set(np.flatnonzero(similar).tolist())
    assert len(removed[1]) > 0.93 * similar.sum() > 500


def test_words_of_scripts_without_spaces_are_their_characters() -> None:
    assert shingles("我们今天去学校") == {"我 们 今 天 去", "们 今 天 去 学", "今 天 去 学 校"}
    assert shingles("Größe 10, été") == {"größe 10 été"}


def test_duplicates_are_found_again_only_if_the_corpus_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, file = write(tmp_path / "a.jsonl", ["a b c", "a b c"]), tmp_path / "duplicates.json"
    first = remove_duplicates(corpus, file, 0.8, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr("bertblocks.data.duplicates.find_duplicates", lambda *arguments: pytest.fail("found again"))
        assert remove_duplicates(corpus, file, 0.8) == first
    changed = write(tmp_path / "a.jsonl", ["a b c", "a b d", "a b c"])
    assert remove_duplicates(changed, file, 0.8, workers=1).removed == ((2,),)


def test_the_command_shows_how_many_it_removed_and_resumes(tmp_path: Path) -> None:
    texts = make_texts()[:20]
    write(tmp_path / "a.jsonl", [*texts, *texts[:7]])
    train_tokenizer("wordpiece", 60, texts).save_pretrained(tmp_path / "tokenizer")
    command = ["data", "prepare", str(tmp_path / "tokens"), str(tmp_path / "a.jsonl"), "--dedup", "0.99", "--json"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1"]
    for _ in range(2):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        found: Any = json.loads(result.stdout)
        assert found["duplicates"] >= 7
        assert found["documents"] + found["duplicates"] == 27
    command[command.index("0.99")] = "0"
    assert "dedup is 0.0; it must be above 0" in CliRunner().invoke(app, command).stderr
    command[command.index("0")] = "0.5"
    assert "tokens of another corpus" in CliRunner().invoke(app, command).stderr
