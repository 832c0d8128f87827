"""Folders of cross-encoders: scores equal those of sentence-transformers, which opens what BertBlocks writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss, ListNetLoss, MarginMSELoss, MSELoss
from sentence_transformers.sentence_transformer.modules import LayerNorm, Normalize, Pooling
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from bertblocks import Predictor, convert, load
from bertblocks.checkpoints.quantize import quantize_folder
from bertblocks.checkpoints.sentence_transformers import find_kind
from bertblocks.checkpoints.sentence_transformers.cross_encoder import read_cross_encoder, save_cross_encoder
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.tasks.retrieval import losses
from tests.helpers import expect_log
from tests.small_tokenizers import wrap

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "num_labels": 1,
}
FAMILIES = {
    "bert": lambda: BertForSequenceClassification(BertConfig(vocab_size=120, max_position_embeddings=40, **SIZES)),
    "roberta": lambda: RobertaForSequenceClassification(
        RobertaConfig(vocab_size=330, max_position_embeddings=43, **{**SIZES, "pad_token_id": 2})
    ),
    "modernbert": lambda: ModernBertForSequenceClassification(
        ModernBertConfig(vocab_size=330, max_position_embeddings=40, **SIZES)
    ),
    "deberta": lambda: DebertaV2ForSequenceClassification(
        DebertaV2Config(
            vocab_size=120,
            max_position_embeddings=40,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            **SIZES,
        )
    ),
}
QUERY, LONG_QUERY = "plain words?", "two leading trailing words don't " * 5
DOCUMENTS = ["plain words are here", "Two, leading? trailing! don't U.S.", "", "plain " * 60, "xxxxxxxx words " * 4]


def save(folder: Path, family: str = "bert", labels: int = 1) -> Path:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    if labels > 1:
        model = BertForSequenceClassification(
            BertConfig(vocab_size=120, max_position_embeddings=40, **{**SIZES, "num_labels": labels})
        )
    model.save_pretrained(folder)
    tokenizer = wrap("wordpiece" if family in ("bert", "deberta") else "bpe")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.model_max_length = 40
    tokenizer.save_pretrained(folder)
    return folder


def theirs(folder: Path, **options: Any) -> CrossEncoder:
    return CrossEncoder(str(folder), device="cpu", **options)


def scores(predictor: Predictor, query: str, documents: list[str]) -> np.ndarray:
    found = np.full(len(documents), np.nan)
    for ranked in predictor.rerank(query, documents):
        assert ranked.text == documents[ranked.index]
        found[ranked.index] = ranked.score
    return found


def check_equal(folder: Path, peer: CrossEncoder) -> None:
    predictor = Predictor(folder, dtype=torch.float32)
    for query in (QUERY, LONG_QUERY):
        expected = peer.predict([(query, document) for document in DOCUMENTS])
        np.testing.assert_allclose(scores(predictor, query, DOCUMENTS), expected, atol=1e-5, rtol=1e-5)
        order = [entry["corpus_id"] for entry in peer.rank(query, DOCUMENTS)]
        assert [ranked.index for ranked in predictor.rerank(query, DOCUMENTS)] == order


@pytest.mark.parametrize(
    ("family", "activation"),
    [("bert", nn.Identity()), ("roberta", None), ("modernbert", nn.Softplus()), ("deberta", nn.Tanh())],
)
def test_scores_equal_the_model_that_sentence_transformers_saved(tmp_path: Path, family: str, activation: Any) -> None:
    peer = theirs(save(tmp_path / "base", family), activation_fn=activation)
    peer.save(str(tmp_path / "saved"))
    check_equal(tmp_path / "saved", peer)


def layered(folder: Path, **options: Any) -> CrossEncoder:
    torch.manual_seed(1)
    encoder = Transformer(str(save(folder)), transformer_task="feature-extraction")
    modules = [encoder, Pooling(32, "mean"), Dense(32, 16), LayerNorm(16), Normalize()]
    nn.init.normal_(modules[3].norm.weight)
    last = Dense(16, 1, activation_function=nn.Identity(), module_output_name="scores")
    return CrossEncoder(modules=[*modules, last], device="cpu", **options)


def test_modules_behind_the_encoder_and_prompts_equal_sentence_transformers(tmp_path: Path) -> None:
    peer = layered(tmp_path / "base", prompts={"ask": "two: "}, default_prompt_name="ask")
    peer.save(str(tmp_path / "saved"))
    check_equal(tmp_path / "saved", peer)
    predictor = Predictor(tmp_path / "saved", dtype=torch.float32)
    without = [ranked.score for ranked in Predictor(tmp_path / "saved", dtype=torch.float32).rerank("two: x", ["here"])]
    assert peer.predict([("x", "here")]) != pytest.approx(without, abs=1e-4)  # the prompt matters
    with pytest.raises(ValueError, match=r"encode needs a model that makes embeddings; this one scores pairs"):
        predictor.encode(["plain"])


@pytest.mark.parametrize(
    ("key", "value", "activation"),
    [
        (
            "sentence_transformers",
            {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"},
            "Identity",
        ),
        ("sbert_ce_default_activation_function", "torch.nn.modules.activation.Tanh", "Tanh"),
        ("architectures", ["BertForSequenceClassification"], None),
    ],
)
def test_older_folders_have_the_activation_in_their_config(
    tmp_path: Path, key: str, value: Any, activation: str | None
) -> None:
    folder = save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert read_cross_encoder(folder).activation == activation
    peer = theirs(folder)
    check_equal(folder, peer)
    convert(folder, tmp_path / "own", "bertblocks")
    convert(tmp_path / "own", tmp_path / "back", "bert")
    check_equal(tmp_path / "own", peer)
    check_equal(tmp_path / "back", theirs(tmp_path / "back"))
    quantize_folder(folder, tmp_path / "int8", min_cosine=0.5)
    exact = peer.predict([(QUERY, document) for document in DOCUMENTS])
    int8 = scores(Predictor(tmp_path / "int8"), QUERY, DOCUMENTS)
    np.testing.assert_allclose(int8, exact, atol=0.1 * max(1.0, abs(exact).max()))


@pytest.mark.parametrize("has_layers", [False, True])
def test_sentence_transformers_opens_what_is_saved(tmp_path: Path, has_layers: bool) -> None:
    if has_layers:
        layered(tmp_path / "base", prompts={"ask": "two: "}, default_prompt_name="ask").save(str(tmp_path / "model"))
        folder = tmp_path / "model"
    else:
        folder = save(tmp_path / "model")
        theirs(folder, activation_fn=nn.Identity()).save(str(folder))
    model, tokenizer = load(folder)
    settings = read_cross_encoder(folder)
    if has_layers:
        model.embedding_head = EmbeddingHead(settings.pooling, 32, settings.layers)
    assert tokenizer is not None
    save_cross_encoder(model, tmp_path / "ours", tokenizer, settings)
    assert find_kind(tmp_path / "ours") == "cross-encoder"
    peer, first = theirs(tmp_path / "ours"), theirs(folder)
    assert type(peer.activation_fn) is type(first.activation_fn)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    np.testing.assert_allclose(peer.predict(pairs), first.predict(pairs), atol=1e-6)
    check_equal(tmp_path / "ours", peer)


def test_long_documents_score_as_their_best_window(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    predictor = Predictor(folder, dtype=torch.float32, too_long="window", overlap=0)
    words = [f"{word} here" for word in ("plain", "two", "leading", "trailing", "words", "are")] * 6
    room = 40 - 3 - len(predictor.tokenizer(QUERY, add_special_tokens=False).input_ids)
    ids = predictor.tokenizer(" ".join(words), add_special_tokens=False).input_ids
    parts = [predictor.tokenizer.decode(ids[start : start + room]) for start in range(0, len(ids), room)]
    expected = theirs(folder).predict([(QUERY, part) for part in parts])
    assert len(expected) > 2
    assert scores(predictor, QUERY, [" ".join(words)]) == pytest.approx(expected.max(), abs=1e-5)
    with pytest.raises(ValueError, match=r"Pair 0 has \d+ and \d+ tokens; this model reads"):
        Predictor(folder, too_long="error").rerank(QUERY, [" ".join(words)])


def test_a_model_with_several_labels_classifies_pairs(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", labels=3)
    peer = theirs(folder)
    peer.save(str(tmp_path / "saved"))
    predictor = Predictor(tmp_path / "saved", dtype=torch.float32, too_long="truncate")
    with pytest.raises(
        ValueError, match=r"rerank needs a model with one label; this model has 3\. Use classify on pairs"
    ):
        predictor.rerank(QUERY, DOCUMENTS)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    ours = [[found.scores[f"LABEL_{label}"] for label in range(3)] for found in predictor.classify(pairs)]
    np.testing.assert_allclose(ours, peer.predict(pairs, apply_softmax=True), atol=1e-5)


def test_no_code_is_imported_because_a_file_names_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    peer = theirs(folder)
    peer.save(str(folder))
    path = folder / "config_sentence_transformers.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "activation_fn": "os.getcwd"}))
    with expect_log(r"config_sentence_transformers\.json: the activation 'os\.getcwd' is not one of torch\.nn"):
        check_equal(folder, peer)  # both use the default
    path.write_text(json.dumps({**values, "activation_fn": "torch.hub.list"}))
    with pytest.raises(ValueError, match=r"activation of scores is 'torch\.hub\.list'; it must be one of torch\.nn's"):
        read_cross_encoder(folder)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer", "LogitScore"], "has a LogitScore module; BertBlocks scores pairs with"),
        (["Transformer", "Pooling"], "lists Transformer, Pooling; a cross-encoder is a Transformer alone, or has"),
        (["Transformer", "Dense"], "lists Transformer, Dense; a cross-encoder is"),
    ],
)
def test_other_modules_are_one_sentence(tmp_path: Path, kinds: list[str], message: str) -> None:
    folder = save(tmp_path / "model")
    theirs(folder).save(str(folder))
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"x.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=message):
        Predictor(folder)


def test_losses_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    """The scores of a model without dropout, and means where BertBlocks has sums."""
    peer = theirs(save(tmp_path / "model")).eval()
    queries, columns = [QUERY, "here"], [DOCUMENTS[:2], ["two", "words"], ["are", "xx"]]
    logits = torch.stack(
        [
            torch.tensor(peer.predict(list(zip(queries, column, strict=True)), activation_fn=nn.Identity()))
            for column in columns
        ]
    )
    labels = torch.tensor([0.0, 1.0])
    for ours, kind in ((losses.binary_cross_entropy, BinaryCrossEntropyLoss), (losses.squared_error, MSELoss)):
        expected = kind(peer)([queries, columns[0]], labels)
        torch.testing.assert_close(ours(logits[0], labels) / 2, expected.detach())
    teacher = torch.tensor([[3.0, 1.0, -1.0], [2.0, 2.5, 0.5]])
    expected = MarginMSELoss(peer)([queries, *columns], list(teacher))
    flat = logits.T.flatten()
    torch.testing.assert_close(losses.margin_mse(flat, teacher.flatten(), [3, 3]) / 2, expected.detach())
    expected = ListNetLoss(peer)([queries, [list(row) for row in zip(*columns, strict=True)]], list(teacher))
    shares = teacher.softmax(1).flatten()
    torch.testing.assert_close(losses.list_cross_entropy(flat, shares, [3, 3]) / 2, expected.detach())
