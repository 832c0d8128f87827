"""Multi-vector encoders: folders of sentence-transformers, PyLate and Stanford's ColBERT, with equal vectors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertModel, RobertaConfig, RobertaModel

from bertblocks import Predictor, convert
from bertblocks.bulk.job import run_bulk
from bertblocks.bulk.settings import BulkSettings
from bertblocks.checkpoints.sentence_transformers import find_kind
from bertblocks.checkpoints.sentence_transformers.multi_vector import read_multi_vector, save_multi_vector
from bertblocks.tasks.multi import score_multi
from tests.helpers import expect_log
from tests.small_tokenizers import wrap

QUERIES = ["plain words are here", "two", "U.S. don't", "plain words are here two leading trailing xxxxxxxx are here"]
DOCUMENTS = ["plain words, are here!", "Two leading trailing don't U.S. " * 4, "", "été. 北京", "here"]
SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
FIXED = {"strategy": "fixed", "attend": False, "length": 12}


def save_encoder(folder: Path, kind: str = "bert") -> Path:
    torch.manual_seed(0)
    if kind == "roberta":
        RobertaModel(RobertaConfig(pad_token_id=0, **SIZES)).save_pretrained(folder)
    else:
        BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return folder


def save_theirs(folder: Path, *more: nn.Module, encoder: str = "bert", mask: Any = None, **options: Any) -> Path:
    """A random model that sentence-transformers writes."""
    transformer = Transformer(str(save_encoder(folder / "encoder", encoder)), **options)
    modules = [
        transformer,
        Dense(32, 16, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings"),
        mask or MultiVectorMask(skiplist_words=[".", "'", "?"]),
        Normalize(module_input_name="token_embeddings"),
        *more,
    ]
    prompts = {"query": "[MASK] ", "document": "two "}
    model = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**values, **changes}))


def assert_equal(folder: Path, **options: Any) -> None:
    """Vectors and scores of both libraries are equal."""
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    ours = Predictor(folder, dtype=torch.float32, **options)
    sides = []
    for role, texts in (("query", QUERIES), ("document", DOCUMENTS)):
        expected = getattr(theirs, f"encode_{role}")(texts, batch_size=3)
        found = ours.encode_multi(texts, role=role)
        assert [list(own.shape) for own in found] == [list(own.shape) for own in expected]
        for own, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, reference.numpy(), atol=1e-5)
        sides.append((found, expected))
    (queries, their_queries), (documents, their_documents) = sides
    mean = getattr(ours.embedding, "similarity", None) == "meanmaxsim"
    scores = theirs.similarity(their_queries, their_documents).numpy()
    np.testing.assert_allclose(score_multi(queries, documents, mean=mean), scores, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, []),
        ({"query_expansion": FIXED, "document_length": 20}, []),
        ({"query_expansion": {**FIXED, "attend": True}}, []),
        ({"query_expansion": {**FIXED, "strategy": "min", "length": 9, "token": "[SEP]"}, "query_length": 14}, []),
        ({"query_length": 6, "document_length": 9}, [HierarchicalTokenPooling(2.0)]),
        ({}, [HierarchicalTokenPooling(1.5, num_protected_tokens=2, normalize_embeddings=False)]),
        ({}, [HierarchicalTokenPooling(3.0, tasks=["query", "document"])]),
        ({"query_expansion": FIXED, "encoder": "roberta"}, []),
    ],
)
def test_equals_sentence_transformers(tmp_path: Path, options: dict[str, Any], more: list[nn.Module]) -> None:
    assert_equal(save_theirs(tmp_path, *more, **options))


def test_skiplist_for_queries_and_mean_scores(tmp_path: Path) -> None:
    mask = MultiVectorMask(skiplist_words=["here", "[UNK]", "missing"], skiplist_tasks=["query", "document"])
    folder = save_theirs(tmp_path, mask=mask, query_expansion=FIXED)
    edit(folder / "config_sentence_transformers.json", similarity_fn_name="meanmaxsim")
    assert_equal(folder)


@pytest.mark.parametrize("pooling", [None, HierarchicalTokenPooling(2.0, num_protected_tokens=0)])
def test_what_is_saved_opens_in_sentence_transformers(tmp_path: Path, pooling: nn.Module | None) -> None:
    source = save_theirs(tmp_path, *([pooling] if pooling else []), query_expansion=FIXED, document_length=20)
    predictor, settings = Predictor(source, dtype=torch.float32), read_multi_vector(source)
    save_multi_vector(predictor.model, tmp_path / "ours", predictor.tokenizer, settings)
    assert_equal(tmp_path / "ours")
    theirs = [MultiVectorEncoder(str(folder), device="cpu") for folder in (source, tmp_path / "ours")]
    vectors = [model.encode_document(DOCUMENTS) for model in theirs]
    for before, after in zip(*vectors, strict=True):
        torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- PyLate and Stanford


def add_words(folder: Path, *words: str) -> None:
    """Puts words into the vocabulary in place of others, as the unused tokens of BERT are in its vocabulary."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    for word, old in zip(words, sorted(vocabulary, key=vocabulary.get)[-len(words) :], strict=True):
        vocabulary[word] = vocabulary.pop(old)
    path.write_text(json.dumps(values))


