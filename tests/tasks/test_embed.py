"""Losses and precisions of embeddings, compared with sentence-transformers on the same weights and with formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from sentence_transformers import SentenceTransformer, quantize_embeddings
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CoSENTLoss,
    GISTEmbedLoss,
    MultipleNegativesRankingLoss,
)
from typer.testing import CliRunner

from bertblocks import Predictor, from_huggingface, load
from bertblocks.checkpoints.sentence_transformers import read_settings, save_embedder
from bertblocks.cli.main import app
from bertblocks.tasks.embed.examples import EmbeddingExample
from bertblocks.tasks.embed.losses import Contrast
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.embed.vectors import PRECISIONS, dequantize, fit_ranges, quantize, read_ranges
from bertblocks.tasks.settings import EmbedSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from tests.checkpoints.test_sentence_transformers import TEXTS, save_folder
from tests.small_tokenizers import wrap
from tests.training.gradients import OneStep

ROWS = [
    ["plain words", "words are here", "two trailing", "don't"],
    ["two leading dots", "leading", "U.S. words here", "here here here"],
    ["are plain here", "plain plain words two", "trailing", "xxxxxxxx"],
    ["here", "here two", "words trailing leading", "plain"],
    ["trailing don't", "don't U.S.", "leading words", "are are"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder with last-token pooling and two Dense modules."""
    folder = save_folder(tmp_path_factory.mktemp("embed") / "model", "up", "down", pooling="lasttoken")
    (folder / "config_sentence_transformers.json").unlink()  # their losses know no prompts
    return folder


def their_loss(folder: Path, columns: list[list[str]], labels: Any, make: Any) -> tuple[float, dict[str, Any]]:
    """The loss of sentence-transformers, without dropout, and its gradients."""
    model = SentenceTransformer(str(folder), device="cpu").eval()
    loss = make(model)([model.tokenize(list(column)) for column in columns], labels)
    loss.backward()
    weights = dict(model.named_parameters())
    return loss.item(), {name.partition("model.")[2] or name: weight.grad for name, weight in weights.items()}


