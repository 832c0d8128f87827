"""Hard negatives by rules that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertblocks.search import mining
from bertblocks.search.index import SearchIndex
from bertblocks.search.mining import Miner, MiningError, MiningSettings
from bertblocks.search.mining_run import mine
from bertblocks.tasks.retrieval.examples import read_retrieval_data
from bertblocks.text.records import DataError
from tests.search.helpers import random_vectors, write

#: The score of a document for the query "1 0" is its first number, and for a reranker its second.
CORPUS = [f"{score / 10} {(score * 7) % 10}|document {score}" for score in range(10)]
POSITIVE = CORPUS[8]


@pytest.fixture
def index(fake: Path, tmp_path: Path) -> SearchIndex:
    return SearchIndex.build(tmp_path / "index", [*CORPUS, {"id": "copy", "text": CORPUS[7]}], model=fake)


def find(
    index: SearchIndex, reranker: Any = None, positives: tuple[str, ...] = (POSITIVE,), **settings: Any
) -> tuple[list[int], dict[str, int]]:
    settings = {"ranks": (1, 20), "negatives": 20, **settings}
    [mined] = Miner(index, MiningSettings(**settings), reranker).mine([("1 0", positives)])
    return [int(text.rpartition(" ")[2]) for text in mined.negatives], mined.rejected


def test_positives_and_copies_are_never_negatives(index: SearchIndex) -> None:
    numbers, rejected = find(index)
    assert numbers == [9, 7, 6, 5, 4, 3, 2, 1, 0]
    assert rejected == {mining.POSITIVE: 1, mining.DUPLICATE: 1}
    numbers, rejected = find(index, positives=(POSITIVE, CORPUS[7]))
    assert numbers == [9, 6, 5, 4, 3, 2, 1, 0]
    assert rejected == {mining.POSITIVE: 3}


def test_each_rule_rejects_what_it_says(index: SearchIndex) -> None:
    common = {mining.POSITIVE: 1, mining.DUPLICATE: 1}
    assert find(index, ranks=(4, 6), negatives=3)[0] == [6, 5, 4]  # places count without the positive
    assert find(index, margin=0.25) == ([5, 4, 3, 2, 1, 0], common | {mining.MARGIN: 3})
    assert find(index, relative_margin=0.2) == ([6, 5, 4, 3, 2, 1, 0], common | {mining.RELATIVE: 2})
    assert find(index, max_score=0.35) == ([3, 2, 1, 0], common | {mining.HIGH: 5})
    assert find(index, min_score=0.65) == ([9, 7], common | {mining.LOW: 7})
    assert find(index, negatives=2) == ([9, 7], common | {mining.SPARE: 7})
    # the lowest positive counts
    assert find(index, positives=(POSITIVE, CORPUS[5]), margin=0.0)[0] == [4, 3, 2, 1, 0]


def test_a_reranker_rejects_what_it_prefers_to_the_positive(index: SearchIndex, fake: Path) -> None:
    # its scores are 0 7 4 1 8 5 2 9 6 3, and 6 for the positive
    numbers, rejected = find(index, reranker=fake)
    assert numbers == [9, 6, 5, 3, 2, 0]
    assert rejected[mining.RERANKED] == 3
    assert find(index, reranker=fake, rerank_margin=2.0)[0] == [9, 6, 3, 2, 0]


def test_random_negatives_depend_on_the_seed_alone(index: SearchIndex) -> None:
    first = find(index, sampling="random", negatives=3)[0]
    assert first == find(index, sampling="random", negatives=3)[0]
    drawn = [find(index, sampling="random", negatives=3, seed=seed)[0] for seed in range(60)]
    assert all(numbers == sorted(numbers, reverse=True) and len(set(numbers)) == 3 for numbers in drawn)
    assert set(np.concatenate(drawn).tolist()) == {0, 1, 2, 3, 4, 5, 6, 7, 9}


# ---------------------------------------------------------------------- files


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    pairs, corpus = tmp_path / "pairs.jsonl", tmp_path / "corpus.txt"
    rows = [
        {"query": "1 0", "positive": POSITIVE},
        {"query": "0 1", "positive": CORPUS[2]},
        {"query": "1 0", "positive": CORPUS[6]},
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus.write_text("\n".join(CORPUS))
    return pairs, corpus


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("layout", ["columns", "triplets", "lists"])
def test_what_is_written_is_what_finetuning_reads(
    ending: str, layout: Any, files: tuple[Path, Path], fake: Path, tmp_path: Path
) -> None:
    output = tmp_path / f"out.{ending}"
    settings = MiningSettings((1, 5), 2)
    if (layout, ending) == ("lists", "csv"):
        with pytest.raises(MiningError, match=r"out\.csv cannot hold lists"):
            mine(files[0], output, model=fake, corpus=[files[1]], settings=settings, layout=layout)
        return
    result = mine(files[0], output, model=fake, corpus=[files[1]], settings=settings, layout=layout)
    assert (result.queries, result.negatives, result.without_negatives) == (2, 4, 0)
    data = read_retrieval_data(output)
    assert data.shape == "lists"
    found: dict[tuple[str, str], list[str]] = {}
    for example in data.examples:
        found.setdefault((example.query, example.documents[0]), []).extend(example.documents[1:])
    # the reranker's number is the second dimension: 9 and 8 of documents 7 and 4
    assert found == {
        ("1 0", POSITIVE): [CORPUS[9], CORPUS[7]],
        ("1 0", CORPUS[6]): [CORPUS[9], CORPUS[7]],
        ("0 1", CORPUS[2]): [CORPUS[7], CORPUS[4]],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "model", f"out.{ending}", "pairs.jsonl"]


def test_an_interrupted_run_continues(
    files: tuple[Path, Path], fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tmp_path / "many.jsonl"
    rows = [{"query": f"{write(row)}|{n}", "positive": CORPUS[n % 10]} for n, row in enumerate(random_vectors(30, 2))]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(mining, "BATCH_QUERIES", 4)
    settings = MiningSettings((1, 6), 3, sampling="random")
    whole = mine(pairs, tmp_path / "whole.jsonl", model=fake, corpus=[files[1]], settings=settings)

    def stop(name: str, done: int, total: int | None) -> None:
        if name == "queries" and done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine(pairs, tmp_path / "out.jsonl", model=fake, corpus=[files[1]], settings=settings, on_step=stop)
    partial = tmp_path / "out.jsonl.partial"
    with (partial / "mined.jsonl").open("a") as file:
        file.write('{"query": "torn')
    with pytest.raises(MiningError, match="belongs to a run with another corpus or model"):
        mine(pairs, tmp_path / "out.jsonl", model=fake, corpus=[pairs], settings=settings)
    begun: list[int] = []
    again = mine(
        pairs,
        tmp_path / "out.jsonl",
        model=fake,
        corpus=[files[1]],
        settings=settings,
        on_step=lambda name, done, total: begun.append(done) if name == "queries" else None,
    )
    assert begun[0] == 11
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert again.rejected == whole.rejected
    assert not partial.exists()


def test_the_corpus_may_be_an_index_or_the_positives(files: tuple[Path, Path], fake: Path, tmp_path: Path) -> None:
    SearchIndex.build(tmp_path / "index", CORPUS[:3], model=fake)
    result = mine(files[0], tmp_path / "a.jsonl", corpus=[tmp_path / "index"], settings=MiningSettings((1, 5), 5))
    assert result.negatives == 3 + 2
    result = mine(files[0], tmp_path / "b.jsonl", model=fake, settings=MiningSettings((1, 5), 5))
    assert result.negatives == 1 + 2


def test_bad_input_leaves_nothing_behind(files: tuple[Path, Path], fake: Path, tmp_path: Path) -> None:
    pairs, corpus = files
    before = sorted(tmp_path.iterdir())
    for ranks, negatives, message in (
        ((0, 5), 1, "ranks is 0-5"),
        ((3, 2), 1, "ranks is 3-2"),
        ((1, 3), 4, "negatives is 4"),
    ):
        with pytest.raises(MiningError, match=message):
            MiningSettings(ranks, negatives)
    with pytest.raises(DataError, match=r"out\.txt must end in one of \.jsonl, \.csv, \.parquet"):
        mine(pairs, tmp_path / "out.txt", model=fake, corpus=[corpus])
    with pytest.raises(MiningError, match="Give a model and a corpus of files, or an index"):
        mine(pairs, tmp_path / "out.csv", corpus=[corpus])
    with pytest.raises(DataError, match=r"nothing\.txt: no such file"):
        mine(pairs, tmp_path / "out.csv", model=fake, corpus=[tmp_path / "nothing.txt"])
    with pytest.raises(FileExistsError, match=r"pairs\.jsonl already exists"):
        mine(pairs, pairs, model=fake, corpus=[corpus])
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(MiningError, match="No query has a negative that the settings allow"):
        mine(pairs, tmp_path / "out.csv", model=fake, corpus=[corpus], settings=MiningSettings(max_score=-9.0))
    assert not (tmp_path / "out.csv").exists()
