"""An index keeps, changes and returns documents, and rejects what it cannot use in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification, BertBlocksModel, Predictor
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, save_embedder
from bertblocks.core.storage import lock_folder
from bertblocks.search.documents import read_documents
from bertblocks.search.index import SearchIndex
from bertblocks.search.manifest import SearchIndexError, _digest
from bertblocks.text.records import DataError
from tests.helpers import tiny_config
from tests.search.helpers import contents, make_model
from tests.small_tokenizers import wrap


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and prompts for both roles."""
    folder = tmp_path_factory.mktemp("models") / "embedder"
    model = BertBlocksModel(tiny_config(vocab_size=120))
    settings = EmbeddingSettings(prompts={"query": "plain ", "document": "words "})
    save_embedder(model, folder, wrap("wordpiece"), settings)
    return folder


def test_scores_are_cosines_of_the_models_own_embeddings(embedder: Path, tmp_path: Path) -> None:
    texts = ["two leading", "are here", "trailing don't", "xxxxxxxx été"]
    index = SearchIndex.build(tmp_path / "index", texts, model=embedder, threads=1)
    predictor = Predictor(embedder, threads=1)
    documents = predictor.encode([f"words {text}" for text in texts], prompt="")
    query = predictor.encode(["plain here"], prompt="")[0]
    expected = sorted(zip((documents @ query).tolist(), texts, strict=True), reverse=True)
    hits = index.search("here", top_k=4)
    assert [hit.text for hit in hits] == [text for _, text in expected]
    assert [hit.score for hit in hits] == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_prompts_and_dimensions_can_be_set(embedder: Path, tmp_path: Path) -> None:
    settings = {"query_prompt": "are ", "document_prompt": "", "dimensions": 8}
    SearchIndex.build(tmp_path / "index", ["two leading"], model=embedder, settings=settings, threads=1)
    predictor = Predictor(embedder, threads=1)
    vectors = predictor.encode(["two leading", "are here"], prompt="", dimensions=8)
    assert SearchIndex.open(tmp_path / "index").search("here")[0].score == pytest.approx(
        vectors[0] @ vectors[1], abs=1e-5
    )


def test_documents_of_a_table_keep_their_columns(fake: Path, tmp_path: Path) -> None:
    table = tmp_path / "documents.csv"
    table.write_text("id,text,year\na,1 0,1990\nb,0 1,1991\n")
    (tmp_path / "more.jsonl").write_text(
        '{"_id": 7, "title": "T", "text": "1 1"}\n{"_id": 8, "text": "0 2", "n": {"x": [1]}}\n'
    )
    index = SearchIndex.build(tmp_path / "index", read_documents([table, tmp_path / "more.jsonl"]), model=fake)
    found = {hit.id: (hit.text, hit.columns) for hit in SearchIndex.open(tmp_path / "index").search("1 1")}
    assert found == {
        "a": ("1 0", {"year": "1990"}),
        "b": ("0 1", {"year": "1991"}),
        "7": ("1 1", {"title": "T"}),
        "8": ("0 2", {"n": {"x": [1]}}),
    }
    assert len(index) == 4


