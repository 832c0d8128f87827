"""Folders of sentence-transformers' SparseEncoder: both libraries give the same vectors, whoever wrote the folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import Router, SparseStaticEmbedding, SpladePooling, Transformer
from transformers import BertConfig, BertForMaskedLM, BertModel, DistilBertConfig, DistilBertForMaskedLM
from typer.testing import CliRunner

from bertblocks import Predictor
from bertblocks.checkpoints.quantize import quantize_folder
from bertblocks.checkpoints.sentence_transformers import find_kind
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import (
    SparseEncoderSettings,
    read_sparse_encoder,
    save_sparse_encoder,
)
from bertblocks.cli.main import app
from bertblocks.tasks.sparse.vectors import SparseVector
from tests.small_tokenizers import wrap

LENGTH = 24
TEXTS = ["plain words are here", "Two, leading? trailing!", "", "北京 東京タワー", "xxxxxxxx words here " * 9]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def save_masked_lm(folder: Path, kind: str = "bert") -> Path:
    torch.manual_seed(0)
    tokenizer = wrap("wordpiece")
    tokenizer.model_max_length = LENGTH
    size = len(tokenizer.get_vocab())
    common: dict[str, Any] = {"vocab_size": size, "max_position_embeddings": 64, "initializer_range": 0.3}
    if kind == "bert":
        model: Any = BertForMaskedLM(BertConfig(**common, **SIZES))
    else:
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
        model = DistilBertForMaskedLM(DistilBertConfig(**common, **sizes))
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_splade(
    folder: Path, pooling: str = "max", activation: str = "relu", kind: str = "bert", **options: Any
) -> Path:
    encoder = Transformer(str(save_masked_lm(folder / "start", kind)), transformer_task="fill-mask")
    SparseEncoder(modules=[encoder, SpladePooling(pooling, activation)], **options).save(str(folder / "model"))
    return folder / "model"


def save_router(folder: Path) -> Path:
    encoder = Transformer(str(save_masked_lm(folder / "start")), transformer_task="fill-mask")
    weights = torch.rand(len(encoder.tokenizer.get_vocab())) - 0.2
    static = SparseStaticEmbedding(encoder.tokenizer, weights.masked_fill(weights < 0, 0), frozen=True)
    router = Router.for_query_document([static], [encoder, SpladePooling("max", "log1p_relu")])
    SparseEncoder(modules=[router]).save(str(folder / "model"))
    return folder / "model"


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "max": lambda folder: save_splade(folder),
    "sum": lambda folder: save_splade(folder, "sum"),
    "max, two logarithms": lambda folder: save_splade(folder, "max", "log1p_relu", "distilbert"),
    "sum, two logarithms": lambda folder: save_splade(folder, "sum", "log1p_relu"),
    "prompts and a limit": lambda folder: save_splade(
        folder, prompts={"query": "two ", "document": "plain "}, default_prompt_name="query", max_active_dims=15
    ),
    "router": save_router,
    "plain masked language model": save_masked_lm,
}


def to_dense(vectors: Sequence[SparseVector], size: int) -> np.ndarray:
    dense = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(dense, vectors, strict=True):
        row[vector.indices] = vector.values
    return dense


def encode(model: SparseEncoder, role: str | None, texts: list[str] = TEXTS) -> np.ndarray:
    method = {"query": model.encode_query, "document": model.encode_document, None: model.encode}[role]
    return method(texts, convert_to_sparse_tensor=False).numpy()


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_equal_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    folder = FOLDERS[name](tmp_path)
    theirs = SparseEncoder(str(folder), device="cpu")
    predictor = Predictor(folder, dtype=torch.float32, too_long="truncate")
    settings = predictor.embedding
    if not isinstance(settings, SparseEncoderSettings):
        settings = SparseEncoderSettings()
    save_sparse_encoder(predictor.model, tmp_path / "again", predictor.tokenizer, settings)
    again = SparseEncoder(str(tmp_path / "again"), device="cpu")
    reread = Predictor(tmp_path / "again", dtype=torch.float32, too_long="truncate")
    assert find_kind(tmp_path / "again") == "sparse-encoder"
    for role in ("query", "document", None):
        expected = encode(theirs, role)
        assert (expected[0] != 0).any()
        for own in (predictor, reread):
            vectors = own.encode_sparse(TEXTS, role=role)
            assert all((np.diff(vector.indices) > 0).all() for vector in vectors)
            np.testing.assert_allclose(to_dense(vectors, expected.shape[1]), expected, atol=1e-5)
        np.testing.assert_allclose(encode(again, role), expected, atol=1e-6)


def test_older_folders_name_another_class(tmp_path: Path) -> None:
    folder = save_splade(tmp_path)
    expected = Predictor(folder, dtype=torch.float32).encode_sparse(TEXTS[:2])
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    modules[1]["type"] = "sentence_transformers.sparse_encoder.models.SpladePooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").unlink()
    assert find_kind(folder) == "sparse-encoder"
    found = Predictor(folder, dtype=torch.float32).encode_sparse(TEXTS[:2])
    assert [vector.values.tolist() for vector in found] == [vector.values.tolist() for vector in expected]


def test_weights_of_query_tokens_in_json(tmp_path: Path) -> None:
    folder = save_router(tmp_path)
    static = folder / "query_0_SparseStaticEmbedding"
    (static / "config.json").write_text(json.dumps({"frozen": True, "path": "idf.json"}))
    (folder / "idf.json").write_text(json.dumps({"words": 2.5, "here": 0.5, "[UNK]": 9.0}))
    vector = Predictor(folder, dtype=torch.float32).encode_sparse(["here words here plain"], role="query")[0]
    vocabulary = wrap("wordpiece").get_vocab()
    expected = {vocabulary["words"]: 2.5, vocabulary["here"]: 0.5}
    assert dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True)) == expected


def test_int8_folder_keeps_the_modules(tmp_path: Path) -> None:
    folder = save_splade(tmp_path)
    quantize_folder(folder, tmp_path / "int8", min_cosine=0.5)
    exact = Predictor(folder, dtype=torch.float32).encode_sparse(TEXTS)
    quantized = Predictor(tmp_path / "int8")
    vectors = quantized.encode_sparse(TEXTS)
    assert quantized.precision == "int8"
    size = quantized.model.config.vocab_size
    expected, found = to_dense(exact, size), to_dense(vectors, size)
    assert (expected * found).sum() / np.linalg.norm(expected) / np.linalg.norm(found) > 0.98
    on_load = Predictor(folder, int8=True).encode_sparse(TEXTS)
    np.testing.assert_array_equal(to_dense(on_load, size), found)


def damage(folder: Path, file: str, changes: dict[str, Any]) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "1_SpladePooling/config.json",
            {"pooling_strategy": "mean"},
            "pooling_strategy is 'mean'; it must be one of max",
        ),
        (
            "1_SpladePooling/config.json",
            {"activation_function": "gelu"},
            "activation_function is 'gelu'; it must be one",
        ),
        ("config_sentence_transformers.json", {"max_active_dims": 0}, "max_active_dims is 0; it must be a positive"),
    ],
)
def test_bad_values(file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_splade(tmp_path)
    damage(folder, file, changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        Predictor(folder)


def test_bad_routes(tmp_path: Path) -> None:
    folder = save_router(tmp_path)
    values = json.loads((folder / "router_config.json").read_text())
    outside = {"query": values["structure"]["query"], "document": ["../x", "document_1_SpladePooling"]}
    types = {**values["types"], "../x": values["types"]["document_0_Transformer"]}
    for changes, message in (
        ({"structure": {"document": ["missing"]}}, "the route 'document' must be a list of modules that types has"),
        (
            {"structure": {"document": ["document_1_SpladePooling"]}},
            "has the routes document: SpladePooling; BertBlocks",
        ),
        ({"structure": outside, "types": types}, "must be folders inside"),
    ):
        (folder / "router_config.json").write_text(json.dumps({**values, **changes}))
        with pytest.raises(ValueError, match=re.escape(message)):
            read_sparse_encoder(folder)
    (folder / "router_config.json").write_text(json.dumps(values))
    wrap("unigram").save_pretrained(folder / "query_0_SparseStaticEmbedding")
    with pytest.raises(ValueError, match="its tokenizer has other tokens than that of"):
        read_sparse_encoder(folder)


def test_models_without_a_masked_lm_head(tmp_path: Path) -> None:
    save_masked_lm(tmp_path)
    BertModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    sentence = "encode_sparse needs a model with a masked-lm head; this model is a BertBlocksModel."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Predictor(tmp_path).encode_sparse(TEXTS)
    result = CliRunner().invoke(app, ["sparse", str(tmp_path), "words"])
    assert result.exit_code == 1
    assert sentence in result.output


def test_autoencoders_are_not_read(tmp_path: Path) -> None:
    folder = save_splade(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder"
    (folder / "modules.json").write_text(json.dumps(modules))
    shutil.rmtree(folder / "1_SpladePooling")
    with pytest.raises(ValueError, match="lists Transformer, SparseAutoEncoder; BertBlocks makes sparse vectors with"):
        Predictor(folder)