def save_pylate(folder: Path, prefixes: tuple[str, str] = ("[unused0]", "[unused1]"), **keys: Any) -> Path:
    save_encoder(folder)
    add_words(folder, "[unused0]", "[unused1]")
    (folder / "1_Dense").mkdir()
    values = {"in_features": 32, "out_features": 16, "bias": False}
    edit(folder / "1_Dense" / "config.json", **values, activation_function="torch.nn.modules.linear.Identity")
    save_file({"linear.weight": torch.randn(16, 32) / 4}, folder / "1_Dense" / "model.safetensors")
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    (folder / "modules.json").write_text(json.dumps(modules))
    edit(folder / "sentence_bert_config.json", max_seq_length=40, do_lower_case=False)
    given = {"query_prefix": prefixes[0], "document_prefix": prefixes[1], "query_length": 12, "document_length": 20}
    edit(folder / "config_sentence_transformers.json", **given, **keys)
    return folder


@pytest.mark.parametrize(
    ("prefixes", "keys"),
    [
        (("[unused0]", "[unused1]"), {"attend_to_expansion_tokens": False, "skiplist_words": [".", "here"]}),
        (("[unused0] ", "[unused1] "), {"attend_to_expansion_tokens": True, "model_type": "ColBERT"}),
        (("two ", "plain "), {"do_query_expansion": False, "skiplist_words": []}),
    ],
)
def test_reads_pylate_folders(tmp_path: Path, prefixes: tuple[str, str], keys: dict[str, Any]) -> None:
    folder = save_pylate(tmp_path / "model", prefixes, **keys)
    assert find_kind(folder) == "multi-vector"
    assert_equal(folder)


def save_stanford(folder: Path, **metadata: Any) -> Path:
    save_encoder(folder)
    add_words(folder, "[unused0]", "[unused1]", "?")
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": torch.randn(16, 32) / 4}, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    if metadata:
        edit(folder / "artifact.metadata", **metadata)
    return folder


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"query_maxlen": 12, "doc_maxlen": 20, "attend_to_mask_tokens": True, "mask_punctuation": False},
        {"query_maxlen": 16, "doc_maxlen": 30, "query_token_id": "[unused1]", "doc_token_id": "[unused0]"},
    ],
)
def test_reads_stanford_folders(tmp_path: Path, metadata: dict[str, Any]) -> None:
    folder = save_stanford(tmp_path / "model", **metadata)
    assert find_kind(folder) == "multi-vector"
    assert_equal(folder)


