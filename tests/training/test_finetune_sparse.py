"""Fine-tuning of sparse encoders, from files to a folder that sentence-transformers opens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from transformers import BertConfig, BertForMaskedLM, BertModel
from typer.testing import CliRunner

from bertblocks import Predictor, finetune
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import read_sparse_encoder
from bertblocks.cli.main import app
from bertblocks.evaluation.evaluate import evaluate
from bertblocks.text.tables import DataError
from tests.reports.cards import check as check_card
from tests.small_tokenizers import wrap

WORDS = ["plain", "words", "here", "two", "leading", "trailing", "xxxxxxxx", "été"]
QUICK: dict[str, Any] = {"epochs": 4, "batch_size": 8, "learning_rate": 3e-3, "max_length": 16, "precision": "fp32"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    tokenizer = wrap("wordpiece")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    BertForMaskedLM(
        BertConfig(vocab_size=len(tokenizer.get_vocab()), max_position_embeddings=32, **sizes)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A query names two words of its document, in the other order."""
    rows = [{"query": f"{b} {a}", "document": f"{a} are {b}"} for a in WORDS for b in WORDS if a != b]
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", rows)


def check_with_sentence_transformers(folder: Path) -> None:
    theirs = SparseEncoder(str(folder), device="cpu")
    predictor = Predictor(folder, dtype=torch.float32, too_long="truncate")
    texts = ["plain words", "two trailing words here"]
    for role, method in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = method(texts, convert_to_sparse_tensor=False).numpy()
        for row, vector in zip(expected, predictor.encode_sparse(texts, role=role), strict=True):
            found = np.zeros(len(row), np.float32)
            found[vector.indices] = vector.values
            np.testing.assert_allclose(found, row, atol=1e-5)


@pytest.mark.parametrize("queries", ["encoded", pytest.param("idf", marks=pytest.mark.slow), "learned"])
def test_training_finds_documents(
    queries: str, start: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = finetune("sparse", start, pairs, pairs, tmp_path / "out", queries=queries, **QUICK)
    assert done.metric == "ndcg@10"
    assert done.scores["ndcg@10"] > done.baselines["untouched"]["ndcg@10"] + 0.3
    assert min(done.scores[name] for name in ("query_active_dims", "document_active_dims", "flops")) > 0
    check_with_sentence_transformers(tmp_path / "out")
    assert check_card(tmp_path / "out", monkeypatch).data.pipeline_tag == "feature-extraction"
    again = evaluate("sparse", tmp_path / "out", pairs)
    assert again.scores == pytest.approx(done.scores, abs=1e-6)
    settings = read_sparse_encoder(tmp_path / "out")
    assert (settings.query_weights is None) == (queries == "encoded")
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    terms = {key for step in steps for key in step if key.startswith("loss_")}
    assert terms == {"loss_ranking", "loss_document_flops", *(["loss_query_flops"] if queries == "encoded" else [])}
    if settings.query_weights is not None:
        assert settings.is_frozen == (queries == "idf")
        # it goes on as it is without being told
        more = finetune("sparse", tmp_path / "out", pairs, pairs, tmp_path / "more", **{**QUICK, "epochs": 0.2})
        assert more.baselines["untouched"] == pytest.approx(done.scores)


@pytest.mark.slow
def test_the_regularizer_makes_vectors_sparse(start: Path, pairs: Path, tmp_path: Path) -> None:
    entries = []
    for weight in (0.0, 3.0):
        settings = {**QUICK, "document_flops": weight, "query_flops": weight}
        finetune("sparse", start, pairs, pairs, tmp_path / str(weight), **settings)
        lines = [json.loads(line) for line in (tmp_path / str(weight) / "metrics.jsonl").read_text().splitlines()]
        entries.append([line["document_active_dims"] for line in lines if "document_active_dims" in line][-1])
    assert entries[1] < 0.6 * entries[0]


@pytest.mark.parametrize("loss", ["margin_mse", "kl"])
def test_a_teacher(loss: str, start: Path, tmp_path: Path) -> None:
    rows = [
        {"query": f"{b} {a}", "document": f"{a} are {b}", "negative": [f"{b} here", f"{a}"], "scores": [6.0, 2.0, 0.0]}
        for a in WORDS
        for b in WORDS
        if a != b
    ]
    path = write(tmp_path / "teacher.jsonl", rows)
    settings = {} if loss == "margin_mse" else {"loss": loss, "micro_batch_size": 4}
    finetune("sparse", start, path, path, tmp_path / "out", **settings, **QUICK)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss_ranking"] for line in lines if "loss_ranking" in line]
    assert losses[-1] < 0.1 * losses[0]


def test_a_checkpoint_without_a_head(start: Path, pairs: Path, tmp_path: Path) -> None:
    BertModel.from_pretrained(start).save_pretrained(tmp_path / "base")
    wrap("wordpiece").save_pretrained(tmp_path / "base")
    command = ["finetune", "sparse", "--model", str(tmp_path / "base"), "--train", str(pairs), "--eval", str(pairs)]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "out"), "epochs=0.2", "max_length=16"])
    assert result.exit_code == 0, result.output
    assert "the checkpoint has no masked-LM head: a new one, tied to its embeddings, is trained" in result.output
    check_with_sentence_transformers(tmp_path / "out")


def test_lora(start: Path, pairs: Path, tmp_path: Path) -> None:
    done = finetune("sparse", start, pairs, pairs, tmp_path / "out", lora_rank=4, **QUICK)
    assert evaluate("sparse", tmp_path / "out", pairs).scores == pytest.approx(done.scores, abs=1e-5)
    check_with_sentence_transformers(tmp_path / "out")


def test_bad_input(start: Path, tmp_path: Path) -> None:
    rows = [{"query": word, "document": f"{word} are here", "label": score} for word in WORDS for score in (0.5, 2)]
    scores = write(tmp_path / "scores.jsonl", rows)
    pairs = write(tmp_path / "pairs.jsonl", [{"query": word, "document": f"{word} here"} for word in WORDS])
    none = write(tmp_path / "none.jsonl", [{"query": word, "document": "here", "label": 0} for word in WORDS])
    for path, settings, message in (
        (scores, {}, "the labels are scores; sparse learns from relevant documents"),
        (pairs, {"loss": "kl"}, "loss is 'kl', which needs a teacher's scores, label=COLUMN."),
        (none, {}, "no query has a relevant document, so there is nothing to learn."),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            finetune("sparse", start, path, path, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match=r"no query has a relevant document, so there is nothing to score\."):
        evaluate("sparse", start, none)