def our_loss(
    folder: Path, rows: list[list[str]], scores: list[float] | None = None, size: int | None = None, **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    from bertblocks.training.backward import BackwardPass
    from bertblocks.training.distributed import World
    from bertblocks.training.prefetch import split_micro_batches

    model, tokenizer = load(folder, "base")
    assert tokenizer is not None
    task = EmbedTask(EmbedSettings(**settings))
    task.use_model(model, read_settings(folder))
    found = scores or [None] * len(rows)
    examples = [EmbeddingExample(row, score, "here") for row, score in zip(rows, found, strict=True)]
    features = task.features(examples, TextTokenizer(tokenizer), 60)
    world, step = World(0, 1, torch.device("cpu")), OneStep(task)
    batches = [task.batch(part) for part in split_micro_batches(features, world, size)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = BackwardPass(step, model, world, "fp32", scaler, 0, 0, {"loss": len(rows)}).run(batches)  # type: ignore[arg-type]
    return float(losses[0]), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


#: Weights that both have, by our names and theirs.
SAME = {
    "embedding.token.weight": "embeddings.word_embeddings.weight",
    "encoder.layers.0.mlp.up.weight": "encoder.layer.0.intermediate.dense.weight",
    "embedding_head.layers.0.linear.weight": "2.linear.weight",
    "embedding_head.layers.1.linear.weight": "3.linear.weight",
}


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, other in SAME.items():
        expected = theirs[1][other]
        torch.testing.assert_close(ours[1][name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("texts", [2, 4])
def test_contrast_equals_multiple_negatives_ranking(folder: Path, texts: int) -> None:
    rows = [row[:texts] for row in ROWS]
    columns = [list(column) for column in zip(*rows, strict=True)]
    theirs = their_loss(folder, columns, None, lambda model: MultipleNegativesRankingLoss(model, scale=12.5))
    assert_same(our_loss(folder, rows, temperature=0.08), theirs)


def test_the_gradient_cache_equals_theirs(folder: Path) -> None:
    columns = [list(column) for column in zip(*ROWS, strict=True)]
    cached = their_loss(
        folder, columns, None, lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    )
    assert_same(our_loss(folder, ROWS, size=2), cached)


@pytest.mark.parametrize(("kind", "margin"), [("absolute", 0.05), ("absolute", -0.1), ("relative", 0.2)])
def test_false_negatives_are_those_of_gist_with_the_model_as_guide(folder: Path, kind: Any, margin: float) -> None:
    rows = [row[:3] for row in ROWS]
    columns = [list(column) for column in zip(*rows, strict=True)]

    def make(model: Any) -> Any:
        options = {"contrast_anchors": False, "contrast_positives": False, "temperature": 0.05}
        return GISTEmbedLoss(model, model, margin_strategy=kind, margin=margin, **options)

    theirs = their_loss(folder, columns, None, make)
    assert_same(our_loss(folder, rows, false_negative_margin=margin, margin_kind=kind), theirs)
    assert theirs[0] != pytest.approx(our_loss(folder, rows)[0], rel=1e-3), "some negatives are left out"


def test_scored_pairs_equal_cosent(folder: Path) -> None:
    scores = [0.1, 0.9, 0.5, 0.5, 0.3]
    columns = [[row[0] for row in ROWS], [row[1] for row in ROWS]]
    theirs = their_loss(folder, columns, torch.tensor(scores), lambda model: CoSENTLoss(model))
    assert_same(our_loss(folder, [row[:2] for row in ROWS], scores, size=2), theirs)


def test_the_weight_multiplies_the_terms_of_own_negatives() -> None:
    """Example 0 has two negatives, example 1 none, example 2 one; all three are negatives of all."""
    queries, positives, negatives = F.normalize(torch.randn(3, 3, 8), dim=-1)
    owners = [0, 0, 2]
    losses = []
    for index, query in enumerate(queries):
        terms = [math.exp(float(query @ other) / 0.1) for other in positives]
        total = sum(terms)
        for owner, other in zip(owners, negatives, strict=True):
            total += (5.0 if owner == index else 1.0) * math.exp(float(query @ other) / 0.1)
        losses.append(-math.log(terms[index] / total))
    contrast = Contrast(temperature=0.1, negative_weight=5.0)
    found = contrast(queries, positives, negatives, torch.tensor(owners))
    assert found.item() == pytest.approx(sum(losses) / 3, rel=1e-5)


# ---------------------------------------------------------------------- reading and saving


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("query,positive,negative_2,negative_1\na,b,d,c\ne,f,,\n", [["a", "b", "c", "d"], ["e", "f"]]),
        ('{"anchor": "a", "pos": ["b", "c"], "neg": ["d", "e"]}\n', [["a", "b", "d", "e"], ["a", "c", "d", "e"]]),
        (
            "first one,second one,third one\nfourth one,fifth one,sixth one\n",
            [["first one", "second one", "third one"]],
        ),
    ],
)
def test_examples_have_any_number_of_negatives(tmp_path: Path, text: str, expected: Any) -> None:
    path = tmp_path / ("t.jsonl" if text.startswith("{") else "t.csv")
    path.write_text(text)
    found = EmbedTask(EmbedSettings()).read(path)
    assert [example.texts for example in found][: len(expected)] == expected
    assert all(example.score is None for example in found)


def test_bad_negatives_raise_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"query": "a", "positive": "b", "negatives": ["c", 7]}\n')
    with pytest.raises(DataError, match=r"t\.jsonl line 1: the negatives is 7; it must be a text or a list of texts"):
        EmbedTask(EmbedSettings()).read(path)
    with pytest.raises(DataError, match=r"no column 'negativ' for negative; .*did you mean 'negatives'"):
        EmbedTask(EmbedSettings(negative="negativ")).read(path)


@pytest.mark.parametrize("pooling", ["lasttoken", ["cls", "weightedmean"]], ids=str)
def test_what_is_saved_opens_in_sentence_transformers(tmp_path: Path, pooling: Any) -> None:
    source = save_folder(tmp_path / "model", "residual", "LayerNorm", pooling=pooling)
    model, tokenizer = load(source, "base")
    assert tokenizer is not None
    save_embedder(model, tmp_path / "out", tokenizer, read_settings(source))
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    ours = Predictor(source, dtype=torch.float32)
    for role in ("query", "document"):
        expected = ours.encode(TEXTS, prompt_name=role)
        np.testing.assert_allclose(theirs.encode(TEXTS, prompt_name=role), expected, atol=1e-5)


# ---------------------------------------------------------------------- precisions


def sample(count: int = 300, dimensions: int = 20) -> np.ndarray:
    vectors = np.random.default_rng(0).normal(0.1, 1, (count, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_int8_and_bits_equal_sentence_transformers() -> None:
    vectors = sample()
    vectors[:, 3] = 0.25  # a dimension without a range
    ranges = fit_ranges(vectors[:200])
    expected = quantize_embeddings(vectors, "int8", calibration_embeddings=vectors[:200])
    found = quantize(vectors, "int8", ranges)
    np.testing.assert_array_equal(found, expected)
    assert {-128, 127} <= set(found.ravel().tolist())
    np.testing.assert_array_equal(quantize(vectors, "binary"), quantize_embeddings(vectors, "ubinary"))
    with pytest.raises(ValueError, match=r"precision is 'int8', which needs the ranges of a sample"):
        quantize(vectors, "int8")
    with pytest.raises(ValueError, match=r"ranges have the shape \[2, 19\]; vectors of 20 dimensions need \[2, 20\]"):
        quantize(vectors, "int8", ranges[:, 1:])
    with pytest.raises(ValueError, match=r"precision is 'int4'; it must be one of float32, .*did you mean 'int8'"):
        quantize(vectors, "int4", ranges)


def test_stored_vectors_are_read_back_within_half_a_step() -> None:
    vectors = sample()
    ranges = fit_ranges(vectors)
    error = abs(dequantize(quantize(vectors, "int8", ranges), "int8", ranges) - vectors)
    assert (error <= (ranges[1] - ranges[0]) / 255 * 0.51).all()
    half = dequantize(quantize(vectors, "float16"), "float16")
    np.testing.assert_allclose(half, vectors, atol=1e-3)
    bits = quantize(vectors, "binary")
    signs = dequantize(bits, "binary", dimensions=20)
    hamming = int(np.unpackbits(bits[0] ^ bits[1]).sum())
    assert float(signs[0] @ signs[1]) / 20 == pytest.approx(1 - 2 * hamming / 20)


def test_predictors_encode_in_every_precision(folder: Path) -> None:
    predictor = Predictor(folder, dtype=torch.float32)
    vectors = predictor.encode(TEXTS)
    ranges = fit_ranges(vectors)
    for precision in PRECISIONS:
        expected = quantize(vectors, precision, ranges)
        for given in (None, ranges) if precision == "int8" else (None,):
            found = predictor.encode(TEXTS, precision=precision, ranges=given)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
    assert predictor.encode(TEXTS, precision="binary", dimensions=10).shape == (len(TEXTS), 2)
    assert predictor.encode([], precision="binary").shape == (0, 3)
    with pytest.raises(ValueError, match=r"int8', which needs the ranges"):
        list(predictor.stream("encode", TEXTS, precision="int8"))


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_writes_every_precision(folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    vectors = Predictor(folder, dtype=torch.float32).encode(TEXTS[:3])
    options = ["embed", folder, *TEXTS[:3], "--dtype", "float32"]
    for precision in PRECISIONS:
        path = tmp_path / f"{precision}.npy"
        run(*options, "--precision", precision, "-o", path)
        np.testing.assert_array_equal(np.load(path), quantize(vectors, precision, fit_ranges(vectors)))
    ranges = tmp_path / "int8.ranges.npy"
    np.testing.assert_array_equal(read_ranges(ranges), fit_ranges(vectors))
    other = run("embed", folder, TEXTS[4], "--precision", "int8", "--ranges", ranges, "--json", "--dtype", "float32")
    expected = quantize(Predictor(folder, dtype=torch.float32).encode(TEXTS[4:]), "int8", fit_ranges(vectors))
    assert json.loads(other)["embedding"] == expected[0].tolist()
    run(*options, "--precision", "int8", "-o", tmp_path / "v.parquet")
    table = parquet.read_table(tmp_path / "v.parquet")
    assert str(table.schema.field("embedding").type.value_type) == "int8"
    np.testing.assert_array_equal(
        np.array(table["embedding"].to_pylist()), quantize(vectors, "int8", fit_ranges(vectors))
    )
    for arguments, message in (
        (["--precision", "int8"], "precision is 'int8', which needs the ranges of a sample of vectors"),
        (["--ranges", ranges], "which belongs to --precision int8"),
        (["--precision", "int8", "--ranges", tmp_path / "float32.npy"], "float32.npy does not hold ranges"),
    ):
        done = CliRunner().invoke(app, [*map(str, [*options, *arguments])])
        assert done.exit_code == 1
        assert message in " ".join((done.output + done.stderr).split())


def test_evaluate_prints_what_each_precision_keeps(folder: Path, tmp_path: Path) -> None:
    rows: list[Any] = [(ROWS[n % 5][n % 4], ROWS[(n * 3 + 1) % 5][(n + 1) % 4], n % 6) for n in range(20)]
    path = tmp_path / "pairs.csv"
    path.write_text("text,text_pair,score\n" + "".join(f"{a},{b},{score}\n" for a, b, score in rows))
    output = run("evaluate", folder, "--task", "embed", "--data", path, "--precisions", "--json")
    found = json.loads(output)["models"][0]
    assert list(found["precisions"]) == list(PRECISIONS)
    assert found["precisions"]["float32"] == found["scores"]
    predictor = Predictor(folder, dtype=torch.float32)
    from scipy.stats import spearmanr

    first, second = (predictor.encode([row[column] for row in rows]) for column in (0, 1))
    signs = [np.where(part > 0, 1, -1) for part in (first, second)]
    bits = spearmanr((signs[0] * signs[1]).sum(1), [row[2] for row in rows]).statistic
    assert found["precisions"]["binary"]["spearman"] == pytest.approx(bits, abs=1e-6)
    assert "precisions of vectors" in run("evaluate", folder, "--task", "embed", "--data", path, "--precisions")
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--task", "tag", "--data", str(path), "--precisions"])
    assert "--precisions works with embed, not with tag" in done.output + done.stderr


def test_token_vectors_equal_the_last_hidden_states_of_transformers() -> None:
    torch.manual_seed(0)
    tokenizer = wrap("wordpiece")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    texts = ["the cat sat on the mat", "a dog", ""]
    found = Predictor(from_huggingface(theirs), tokenizer).encode_tokens(texts)
    for text, vectors in zip(texts, found, strict=True):
        with torch.no_grad():
            expected = theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-5)
