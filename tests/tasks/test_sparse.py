"""Sparse vectors, their losses against sentence-transformers', and the lists that a batch is made of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sentence_transformers.sparse_encoder import losses as theirs
from sentence_transformers.sparse_encoder.callbacks import splade_callbacks
from torch import Tensor, nn
from typer.testing import CliRunner

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, Predictor
from bertblocks.cli.main import app
from bertblocks.nn.sparse_head import SparseHead
from bertblocks.tasks.features import Feature
from bertblocks.tasks.retrieval.examples import RetrievalExample
from bertblocks.tasks.settings import SparseSettings
from bertblocks.tasks.sparse import new_head
from bertblocks.tasks.sparse.lists import SparseFeature, find_hidden, make_batch, make_lists
from bertblocks.tasks.sparse.losses import contrast, warmed_up
from bertblocks.tasks.sparse.task import SparseTask
from bertblocks.tasks.sparse.vectors import from_dense, merge, search
from tests.helpers import tiny_config
from tests.small_tokenizers import wrap

#: The losses of sentence-transformers that take vectors do not touch their model.
NO_MODEL = cast(Any, nn.Identity())
VOCABULARY = 50


def make_model() -> BertBlocksForMaskedLM:
    torch.manual_seed(0)
    size = len(wrap("wordpiece").get_vocab())
    return BertBlocksForMaskedLM(tiny_config(vocab_size=size, max_position_embeddings=64)).eval()


def make_features(lists: list[int], teacher: bool = False) -> list[SparseFeature]:
    """Random queries with lists of documents of these lengths."""
    generator = np.random.default_rng(0)

    def sequence() -> Feature:
        ids = generator.integers(5, VOCABULARY, generator.integers(2, 9)).tolist()
        return Feature(ids, [0] * len(ids))

    features, number = [], 0
    for query, length in enumerate(lists):
        targets = generator.normal(size=length).tolist() if teacher else [1.0, *[0.0] * (length - 1)]
        numbers = list(range(number, number + length))
        features.append(SparseFeature(sequence(), [sequence() for _ in range(length)], targets, query, numbers))
        number += length
    return features


def make_task(**settings: Any) -> SparseTask:
    task = SparseTask(SparseSettings(**settings))
    task.queries = "encoded"
    return task


def splade_loss(kind: str, query: Tensor, columns: list[Tensor], labels: Tensor | None) -> Tensor:
    loss = {
        "contrast": theirs.SparseMultipleNegativesRankingLoss,
        "margin_mse": theirs.SparseMarginMSELoss,
        "kl": theirs.SparseDistillKLDivLoss,
    }[kind](NO_MODEL)
    options: dict[str, Any] = {"temperature": 1.0} if kind == "kl" else {}
    loss = type(loss)(NO_MODEL, **options)
    ranking = loss.compute_loss_from_embeddings([query, *columns], labels)
    regularizer = theirs.FlopsLoss(NO_MODEL)
    documents = regularizer.compute_loss_from_embeddings(torch.cat(columns))
    return ranking + 0.3 * documents + 0.5 * regularizer.compute_loss_from_embeddings(query)


@pytest.mark.parametrize("kind", ["contrast", "margin_mse", "kl"])
def test_losses_and_gradients_equal_splade_loss(kind: str) -> None:
    torch.manual_seed(1)
    number, ways = 4, 3
    task = make_task(loss=kind, document_flops=0.3, query_flops=0.5)
    task.before_step(30, 30)  # after the warm-up
    batch = make_batch(make_features([ways] * number, teacher=kind != "contrast"), has_bags=False)
    vectors = torch.randn(number * (1 + ways), VOCABULARY).relu().requires_grad_()
    found = sum(loss / number for loss in task.compare([vectors], [batch]).values())
    assert isinstance(found, Tensor)
    queries, documents = vectors[:number], vectors[number:].view(number, ways, -1)
    assert batch.labels is not None
    targets = batch.labels[:, 2].view(number, ways).float()
    expected = splade_loss(kind, queries, list(documents.unbind(1)), None if kind == "contrast" else targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, vectors), torch.autograd.grad(expected, vectors))


def test_a_batch_in_parts_has_the_same_losses() -> None:
    task = make_task(document_flops=0.3)
    task.before_step(1, 1)
    features = make_features([2, 3, 1, 4])
    parts = [make_batch(part, has_bags=False) for part in (features[:1], features[1:])]
    vectors = [torch.rand(len(part.cu_seqlens) - 1, VOCABULARY) for part in parts]
    counts = [1, 3]
    joined = torch.cat(
        [
            *(own[:n] for own, n in zip(vectors, counts, strict=True)),
            *(own[n:] for own, n in zip(vectors, counts, strict=True)),
        ]
    )
    whole = task.compare([joined], [make_batch(features, has_bags=False)])
    torch.testing.assert_close(task.compare(vectors, parts), whole)


def test_weights_of_the_regularizer_rise_as_in_sentence_transformers() -> None:
    loss = theirs.SpladeLoss(
        NO_MODEL, theirs.SparseMultipleNegativesRankingLoss(NO_MODEL), document_regularizer_weight=3e-5
    )
    scheduler = splade_callbacks.SpladeRegularizerWeightSchedulerCallback(loss)
    state = type("State", (), {"max_steps": 100})()
    scheduler.on_train_begin(cast(Any, None), cast(Any, state), cast(Any, None))
    for step in (0, 1, 10, 32, 33, 34, 99):
        assert warmed_up(3e-5, step, 100, 1 / 3) == pytest.approx(scheduler._calculate_weight_value(step, 3e-5))


def test_equal_documents_and_other_documents_of_a_query_are_not_negatives() -> None:
    #: query, document, target, whether it is the first of its list
    labels = torch.tensor([[0, 0, 1, 1], [0, 5, 0, 0], [1, 0, 1, 1], [1, 6, 0, 0], [0, 7, 1, 1]], dtype=torch.float64)
    own = torch.tensor([0, 2, 4])
    hidden = find_hidden(labels, own)
    assert hidden.nonzero().tolist() == [[0, 0], [0, 2], [0, 4], [1, 0], [1, 2], [2, 0], [2, 4]]
    torch.manual_seed(0)
    queries, documents = torch.rand(3, 9), torch.rand(5, 9)
    found = contrast(queries, documents, own, hidden, temperature=0.5)
    scores = queries @ documents.T / 0.5
    kept = [[0, 1, 3], [2, 1, 3, 4], [4, 1, 2, 3]]
    expected = sum(scores[row, columns].logsumexp(0) - scores[row, columns[0]] for row, columns in enumerate(kept))
    torch.testing.assert_close(found, expected)


def test_rows_become_lists() -> None:
    rows = [
        RetrievalExample("q", ("a",), (0.0,), (0.0,), "line 1"),
        RetrievalExample("q", ("b",), (1.0,), (1.0,), "line 2"),
        RetrievalExample("r", ("c", "d", "e", "f"), (1, 1, 0, 0), (1, 1, 0, 0), "line 3"),
    ]
    found = [(own.query, own.documents) for own in make_lists(rows, 1, has_teacher=False)]
    assert found == [("q", ("b", "a")), ("r", ("c", "e")), ("r", ("d", "e"))]
    assert make_lists(rows[2:], 2, has_teacher=True)[0].documents == ("c", "d", "e")


# ---------------------------------------------------------------------- vectors


def test_search_equals_a_dense_product() -> None:
    generator = np.random.default_rng(0)
    queries, documents = (generator.random((count, 40)) * (generator.random((count, 40)) < 0.2) for count in (7, 30))
    queries[3] = documents[5] = 0.0
    expected = queries.astype(np.float32).astype(np.float64) @ documents.astype(np.float32).T.astype(np.float64)
    found = search([from_dense(row) for row in queries], [from_dense(row) for row in documents], 8)
    for (order, values), scores in zip(found, expected, strict=True):
        np.testing.assert_array_equal(order, np.argsort(-scores, kind="stable")[:8])
        np.testing.assert_allclose(values, np.sort(scores)[::-1][:8])
    for row, scores in zip(queries, expected, strict=True):
        products = [from_dense(row).dot(from_dense(document)) for document in documents]
        np.testing.assert_allclose(products, scores)


def test_top_entries() -> None:
    vector = from_dense(np.array([0.0, 3.0, -4.0, 0.5, 3.0]))
    assert vector.top(2).indices.tolist() == [1, 2]
    assert vector.top(9) is vector


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_encoding_equals_all_logits_and_windows_are_merged(pooling: str) -> None:
    model, tokenizer = make_model(), wrap("wordpiece")
    model.sparse_head = SparseHead(pooling)
    texts = ["plain words are here", "", "don't " * 40, "words"]
    vectors = Predictor(model, tokenizer, max_length=16, too_long="truncate", token_budget=20).encode_sparse(texts)
    for text, vector in zip(texts, vectors, strict=True):
        ids = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")["input_ids"]
        model.sparse_head, head = None, model.sparse_head
        with torch.no_grad():
            weights = model(ids).logits[0].relu().log1p()
        model.sparse_head = head
        expected = weights.amax(0) if pooling == "max" else weights.sum(0)
        found = np.zeros(len(expected), np.float32)
        found[vector.indices] = vector.values
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    # sequences of 16 tokens have room for 14, of which windows share 3
    pieces = tokenizer(texts[2], add_special_tokens=False)["input_ids"]
    assert len(pieces) > 14
    windowed = Predictor(model, tokenizer, max_length=16).encode_sparse([texts[2]])[0]
    predictor = Predictor(model, tokenizer, max_length=16)
    segments = predictor.pipeline("encode_sparse").preprocess([texts[2]], 0)[0].segments
    rows = []
    for segment in segments:
        ids = torch.tensor(segment.sequence.ids)
        with torch.no_grad():
            rows.append(model(ids, cu_seqlens=torch.tensor([0, len(ids)])).vectors[0])
    expected = from_dense(torch.stack(rows).amax(0).numpy())
    np.testing.assert_array_equal(windowed.indices, expected.indices)
    np.testing.assert_allclose(windowed.values, expected.values, atol=1e-5)
    assert merge([windowed, expected]).indices.tolist() == expected.indices.tolist()


def test_half_precision_and_padded_batches() -> None:
    model, tokenizer = make_model(), wrap("wordpiece")
    texts = ["plain words are here", "words"]
    exact = Predictor(model, tokenizer).encode_sparse(texts)
    half = Predictor(model, tokenizer, dtype=torch.bfloat16).encode_sparse(texts)
    for one, other in zip(exact, half, strict=True):
        assert one.dot(other) == pytest.approx(one.dot(one), rel=0.03)
    model.sparse_head = SparseHead()
    padded = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        for unpad in (True, False):
            model.config.unpad = unpad
            rows = model(**padded).vectors
            assert [from_dense(row).indices.tolist() for row in rows.numpy()] == [v.indices.tolist() for v in exact]


def test_streams_roles_and_bad_input() -> None:
    predictor = Predictor(make_model(), wrap("wordpiece"))
    texts = ["plain words", 7, "here"]
    found = list(predictor.stream("encode_sparse", iter(texts), return_exceptions=True, top_k=3))
    assert [len(found[0]), len(found[2])] == [3, 3]
    assert str(found[1]) == "Text 1 is 7; it must be a string."
    for options, message in (
        ({"role": "querry"}, "role is 'querry'; it must be one of query, document (did you mean 'query'?)."),
        ({"top_k": 0}, "top_k is 0; it must be at least 1."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            predictor.encode_sparse(["words"], **cast(Any, options))


def test_command(tmp_path: Path) -> None:
    model, tokenizer = make_model(), wrap("wordpiece")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    expected = Predictor(tmp_path / "model", dtype=torch.float32).encode_sparse(["plain words"], top_k=4)[0]
    common = ["sparse", str(tmp_path / "model"), "plain words", "--top-k", "4", "--dtype", "float32"]
    shown = CliRunner().invoke(app, common).stdout.splitlines()
    best = int(expected.values.argmax())
    assert shown[1].split()[:3] == [
        "4",
        f"{expected.values[best]:.4f}",
        tokenizer.convert_ids_to_tokens([expected.indices[best]])[0],
    ]
    entries = json.loads(CliRunner().invoke(app, [*common, "--json"]).stdout)["sparse_embedding"]
    assert [entry["index"] for entry in entries] == expected.indices.tolist()
    assert [entry["value"] for entry in entries] == pytest.approx(expected.values.tolist())
    from pyarrow import parquet

    CliRunner().invoke(app, [*common, "--output", str(tmp_path / "out.parquet")])
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]["sparse_embedding"] == entries


# ---------------------------------------------------------------------- training


def test_queries_as_bags() -> None:
    model = make_model()
    weights = torch.rand(VOCABULARY)
    model.sparse_head = SparseHead(query_weights=weights, is_frozen=False)
    task = make_task()
    task.queries = "learned"
    features = make_features([2, 1])
    batch = make_batch(features, has_bags=True)
    vectors = task.encode(model, batch)
    for feature, vector in zip(features, vectors[:2], strict=True):
        expected = torch.zeros(model.config.vocab_size)
        expected[feature.query.ids] = weights[feature.query.ids]
        torch.testing.assert_close(vector, expected)
    assert sorted(task.compare([vectors], [batch])) == ["document_flops", "ranking"]
    task.compare([vectors], [batch])["ranking"].backward()
    used = {token for feature in features for token in feature.query.ids}
    gradient = model.sparse_head.query_weights.grad  # type: ignore[union-attr]
    assert gradient is not None
    assert len(touched := set(gradient.nonzero().flatten().tolist())) > 0
    assert touched <= used


def test_a_new_head_learns_to_name_the_tokens_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_head, "TOKENS", 128)
    torch.manual_seed(0)
    model = BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini", vocab_size=VOCABULARY)).eval()
    model.sparse_head = SparseHead()
    sequences = [document for feature in make_features([3] * 20) for document in feature.documents]
    encoder = [parameter.clone() for parameter in model.model.parameters()]

    def count_right() -> tuple[int, int]:
        """Entries that are tokens of their text, and those that are not."""
        named = wrong = 0
        for sequence in sequences:
            bounds = torch.tensor([0, len(sequence.ids)])
            with torch.no_grad():
                entries = set(
                    model(torch.tensor(sequence.ids), cu_seqlens=bounds).vectors[0].nonzero().flatten().tolist()
                )
            named += len(entries & set(sequence.ids))
            wrong += len(entries - set(sequence.ids))
        return named, wrong

    tokens = sum(len(set(sequence.ids)) for sequence in sequences)
    assert count_right()[1] > 3 * tokens
    new_head.fit_to_own_tokens(model, sequences)
    named, wrong = count_right()
    assert named > 0.95 * tokens
    assert wrong < 0.1 * tokens
    assert all(torch.equal(*pair) for pair in zip(encoder, model.model.parameters(), strict=True))