@pytest.mark.parametrize("to", ["bertblocks", "native"])
def test_converted_folders_keep_their_vectors(tmp_path: Path, to: str) -> None:
    """Also from a pickle, which only a conversion reads."""
    for kind, source in (("pylate", save_pylate(tmp_path / "a")), ("stanford", save_stanford(tmp_path / "b"))):
        before = Predictor(source, dtype=torch.float32).encode_multi(DOCUMENTS)
        if kind == "stanford":
            torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
            (source / "model.safetensors").unlink()
            with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle, which is not read"):
                Predictor(source)
        target = tmp_path / f"{kind}-{to}"
        with expect_log(None):
            convert(source, target, to=to, allow_pickle=True)
        after = Predictor(target, dtype=torch.float32).encode_multi(DOCUMENTS)
        for own, expected in zip(after, before, strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5)
        if to == "native":
            assert_equal(target)


def test_stanford_vectors_equal_a_formula(tmp_path: Path) -> None:
    """[CLS], the marker, the tokens and [SEP] of a document, without punctuation, projected and scaled."""
    folder = save_stanford(tmp_path / "model", query_maxlen=10)
    model, weight = BertModel.from_pretrained(folder).eval(), load_file(folder / "model.safetensors")["linear.weight"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    skipped, marker = (tokenizer.convert_tokens_to_ids(token) for token in ("?", "[unused1]"))
    words = tokenizer("plain words? are", add_special_tokens=False)["input_ids"]
    ids = [tokenizer.cls_token_id, marker, *words, tokenizer.sep_token_id]
    assert skipped in words
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    kept = [position for position, token in enumerate(ids) if token != skipped]
    expected = nn.functional.normalize(hidden @ weight.T, dim=-1)[kept]
    found = Predictor(folder, dtype=torch.float32).encode_multi(["plain words? are"])[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


# ---------------------------------------------------------------------- the predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("multi")
    yield save_theirs(path, query_expansion=FIXED, document_length=20)
    shutil.rmtree(path)


def test_results_do_not_depend_on_batches_and_streams(folder: Path) -> None:
    one, many = Predictor(folder, dtype=torch.float32, token_budget=1), Predictor(folder, dtype=torch.float32)
    texts = DOCUMENTS * 3
    expected = many.encode_multi(texts)
    for found in (one.encode_multi(texts), list(many.stream("encode_multi", iter(texts)))):
        for own, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, reference, atol=1e-5)


def test_a_bulk_job_writes_their_vectors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n".join(DOCUMENTS))
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "options": {"role": "document"}}
    run_bulk(BulkSettings("multi", str(folder), [str(tmp_path / "in.txt")], str(tmp_path / "out"), **options))
    found = parquet.read_table(tmp_path / "out" / "part-00000.parquet").column("vectors").to_pylist()
    expected = MultiVectorEncoder(str(folder), device="cpu").encode_document(DOCUMENTS)
    for own, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, reference.numpy(), atol=1e-5)


def test_windows_of_a_long_document_each_begin_with_the_marker(folder: Path) -> None:
    long = "plain words here " * 12
    windows = Predictor(folder, dtype=torch.float32, too_long="window", overlap=0)
    whole = windows.encode_multi([long])[0]
    room = 20 - 2 - 1  # special tokens, and the marker "two"
    parts = [" ".join(long.split()[start : start + room]) for start in range(0, 36, room)]
    expected = np.concatenate(Predictor(folder, dtype=torch.float32).encode_multi(parts))
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    with pytest.raises(ValueError, match="Text 0 has 36 tokens; this model reads 17"):
        Predictor(folder, too_long="error").encode_multi([long])


def test_pool_factor_equals_their_pooling(folder: Path) -> None:
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    pooled = theirs.encode_document(DOCUMENTS, token_pooling=HierarchicalTokenPooling(2.5))
    found = Predictor(folder, dtype=torch.float32).encode_multi(DOCUMENTS, pool_factor=2.5)
    for own, expected in zip(found, pooled, strict=True):
        np.testing.assert_allclose(own, expected.numpy(), atol=1e-5)


