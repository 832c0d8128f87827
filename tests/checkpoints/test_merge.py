"""Merging: the mean against numpy, any split into files, and errors that leave no files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizer
from typer.testing import CliRunner

import bertblocks
from bertblocks import BertBlocksForMaskedLM
from bertblocks.checkpoints.files import read_tensors
from bertblocks.checkpoints.merge import merge
from bertblocks.cli.main import app
from tests.helpers import tiny_config


@pytest.fixture
def folders(tmp_path: Path) -> Any:
    """Three checkpoints of one model with a tokenizer."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog"]))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        BertBlocksForMaskedLM(tiny_config(vocab_size=len(tokenizer), num_hidden_layers=1)).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


@pytest.mark.parametrize("weights", [None, [1, 2, 5]])
def test_every_merged_tensor_is_the_weighted_mean(folders: Any, tmp_path: Path, weights: Any) -> None:
    done = merge(folders, tmp_path / "mean", weights)
    shares = np.array(weights or [1, 1, 1]) / np.sum(weights or [1, 1, 1])
    assert list(done.shares.values()) == pytest.approx(shares)
    sources = [load_file(folder / "model.safetensors") for folder in folders]
    merged = load_file(tmp_path / "mean" / "model.safetensors")
    assert set(merged) == set(sources[0])
    assert done.tensors == len(merged)
    for name, tensor in merged.items():
        expected = sum(share * source[name].double().numpy() for share, source in zip(shares, sources, strict=True))
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-6, atol=1e-8)
    model, tokenizer = bertblocks.load(tmp_path / "mean")
    assert isinstance(model, BertBlocksForMaskedLM)
    assert tokenizer.tokenize("cat dog") == ["cat", "dog"]


def test_merging_equal_checkpoints_changes_nothing_in_any_precision(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config(num_hidden_layers=1)).to(torch.bfloat16)
    for name in "abc":
        model.save_pretrained(tmp_path / name)
    merge([tmp_path / name for name in "abc"], tmp_path / "mean", [0.3, 0.3, 0.4])
    for name, tensor in load_file(tmp_path / "mean" / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, load_file(tmp_path / "a" / "model.safetensors")[name])


def test_merge_reads_sharded_checkpoints_and_those_of_other_libraries(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    models = [BertForMaskedLM(config) for _ in range(2)]
    models[0].save_pretrained(tmp_path / "a", max_shard_size=20_000)
    models[1].save_pretrained(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean", max_shard_bytes=30_000)
    assert len(list((tmp_path / "mean").glob("*.safetensors"))) > 1
    first, second, mean = (read_tensors(tmp_path / name) for name in ("a", "b", "mean"))
    assert set(mean) == set(first)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    BertForMaskedLM.from_pretrained(tmp_path / "mean")


def change(folder: Any, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    name = "model.encoder.layers.0.mlp.up.bias"
    if how == "shape":
        tensors[name] = torch.zeros(5)
    elif how == "type":
        tensors[name] = tensors[name].half()
    elif how == "missing":
        del tensors[name]
    elif how == "infinite":
        tensors[name][0] = float("nan")
    elif how == "config":
        config.write_text(json.dumps({**json.loads(config.read_text()), "norm_eps": 0.1}))
    elif how == "tokenizer":
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace('"cat"', '"cow"'))
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
        return
    elif how == "absent":
        weights.unlink()
        return
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"mlp.up.bias has shape \[24\] in .*a and \[5\] in .*b"),
        ("type", r"mlp.up.bias has type F32 in .*a and F16 in .*b"),
        ("missing", r".*a has model.encoder.layers.0.mlp.up.bias, which .*b lacks"),
        ("infinite", r"mlp.up.bias has values in one of the checkpoints that are not finite"),
        ("config", r"norm_eps is 1e-12 in .*a and 0.1 in .*b"),
        ("tokenizer", r"b/tokenizer.json differs from the tokenizer of .*a"),
        ("truncated", r"b/model.safetensors is damaged"),
        ("absent", r"b has no model.safetensors"),
    ],
)
def test_checkpoints_that_cannot_be_averaged_raise_an_error_that_names_the_reason(
    folders: Any, tmp_path: Path, how: Any, message: Any
) -> None:
    change(folders[1], how)
    before = set(tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=message):
        merge(folders, tmp_path / "mean")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ("a", None, "at least two"),
        ("aa", None, "given twice"),
        ("ab", [1], "1 weights are given for 2 checkpoints"),
        ("ab", [1, -1], "each must be above 0"),
        ("ab", [1, float("nan")], "each must be above 0"),
    ],
)
def test_invalid_merge_arguments_raise(folders: Any, tmp_path: Path, names: Any, weights: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        merge([tmp_path / name for name in names], tmp_path / "mean", weights)


def test_merge_does_not_overwrite(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        merge(folders[:2], folders[2])


def test_merge_prints_what_it_wrote(folders: Any, tmp_path: Path) -> None:
    arguments = ["merge", *map(str, folders), "--output", str(tmp_path / "mean")]
    result = CliRunner().invoke(app, [*arguments, "--weights", "2,1,1", "--json"])
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["shares"].values()) == [0.5, 0.25, 0.25]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "exists and is not empty" in result.stderr
    result = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "other"), "--weights", "2,x,1"])
    assert result.exit_code == 1
    assert "--weights is '2,x,1'" in result.stderr
    result = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "other")])
    assert "the mean of 3 checkpoints" in result.stdout