def test_adding_again_changes_nothing_and_an_id_replaces_its_document(fake: Path, tmp_path: Path) -> None:
    documents: list[Any] = [{"id": 1, "text": "1 0"}, {"id": 2, "text": "0 1", "year": 5}, "1 1", "1 1"]
    index = SearchIndex.create(tmp_path / "index", model=fake)
    changes = index.add(documents)
    assert (changes.added, changes.duplicates) == (3, 1)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    changes = index.add(documents)
    assert (changes.added, changes.updated, changes.unchanged, changes.duplicates) == (0, 0, 3, 1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    changes = index.add([{"id": 2, "text": "0 1", "year": 6}, {"id": 1, "text": "1 0"}])
    assert (changes.added, changes.updated, changes.unchanged) == (0, 1, 1)
    assert contents(index)["2"] == ("0 1", {"year": 6}, [0, 1])
    assert len(index) == len(SearchIndex.open(tmp_path / "index")) == 3


def test_removed_documents_are_gone_for_good(fake: Path, tmp_path: Path) -> None:
    index = SearchIndex.build(tmp_path / "index", [{"id": n, "text": f"1 {n}"} for n in range(20)], model=fake)
    index.remove(["3", "19"])
    assert [hit.id for hit in index.search("0 1", top_k=3)] == ["18", "17", "16"]
    with pytest.raises(SearchIndexError, match=r"has no document with the id '3'\."):
        index.remove(["5", "3"])
    assert len(index) == 18
    index.remove(str(n) for n in range(4, 19))
    assert set(contents(SearchIndex.open(tmp_path / "index"))) == {"0", "1", "2"}
    assert '"1 9"' not in "".join(path.read_text() for path in tmp_path.rglob("documents.jsonl"))
    index.add([{"id": 3, "text": "1 3"}])
    assert [hit.id for hit in index.search("0 1", top_k=1)] == ["3"]
    index.remove(["0", "1", "2", "3"])
    assert SearchIndex.open(tmp_path / "index").search("0 1") == []


def test_many_small_changes_leave_few_segments(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertblocks.search.writer.MERGED_DOCUMENTS", 32)
    monkeypatch.setattr("bertblocks.search.writer.SMALL_SEGMENTS", 4)
    index = SearchIndex.create(tmp_path / "index", model=fake)
    expected = {}
    for step in range(20):
        index.add([{"id": n % 40, "text": f"{step} {n}"} for n in range(step * 3, step * 3 + 3)])
        expected.update({str(n % 40): f"{step} {n}" for n in range(step * 3, step * 3 + 3)})
    assert {key: text for key, (text, *_) in contents(SearchIndex.open(tmp_path / "index")).items()} == expected
    assert len(index.segments) < 8
    assert all(len(segment) <= 32 for segment in index.segments)
    assert {path.name for path in (tmp_path / "index/segments").iterdir()} == {s.entry.name for s in index.segments}
    texts = [hit.text for hit in index.search("0 1", top_k=50)]
    assert texts == sorted(expected.values(), key=lambda text: -int(text.split()[1]))


# ---------------------------------------------------------------------- bad input


def test_documents_that_cannot_be_used(fake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    for documents, message in (
        ([], r"There are no documents; an index needs at least one\."),
        (["  "], r"The document '  ': the text is empty\."),
        ([{"id": 1}], r"has no text; it must be a text, or a mapping with a text\."),
        ([{"id": 1.5, "text": "1"}], r"The document '1': the id is 1.5; it must be a text or a whole number\."),
        (
            [{"id": 1, "text": "1"}, {"id": "1", "text": "2"}],
            r"The document '1': the id '1' occurs twice; ids must differ\.",
        ),
        (["no number"], r"The document '\w+': could not convert string"),
    ):
        with pytest.raises(DataError, match=message):
            SearchIndex.build(folder, documents, model=fake)
        assert not folder.exists()
    table = tmp_path / "documents.csv"
    table.write_text("id,text\n1,1 0\n1,0 1\n2,\n3,0 1\n")
    problems: list[str] = []
    index = SearchIndex.create(folder, model=fake)
    index.add(read_documents([table], on_bad=lambda record: problems.append(str(record))), on_bad=problems.append)
    assert [problem.replace(str(table), "T") for problem in problems] == [
        "T line 3: the id '1' occurs twice; ids must differ.",
        "T line 4: the text is empty.",
    ]
    assert set(contents(index)) == {"1", "3"}
    with pytest.raises(DataError, match=r"line 2: there is no column 'nr' for id; the other columns are id\."):
        list(read_documents([table], {"id": "nr"}))


def test_queries_and_settings_that_cannot_be_used(fake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    with pytest.raises(SearchIndexError, match=r"is not an index: it has no index\.json"):
        SearchIndex.open(folder)
    with pytest.raises(SearchIndexError, match="name an embedder, a sparse encoder, or both"):
        SearchIndex.build(folder, ["1 0"])
    with pytest.raises(SearchIndexError, match=r"no setting 'precisoin' of an index \(did you mean 'precision'\?\)"):
        SearchIndex.build(folder, ["1 0"], model=fake, settings={"precisoin": "int8"})
    with pytest.raises(SearchIndexError, match="precision is 'int4'; it must be one of float32, float16, int8, binary"):
        SearchIndex.build(folder, ["1 0"], model=fake, settings={"precision": "int4"})
    index = SearchIndex.build(folder, ["1 0"], model=fake)
    for query in ("", "  \n"):
        with pytest.raises(SearchIndexError, match="is empty; write what to search for"):
            index.search(query)
    with pytest.raises(SearchIndexError, match="has no sparse vectors; make an index with --sparse"):
        index.search("1 0", mode="hybrid")
    with pytest.raises(SearchIndexError, match=r"mode is 'hybird'; .* \(did you mean 'hybrid'\?\)"):
        index.search("1 0", mode="hybird")
    with pytest.raises(SearchIndexError, match="has precision = 'float32', but precision is now 'int8'"):
        SearchIndex.build(folder, ["1 0"], settings={"precision": "int8"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(SearchIndexError, match=r"holds notes.txt, which does not belong to an index"):
        SearchIndex.build(tmp_path / "other", ["1 0"], model=fake)


def test_a_document_beyond_the_length_is_split_cut_or_an_error(embedder: Path, tmp_path: Path) -> None:
    documents = [{"id": "short", "text": "plain words"}, {"id": "long", "text": "plain words are here " * 50}]
    for too_long in ("window", "truncate"):
        SearchIndex.build(tmp_path / too_long, documents, model=embedder, settings={"too_long": too_long}, threads=1)
    with pytest.raises(DataError, match=r"The document 'long': .*tokens"):
        SearchIndex.build(tmp_path / "error", documents, model=embedder, settings={"too_long": "error"}, threads=1)
    assert not (tmp_path / "error").exists()


def test_an_index_of_another_model_is_an_error(fake: Path, tmp_path: Path) -> None:
    SearchIndex.build(tmp_path / "index", ["1 0"], model=fake)
    other = make_model(tmp_path / "other")
    assert SearchIndex.open(tmp_path / "index", model=other).search("1 0")  # the same files at another place
    shutil.move(fake, tmp_path / "moved")
    with pytest.raises(SearchIndexError, match="is not there any more; name its new place"):
        SearchIndex.open(tmp_path / "index").search("1 0")
    (other / "config.json").write_text('{"hidden_size": 2}')
    (other / "README.md").write_text("notes")
    message = r"was made with another model: the files of \S+other are not those of \S+model"
    with pytest.raises(SearchIndexError, match=message):
        SearchIndex.open(tmp_path / "index", model=other)
    with pytest.raises(SearchIndexError, match=message):
        SearchIndex.build(tmp_path / "index", ["0 1"], model=other)
    assert len(SearchIndex.open(tmp_path / "index")) == 1


def test_every_damaged_byte_is_noticed(fake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    settings = {"approximate_from": 4}
    index = SearchIndex.build(
        folder, [{"id": n, "text": f"{n} 1"} for n in range(9)], model=fake, sparse=fake, settings=settings
    )
    index.remove(["1"])
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".npy", ".usearch"}
    for path in files:
        data = path.read_bytes()
        for position in {0, len(data) // 2, len(data) - 3}:
            damaged = bytearray(data)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises((SearchIndexError, ValueError), match=path.name):
                SearchIndex.open(folder)
        path.write_bytes(data[:-2])
        with pytest.raises(SearchIndexError, match=path.name):
            SearchIndex.open(folder)
        path.unlink()
        with pytest.raises(SearchIndexError, match=path.name):
            SearchIndex.open(folder)
        path.write_bytes(data)
    assert len(SearchIndex.open(folder)) == 8


def test_a_manifest_cannot_name_files_outside_the_index(fake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    SearchIndex.build(folder, ["1 0"], model=fake)
    values = json.loads((folder / "index.json").read_text())
    values["segments"][0]["files"][0]["path"] = "../model/config.json"
    del values["sha256"]
    (folder / "index.json").write_text(json.dumps({**values, "sha256": _digest(values)}))
    with pytest.raises(SearchIndexError, match="which is not a file of an index"):
        SearchIndex.open(folder)


def test_a_second_writer_is_rejected_while_readers_go_on(fake: Path, tmp_path: Path) -> None:
    index = SearchIndex.build(tmp_path / "index", ["1 0"], model=fake)
    lock = lock_folder(tmp_path / "index")
    try:
        for change in (lambda: index.add(["0 1"]), lambda: index.remove(["x"])):
            with pytest.raises(SearchIndexError, match="Another process is changing"):
                change()
        assert SearchIndex.open(tmp_path / "index").search("1 0")
    finally:
        os.close(lock)
    index.add(["0 1"])
    assert len(index) == 2


def test_a_reader_keeps_its_state_while_segments_are_merged(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.search.writer.SMALL_SEGMENTS", 3)
    writer = SearchIndex.build(tmp_path / "index", [{"id": 0, "text": "1 0"}], model=fake)
    writer.add([{"id": 1, "text": "0 1"}])
    reader = SearchIndex.open(tmp_path / "index")
    vectors = np.eye(2, dtype=np.float32)
    writer.add([{"id": 2, "text": "0 3"}])
    assert [ranking.numbers.tolist() for ranking in reader.rank_vectors(vectors, 1)] == [[0], [1]]
    assert [ranking.numbers.tolist() for ranking in writer.rank_vectors(vectors, 1)] == [[0], [2]]


# ---------------------------------------------------------------------- other models


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reranker"
    model = BertBlocksForSequenceClassification(tiny_config(vocab_size=120, num_labels=1, type_vocab_size=2))
    model.save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return folder


def test_a_real_reranker_orders_hits_by_its_own_scores(embedder: Path, reranker: Path, tmp_path: Path) -> None:
    texts = ["two leading", "are here", "trailing don't", "xxxxxxxx été", "plain words"]
    index = SearchIndex.build(tmp_path / "index", texts, model=embedder, threads=1)
    scores = {entry.text: entry.score for entry in Predictor(reranker, threads=1).rerank("here", texts)}
    hits = index.search(["here", "two"], top_k=3, rerank=reranker)[0]
    assert [hit.text for hit in hits] == sorted(texts, key=lambda text: -scores[text])[:3]
    assert [hit.score for hit in hits] == pytest.approx([scores[hit.text] for hit in hits], abs=1e-6)


def test_models_of_other_kinds_are_rejected(embedder: Path, tmp_path: Path) -> None:
    shutil.copytree(embedder, tmp_path / "sparse")
    (tmp_path / "sparse" / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    message = r"sparse is of the kind .sparse-encoder.; an index needs an embedder as its model"
    with pytest.raises(SearchIndexError, match=message):
        SearchIndex.build(tmp_path / "index", ["two"], model=tmp_path / "sparse")
    with pytest.raises(
        SearchIndexError, match=r"is of the kind .embedder.; an index needs a sparse encoder as its sparse"
    ):
        SearchIndex.build(tmp_path / "index", ["two"], sparse=embedder)
    assert not (tmp_path / "index").exists()


def test_a_real_sparse_encoder_gives_its_own_dot_products(embedder: Path, tmp_path: Path) -> None:
    folder, texts = tmp_path / "sparse", ["two leading", "are here", "trailing don't", "xxxxxxxx été", "plain words"]
    BertBlocksForMaskedLM(tiny_config(vocab_size=120)).save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    index = SearchIndex.build(tmp_path / "index", texts, model=embedder, sparse=folder, threads=1)
    predictor = Predictor(folder, threads=1)
    query = predictor.encode_sparse(["here"], role="query")[0]
    scores = [query.dot(vector) for vector in predictor.encode_sparse(texts, role="document")]
    hits = index.search("here", mode="sparse", top_k=5)
    assert [hit.text for hit in hits] == [text for _, text in sorted(zip(scores, texts, strict=True), reverse=True)]
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True), rel=1e-5)
    assert {hit.text for hit in index.search("here", mode="hybrid", top_k=5)} == set(texts)