def test_int8_is_close(folder: Path) -> None:
    exact = Predictor(folder, dtype=torch.float32).encode_multi(DOCUMENTS)
    rough = Predictor(folder, int8=True).encode_multi(DOCUMENTS)
    cosines = np.concatenate([(a * b).sum(axis=1) for a, b in zip(exact, rough, strict=True)])
    assert 0.95 < cosines.mean() < 1


def test_rerank_equals_their_scores(folder: Path) -> None:
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    scores = theirs.similarity(theirs.encode_query(QUERIES), theirs.encode_document(DOCUMENTS)).numpy()
    rankings = Predictor(folder, dtype=torch.float32).rerank(QUERIES, [DOCUMENTS] * len(QUERIES), top_k=3)
    for own, ranking in zip(scores, rankings, strict=True):
        assert [ranked.index for ranked in ranking] == np.argsort(-own)[:3].tolist()
        np.testing.assert_allclose([ranked.score for ranked in ranking], sorted(own, reverse=True)[:3], atol=1e-5)
    with pytest.raises(ValueError, match="Query 0 is empty; it must be a text"):
        Predictor(folder).rerank("", ["a"])
    with pytest.raises(ValueError, match="Query 0 has no documents"):
        Predictor(folder).rerank("a", [])


def test_scores_of_many_queries(folder: Path) -> None:
    rng = np.random.default_rng(0)
    queries, documents = ([rng.normal(size=(n, 4)).astype(np.float32) for n in sizes] for sizes in ([3, 1], [2, 5, 1]))
    expected = [[(a @ b.T).max(axis=1).sum() for b in documents] for a in queries]
    np.testing.assert_allclose(score_multi(queries, documents), expected, atol=1e-5)
    np.testing.assert_allclose(score_multi(queries[0], documents), expected[0], atol=1e-5)
    means = np.array(expected) / [[3], [1]]
    np.testing.assert_allclose(score_multi(queries, documents, mean=True), means, atol=1e-5)
    assert score_multi(queries[0], []).shape == (0,)


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    predictor = Predictor(folder)
    with pytest.raises(ValueError, match=r"role is 'querry'; it must be one of query, document \(did you mean 'query'"):
        predictor.encode_multi(["a"], role="querry")
    with pytest.raises(ValueError, match=r"pool_factor is 0.5; it must be at least 1"):
        predictor.encode_multi(["a"], pool_factor=0.5)
    with pytest.raises(ValueError, match="encode needs a model with one vector per text"):
        predictor.encode(["a"])
    with pytest.raises(TypeError, match="Text 1 is 5; it must be a string"):
        predictor.encode_multi(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="encode_multi needs a multi-vector model"):
        Predictor(save_encoder(tmp_path / "plain")).encode_multi(["a"])
    with pytest.raises(ValueError, match=r"The vectors of document 1 are \[3\]; they must be \[tokens, dimensions\]"):
        score_multi(np.zeros((2, 3), np.float32), [np.zeros((1, 3), np.float32), np.zeros(3, np.float32)])


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "all"}}, "strategy must be fixed or min"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 0}}, "length is 0"),
        ("sentence_bert_config.json", {"document_length": "long"}, "document_length is 'long'"),
        ("sentence_bert_config.json", {"document_length": 3}, "document_length is 3; it must leave room"),
        ("2_MultiVectorMask/config.json", {"skiplist_words": "abc"}, "skiplist_words is 'abc'"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids is for images"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "it must be 'token_embeddings'"),
        ("1_Dense/config.json", {"in_features": 31}, "shape"),
    ],
)
def test_bad_files_are_named(folder: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    edit(copy / file, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        Predictor(copy).encode_multi(["a"])


def test_stanford_without_a_projection(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "model")
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    with pytest.raises(ValueError, match=r"the weights have no matrix linear.weight"):
        Predictor(folder)
