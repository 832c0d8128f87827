"""Losses of multi-vector encoders equal those of sentence-transformers, and fine-tuning writes what it reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses as theirs
from typer.testing import CliRunner

from bertblocks import Predictor, finetune
from bertblocks.cli.main import app
from bertblocks.evaluation.evaluate import evaluate
from bertblocks.tasks.multi.batches import MultiBatch, find_false_negatives
from bertblocks.tasks.multi.scores import score_multi
from bertblocks.tasks.multi.task import MultiTask
from bertblocks.tasks.retrieval.examples import RetrievalExample
from bertblocks.tasks.retrieval.metrics import score_ranking
from bertblocks.tasks.settings import MultiSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from bertblocks.training.starting_model import load_starting_model
from tests.tasks.test_multi import FIXED, add_words, save_encoder, save_theirs

WORDS = ["plain", "words", "are", "here", "two", "leading", "trailing", "xxxxxxxx"]
ROWS = [
    ("plain words", ("plain words are here.", "two leading", "here"), (9.0, 1.0, 3.0)),
    ("two leading trailing", ("leading trailing two two", "plain", "words are"), (8.0, -1.0, 2.5)),
    ("here", ("here are words", "xxxxxxxx plain", "trailing here two"), (5.0, 4.0, 4.5)),
]


def prepare(source: Path, rows: Sequence[tuple[Any, ...]], loss: str, **settings: Any) -> tuple[MultiTask, Any, Any]:
    """The task, the model that it starts from, and a batch of all rows."""
    task = MultiTask(MultiSettings(loss=loss, **settings))
    task._loss = loss
    start = load_starting_model(source, task)
    gains = (1.0, 0.0, 0.0)
    examples = [RetrievalExample(query, texts, targets, gains[: len(texts)], "row") for query, texts, targets in rows]
    return task, start.model, task.batch(task.features(examples, TextTokenizer(start.tokenizer), 64))


def their_loss(folder: Path, loss: type, rows: Sequence[tuple[Any, ...]], labels: Any, **options: Any) -> torch.Tensor:
    model = MultiVectorEncoder(str(folder), device="cpu").eval()
    columns = [[row[0] for row in rows], *zip(*(row[1] for row in rows), strict=True)]
    features = []
    for number, column in enumerate(columns):
        task = "document" if number else "query"
        own = model.preprocess(list(column), prompt=model.prompts[task], task=task)
        features.append({**own, "task": task})
    return loss(model, **options)(features, labels)


@pytest.mark.parametrize("attend", [False, True])
def test_losses_equal_those_of_sentence_transformers(tmp_path: Path, attend: bool) -> None:
    folder = save_theirs(tmp_path, query_expansion={**FIXED, "attend": attend})
    scores = torch.tensor([row[2] for row in ROWS])
    cases: list[tuple[str, type, Any, dict[str, Any], dict[str, Any]]] = [
        ("contrast", theirs.MultiVectorMultipleNegativesRankingLoss, None, {"scale": 2.0}, {"temperature": 0.5}),
        ("kl", theirs.MultiVectorDistillKLDivLoss, scores, {"temperature": 1.5}, {"temperature": 1.5}),
        ("margin_mse", theirs.MultiVectorMarginMSELoss, scores, {}, {}),
    ]
    for name, kind, labels, their_options, our_options in cases:
        task, model, batch = prepare(folder, ROWS, name, **our_options)
        expected = their_loss(folder, kind, ROWS, labels, **their_options)
        found = task.losses(model, batch)["loss"] / batch.counts["loss"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_gradients_reach_all_weights(tmp_path: Path) -> None:
    task, model, batch = prepare(save_theirs(tmp_path, query_expansion=FIXED), ROWS, "contrast")
    task.losses(model, batch)["loss"].backward()
    unused = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert unused == []
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters() if weight.grad is not None)


def test_parts_of_a_batch_compare_like_the_whole(tmp_path: Path) -> None:
    """`encode` and `compare` on micro-batches give the loss of the whole batch."""
    task, model, whole = prepare(save_theirs(tmp_path, query_expansion=FIXED), ROWS, "contrast")
    parts = [prepare(tmp_path / "model", [row], "contrast")[2] for row in ROWS]
    outputs = [task.encode(model, part) for part in parts]
    torch.testing.assert_close(task.compare(outputs, parts), task.losses(model, whole), atol=1e-5, rtol=1e-5)


def test_false_negatives_are_hidden() -> None:
    queries = torch.tensor([1, 2, 1])
    owners, keys = torch.tensor([1, 1, 2, 1]), torch.tensor([10, 11, 12, 10])
    gains, own = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 2, 3])
    hidden = find_false_negatives(queries, owners, keys, gains, own)
    # the first and third query are the same, with the same document; the second document is a negative of both
    assert hidden.tolist() == [[False, False, False, True], [False] * 4, [True, False, False, False]]


# ---------------------------------------------------------------------- whole runs


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Queries of two words, and documents that have them among others."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(24):
        words = rng.permutation(WORDS).tolist()
        row = {"query": " ".join(words[:2]), "positive": " ".join(words[1::-1] + words[2:4])}
        lines.append(json.dumps({**row, "negative": " ".join(words[4:])}))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines))
    return path


def fix_vocabulary(folder: Path) -> None:
    """Gives words the same ids in every process; what a tokenizer learns of equally frequent words is random."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    special = {word: number for word, number in vocabulary.items() if word.startswith("[")}
    rest = sorted(set(vocabulary.values()) - set(special.values()))
    words = [*WORDS, *(f"filler{number}" for number in rest[len(WORDS) :])]
    values["model"]["vocab"] = special | dict(zip(words, rest, strict=True))
    path.write_text(json.dumps(values))


def test_a_run_from_a_plain_encoder(tmp_path: Path, pairs: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    fix_vocabulary(encoder)
    add_words(encoder, "[unused0]", "[unused1]")
    options: dict[str, Any] = {"epochs": 40, "batch_size": 8, "learning_rate": 5e-3, "dimensions": 8, "query_length": 9}
    options |= {"precision": "fp32", "patience": None}
    result = finetune("multi", encoder, pairs, pairs, tmp_path / "run", **options)
    assert result.scores["ndcg@10"] > result.baselines["untouched"]["ndcg@10"] + 0.05

    queries = list(dict.fromkeys(json.loads(line)["query"] for line in pairs.read_text().splitlines()))
    documents = ["plain words are here", "two leading"]
    ours = Predictor(tmp_path / "run", dtype=torch.float32)
    model = MultiVectorEncoder(str(tmp_path / "run"), device="cpu")
    found = score_multi(ours.encode_multi(queries, role="query"), ours.encode_multi(documents))
    expected = model.similarity(model.encode_query(queries), model.encode_document(documents)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert ours.encode_multi(["two"], role="query")[0].shape == (9, 8)
    assert ours.role_tokenizer("query").tokens("two")[:4] == ["[CLS]", "[unused0]", "two", "[SEP]"]
    assert "encode_multi" in (tmp_path / "run" / "README.md").read_text()

    again = evaluate("multi", tmp_path / "run", pairs)
    assert again.scores == pytest.approx(result.scores, abs=1e-6)
    more = finetune("multi", tmp_path / "run", pairs, pairs, tmp_path / "more", epochs=1, batch_size=8)
    assert more.baselines["untouched"] == pytest.approx(result.scores, abs=1e-6)


def test_evaluation_equals_a_formula(tmp_path: Path) -> None:
    folder = save_theirs(tmp_path, query_expansion=FIXED)
    predictor = Predictor(folder, dtype=torch.float32)
    task = MultiTask(MultiSettings())
    examples = [RetrievalExample(query, texts, (), (1.0, 0.0, 0.0), "row") for query, texts, _ in ROWS]
    evaluated = task.evaluate(predictor, examples)
    names = [text for row in ROWS for text in row[1]]
    documents = predictor.encode_multi(names)
    expected = []
    for query, texts, _ in ROWS:
        vectors = predictor.encode_multi([query], role="query")[0]
        scores = [float((vectors @ own.T).max(axis=1).sum()) for own in documents]
        ranking = [name for _, name in sorted(zip(scores, names, strict=True), key=lambda pair: -pair[0])]
        expected.append(score_ranking(ranking, {texts[0]: 1.0})["ndcg@10"])
    assert evaluated.scores["ndcg@10"] == pytest.approx(float(np.mean(expected)))
    assert evaluated.resample(np.array([1])) == pytest.approx(expected[1])


def test_labels_become_lists(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("query,document,label\nwarm?,snow,0\nwarm?,sun,1\ncold?,snow,1\n")
    task = MultiTask(MultiSettings())
    examples = task.read(path)
    assert [(own.query, own.documents, own.gains) for own in examples] == [
        ("warm?", ("sun", "snow"), (1.0, 0.0)),
        ("cold?", ("snow",), (1.0,)),
    ]


def test_bad_data(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("query,positive\na,b\n")
    with pytest.raises(DataError, match="loss is 'kl', which needs a teacher's scores"):
        MultiTask(MultiSettings(loss="kl")).read(path)
    path.write_text("query,document,label\na,b,0\n")
    task = MultiTask(MultiSettings())
    examples = task.read(path)
    with pytest.raises(DataError, match="no query of the evaluation examples has a relevant document"):
        task.check(examples, None, 64)  # type: ignore[arg-type]


def test_the_command_shows_tokens(tmp_path: Path) -> None:
    folder = str(save_theirs(tmp_path, query_expansion=FIXED))
    result = CliRunner().invoke(
        app, ["multi", folder, "plain words", "--role", "query", "--json", "--dtype", "float32"]
    )
    values = json.loads(result.stdout)
    assert values["tokens"] == ["[CLS]", "[MASK]", "plain", "words", "[SEP]", *["[MASK]"] * 7]
    expected = MultiVectorEncoder(folder, device="cpu").encode_query(["plain words"])[0].numpy()
    np.testing.assert_allclose(values["vectors"], expected, atol=1e-5)
    output = tmp_path / "vectors.parquet"
    assert CliRunner().invoke(app, ["multi", folder, "two", "here", "--output", str(output)]).exit_code == 0
    from pyarrow import parquet

    table = parquet.read_table(output)
    assert np.array(table["vectors"].to_pylist()[0]).shape == (4, 16)
    failed = CliRunner().invoke(app, ["multi", str(save_encoder(tmp_path / "plain")), "a"])
    assert failed.exit_code == 1
    assert "encode_multi needs a multi-vector model" in failed.output


def test_batch_lengths_count_kept_tokens(tmp_path: Path) -> None:
    _, _, batch = prepare(save_theirs(tmp_path, query_expansion=FIXED), ROWS, "contrast")
    assert isinstance(batch, MultiBatch)
    queries, documents = batch.lengths
    assert queries == [12, 12, 12]
    assert sum(queries) + sum(documents) == len(batch.kept)
    assert isinstance(batch.to("cpu"), MultiBatch)
