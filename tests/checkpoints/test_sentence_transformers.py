"""Folders of sentence-transformers: embeddings equal its own and a formula, and conversions keep every module."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel, Gemma3TextModel
from typer.testing import CliRunner

from bertblocks import Predictor, SequenceLayout, convert
from bertblocks.checkpoints.quantize import quantize_folder
from bertblocks.checkpoints.sentence_transformers import POOLINGS, EmbeddingSettings, read_settings, write_settings
from bertblocks.cli.main import app
from bertblocks.nn.embedding_head import ACTIVATIONS, EmbeddingHead
from bertblocks.nn.head import POOLINGS as OURS
from tests.checkpoints.family_cases import gemma_config
from tests.small_tokenizers import wrap

TEXTS = ["plain words are here", "Two, leading? trailing! don't U.S.", "", "plain", "xxxxxxxx words here here here"]
HIDDEN = 32
PROMPTS = {"prompts": {"query": "two: ", "document": "here "}, "default_prompt_name": None}


def save_encoder(folder: Path, kind: str = "bert") -> None:
    torch.manual_seed(0)
    if kind == "gemma":
        model: Any = Gemma3TextModel(gemma_config(vocab_size=120, pad_token_id=0, num_hidden_layers=2))
    else:
        sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = BertConfig(vocab_size=120, max_position_embeddings=64, initializer_range=0.3, **sizes)
        model = BertModel(config)
    model.save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)


def save_module(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


def dense(folder: Path, sizes: tuple[int, int], activation: str, bias: bool = True, residual: bool = False) -> None:
    values: dict[str, Any] = {"in_features": sizes[0], "out_features": sizes[1], "bias": bias}
    kind = getattr(nn, activation)
    values["activation_function"] = f"{kind.__module__}.{activation}"
    tensors = {"linear.weight": torch.randn(sizes[1], sizes[0]) / 4}
    if bias:
        tensors["linear.bias"] = torch.randn(sizes[1])
    if residual:
        values["use_residual"] = True
        if sizes[0] != sizes[1]:
            tensors["residual.weight"] = torch.randn(sizes[1], sizes[0]) / 4
    save_module(folder, values, tensors)


def save_folder(folder: Path, *kinds: str, pooling: Any = "mean", encoder: str = "bert") -> Path:
    """Writes an encoder, its pooling, and modules by short names: two kinds of Dense, LayerNorm and Normalize."""
    save_encoder(folder, encoder)
    width = HIDDEN * (len(pooling) if isinstance(pooling, list) else 1)
    save_module(folder / "1_Pooling", {"word_embedding_dimension": HIDDEN, "pooling_mode": pooling})
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for number, kind in enumerate(kinds, start=2):
        path = folder / f"{number}_{kind}"
        if kind == "up":
            dense(path, (width, 40), "Tanh")
            width = 40
        elif kind == "down":
            dense(path, (width, 24), "Identity", bias=False)
            width = 24
        elif kind == "residual":
            dense(path, (width, 24), "GELU", residual=True)
            width = 24
        elif kind == "LayerNorm":
            weights = {"norm.weight": torch.rand(width) + 0.5, "norm.bias": torch.randn(width)}
            save_module(path, {"dimension": width}, weights)
        modules.append((path.name, kind if kind in ("LayerNorm", "Normalize") else "Dense"))
    entries = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{k}"}
        for i, (p, k) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    return folder


def peer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


CHAINS: list[tuple[str, ...]] = [
    ("up", "down", "Normalize"),
    ("LayerNorm",),
    ("residual", "LayerNorm", "Normalize", "up"),
]


@pytest.mark.parametrize("kinds", CHAINS, ids="-".join)
def test_modules_behind_the_pooling_equal_sentence_transformers(tmp_path: Path, kinds: Any) -> None:
    folder = save_folder(tmp_path / "model", *kinds)
    predictor, theirs = Predictor(folder, dtype=torch.float32), peer(folder)
    raw = theirs.encode(TEXTS)
    np.testing.assert_allclose(predictor.encode(TEXTS), theirs.encode(TEXTS, normalize_embeddings=True), atol=1e-5)
    if kinds[-1] != "Normalize":
        np.testing.assert_allclose(predictor.encode(TEXTS, normalize=False), raw, atol=1e-5 * abs(raw).max())
    assert predictor.embedding_size == raw.shape[1] == theirs.get_embedding_dimension()
    assert predictor.encode([]).shape == (0, raw.shape[1])


@pytest.mark.parametrize("pooling", [*POOLINGS, ["cls", "mean"], ["weightedmean", "max", "lasttoken"]], ids=str)
def test_every_pooling_equals_sentence_transformers(tmp_path: Path, pooling: Any) -> None:
    folder = save_folder(tmp_path / "model", pooling=pooling)
    expected = peer(folder).encode(TEXTS)
    found = Predictor(folder, dtype=torch.float32).encode(TEXTS, normalize=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_embeddings_equal_their_formula(tmp_path: Path) -> None:
    """Without sentence-transformers: mean and last token, then tanh(x W + b), then x W."""
    folder = save_folder(tmp_path / "model", "up", "down", pooling=["mean", "lasttoken"])
    encoder, tokenizer = BertModel.from_pretrained(folder).eval(), wrap("wordpiece")
    up, down = load_file(folder / "2_up" / "model.safetensors"), load_file(folder / "3_down" / "model.safetensors")
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        x = torch.cat((hidden.mean(0), hidden[-1]))
        expected.append(down["linear.weight"] @ torch.tanh(up["linear.weight"] @ x + up["linear.bias"]))
    found = Predictor(folder, dtype=torch.float32).encode(TEXTS, normalize=False)
    np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=1e-5)
    unit = F.normalize(torch.stack(expected)[:, :10], dim=-1)
    cut = Predictor(folder, dtype=torch.float32).encode(TEXTS, dimensions=10)
    np.testing.assert_allclose(cut, unit.numpy(), atol=1e-5)


def test_embedding_gemma_equals_sentence_transformers_for_both_roles(tmp_path: Path) -> None:
    """Its folder: a bidirectional Gemma 3, the mean, two Dense modules, Normalize, and a prompt for each role."""
    folder = save_folder(tmp_path / "model", "up", "down", "Normalize", encoder="gemma")
    predictor, theirs = Predictor(folder, dtype=torch.float32), peer(folder)
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    np.testing.assert_allclose(predictor.encode(TEXTS, prompt_name="query"), queries, atol=1e-5)
    np.testing.assert_allclose(predictor.encode(TEXTS, prompt_name="document"), documents, atol=1e-5)
    np.testing.assert_allclose(predictor.encode(TEXTS), theirs.encode(TEXTS), atol=1e-5)
    assert abs(queries - documents).max() > 0.01


def test_prompts_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"passage": "two "}}')
    predictor = Predictor(folder, dtype=torch.float32)
    plain = predictor.encode(TEXTS)
    np.testing.assert_array_equal(predictor.encode(TEXTS, prompt_name="query"), plain)
    assert abs(predictor.encode(TEXTS, prompt_name="passage") - plain).max() > 0.01
    with pytest.raises(ValueError, match=r"prompt_name is 'pasage'; .*query, document, passage \(did you mean"):
        predictor.encode(TEXTS, prompt_name="pasage")
    with pytest.raises(ValueError, match=r"prompt is 'a' and prompt_name is 'query'; give one of them"):
        predictor.encode(TEXTS, prompt="a", prompt_name="query")
    done = CliRunner().invoke(
        app, ["embed", str(folder), "plain", "--prompt-name", "passage", "--json", "--dtype", "float32"]
    )
    assert done.exit_code == 0, done.output
    expected = predictor.encode(["plain"], prompt_name="passage")[0]
    np.testing.assert_allclose(json.loads(done.stdout)["embedding"], expected, atol=1e-5)


def test_windows_of_long_texts_are_averaged(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "up")
    vector = Predictor(folder, dtype=torch.float32, max_length=20).encode(["plain words are here " * 20])
    assert vector.shape == (1, 40)
    assert np.isfinite(vector).all()


# ---------------------------------------------------------------------- conversions


@pytest.mark.parametrize("to", ["bertblocks", "native"])
def test_convert_keeps_the_modules(tmp_path: Path, to: str) -> None:
    folder = save_folder(tmp_path / "model", "residual", "LayerNorm", "Normalize", pooling=["cls", "weightedmean"])
    convert(folder, tmp_path / "out", to=to)
    expected = Predictor(folder, dtype=torch.float32).encode(TEXTS, prompt_name="query")
    found = Predictor(tmp_path / "out", dtype=torch.float32).encode(TEXTS, prompt_name="query")
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_quantize_keeps_the_modules(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "up", "down")
    quantize_folder(folder, tmp_path / "out", min_cosine=0.0)
    weights = [load_file(path / "2_up" / "model.safetensors") for path in (folder, tmp_path / "out")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    expected, found = (Predictor(path).encode(TEXTS) for path in (folder, tmp_path / "out"))
    assert (expected * found).sum(-1).min() > 0.9
    assert Predictor(folder, int8=True).encode(TEXTS).shape == (len(TEXTS), 24)


def test_convert_turns_pickled_modules_into_safetensors(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "up")
    expected = Predictor(folder, dtype=torch.float32).encode(TEXTS)
    weights = folder / "2_up" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(ValueError, match=r"2_up/pytorch_model\.bin is a pickle.*--allow-pickle"):
        Predictor(folder)
    convert(folder, tmp_path / "out", allow_pickle=True)
    assert not list((tmp_path / "out").rglob("*.bin"))
    np.testing.assert_allclose(Predictor(tmp_path / "out", dtype=torch.float32).encode(TEXTS), expected, atol=1e-6)


def test_modules_compute_in_fp32_next_to_an_encoder_in_half_precision(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "up", "LayerNorm")
    vectors = [Predictor(folder, dtype=dtype).encode(TEXTS) for dtype in (torch.float32, torch.bfloat16)]
    assert all(vector.dtype == np.float32 for vector in vectors)
    assert (vectors[0] * vectors[1]).sum(-1).min() > 0.95
    head = EmbeddingHead("mean", HIDDEN, read_settings(folder).layers).to(torch.bfloat16)
    layout = SequenceLayout.from_shape(2, 3, torch.device("cpu"))
    assert head(torch.randn(6, HIDDEN, dtype=torch.bfloat16), layout).dtype == torch.float32


@pytest.mark.parametrize("pooling", ["lasttoken", ["cls", "mean"], ["mean", "cls"]], ids=str)
def test_settings_are_written_as_they_are_read(tmp_path: Path, pooling: Any) -> None:
    folder = save_folder(tmp_path / "model", "residual", "Normalize", "LayerNorm", "Normalize", pooling=pooling)
    before = read_settings(folder)
    (tmp_path / "out").mkdir()
    write_settings(tmp_path / "out", before, HIDDEN)
    after = read_settings(tmp_path / "out")
    for key in ("pooling", "max_length", "prompts", "default_prompt"):
        assert getattr(after, key) == getattr(before, key)
    assert [type(layer) for layer in after.layers] == [type(layer) for layer in before.layers]
    for layer, other in zip(before.layers, after.layers, strict=True):
        assert repr(layer) == repr(other)
        for name, tensor in layer.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name


def test_all_poolings_of_sentence_transformers_are_ours() -> None:
    assert set(POOLINGS.values()) == set(OURS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(activation: str) -> None:
    assert ACTIVATIONS[activation] is getattr(nn, activation)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "evil.Module"}, "activation_function is 'evil.Module'; it must be one of torch.nn's"),
        ({"in_features": "a"}, "in_features is 'a'; it must be a whole number"),
        ({"out_features": 10**9}, "out_features is 1000000000; it must be a whole number from 1 to"),
        ({"in_features": 2**20, "out_features": 2**20}, "linear.bias has shape [40]"),
        ({"out_features": 39}, "linear.bias has shape [40]; the module's config asks for [39]"),
        ({"bias": False}, "linear.bias has shape [40]; the module's config asks for None"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        ({"use_residual": True}, "residual.weight has shape None; the module's config asks for [40, 32]"),
    ],
)
def test_bad_dense_modules_raise_errors_that_name_the_file(tmp_path: Path, changes: Any, message: str) -> None:
    folder = save_folder(tmp_path / "model", "up")
    path = folder / "2_up" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=rf"2_up.*{re.escape(message)}"):
        Predictor(folder)


def test_sizes_that_do_not_fit_raise(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "up")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls", "mean"]}')
    with pytest.raises(ValueError, match=r"Dense module 0 behind the pooling reads 32 numbers; it gets 64"):
        Predictor(folder)
    (folder / "2_up" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"2_up/model\.safetensors"):
        Predictor(folder)


def test_a_default_prompt_that_is_not_defined_is_empty() -> None:
    settings = EmbeddingSettings(prompts={"document": "d: "}, default_prompt="query")
    assert [settings.find_prompt(*names) for names in ((None, None), (None, "document"), ("document", None))] == [
        "",
        "d: ",
        "d: ",
    ]
