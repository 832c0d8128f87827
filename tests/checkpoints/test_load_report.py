"""Loading reads the head that a checkpoint has, never makes one up, and reports what it found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import bertblocks
from bertblocks import BertBlocksForMaskedLM, BertBlocksModel, Predictor
from bertblocks.checkpoints.load import load_trained, load_with_report
from bertblocks.checkpoints.quantize import quantize_folder
from bertblocks.cli.main import app
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import expect_log, tiny_config
from tests.small_tokenizers import wrap


def claim(folder: Path, architecture: str) -> Path:
    """Makes config.json name a class whose head the weights do not have, as many sentence encoders do."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))
    return folder


@pytest.fixture
def headless(tmp_path: Path) -> Path:
    transformers.BertModel(FAMILY_CASES["bert"].make_config()).save_pretrained(tmp_path / "bert")
    return claim(tmp_path / "bert", "BertForMaskedLM")


def test_a_checkpoint_without_the_head_it_names_is_read_as_an_encoder(headless: Any) -> None:
    with expect_log("names a masked-lm model but has no masked-lm head; it was read as base"):
        model, _ = bertblocks.load(headless)
    assert type(model) is BertBlocksModel
    _, report = load_with_report(headless)
    assert (report.family, report.task, report.named_task, report.fresh) == ("bert", "base", "masked-lm", ())


def test_convert_compares_a_headless_checkpoint_as_an_encoder(headless: Any, tmp_path: Path) -> None:
    with expect_log("read as base"):
        done = bertblocks.convert(headless, tmp_path / "ours")
    assert done.task == "base"
    assert {difference.output for difference in done.differences} == {"last_hidden_state", "pooler_output"}
    theirs = transformers.BertModel.from_pretrained(headless).eval()
    ours, _ = bertblocks.load(tmp_path / "ours")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).last_hidden_state, theirs(ids).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_commands_never_write_an_untrained_head(headless: Any, tmp_path: Path) -> None:
    with expect_log("read as base"):
        assert quantize_folder(headless, tmp_path / "int8", min_cosine=0.0).task == "base"
    assert not any("decoder" in name for name in load_file(tmp_path / "int8" / "model.safetensors"))
    for command in ("convert", "quantize"):
        arguments = [command, str(headless), str(tmp_path / "out"), "--task", "masked-lm"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert "has no trained masked-lm head" in done.stderr
        assert not (tmp_path / "out").exists()


def test_the_task_option_selects_the_head(tmp_path: Path) -> None:
    transformers.BertForMaskedLM(FAMILY_CASES["bert"].make_config()).save_pretrained(tmp_path / "bert")
    for command, options in (("convert", []), ("quantize", ["--min-cosine", "0"])):
        arguments = [command, str(tmp_path / "bert"), str(tmp_path / command), "--task", "base", "--json", *options]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["task"] == "base"


def test_a_head_that_the_caller_asks_for_is_initialized_and_reported(headless: Any) -> None:
    _, report = load_with_report(headless, "masked-lm")
    assert (report.task, report.fresh) == ("masked-lm", ("decoder", "head"))
    with pytest.raises(ValueError, match="has no trained masked-lm head: it lacks decoder, head"):
        load_trained(headless, "masked-lm")


def test_a_pretraining_checkpoint_without_its_order_head_is_read_as_a_masked_lm(tmp_path: Path) -> None:
    transformers.BertForMaskedLM(FAMILY_CASES["bert"].make_config()).save_pretrained(tmp_path / "bert")
    _, report = load_with_report(claim(tmp_path / "bert", "BertForPreTraining"))
    assert (report.task, report.fresh) == ("masked-lm", ())


def test_fill_mask_without_a_head_raises(headless: Any) -> None:
    tokenizer = wrap("wordpiece")
    with expect_log("read as base"):
        predictor = Predictor(headless, tokenizer)
    with pytest.raises(ValueError, match="fill_mask needs a model with a masked-lm head"):
        predictor.fill_mask([f"plain {tokenizer.mask_token}"])
    with pytest.raises(ValueError, match="has no trained masked-lm head"):
        Predictor(headless, tokenizer, task="masked-lm")


@pytest.mark.parametrize("architecture", ["BertBlocksForSequenceClassification", "BertBlocksForMaskedLM"])
def test_own_checkpoints_without_the_head_they_name_are_read_as_encoders(tmp_path: Path, architecture: Any) -> None:
    BertBlocksModel(tiny_config()).save_pretrained(tmp_path / "own")
    _, report = load_with_report(claim(tmp_path / "own", architecture))
    assert (report.family, report.task, report.fresh) == ("bertblocks", "base", ())


def test_an_encoder_read_from_a_task_model_does_not_get_a_new_pooler(tmp_path: Path) -> None:
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path / "own")
    model, report = load_with_report(tmp_path / "own", "base")
    assert model.pooler is None
    assert report.fresh == ()
    assert report.unread == ("decoder", "head")


def test_a_stored_copy_of_a_tied_decoder_is_not_reported_as_unread(tmp_path: Path) -> None:
    transformers.BertForMaskedLM(FAMILY_CASES["bert"].make_config()).save_pretrained(tmp_path / "bert")
    weights = tmp_path / "bert" / "model.safetensors"
    tensors = load_file(weights)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    with expect_log(None):
        bertblocks.load(tmp_path / "bert")
    tensors["cls.predictions.decoder.weight"] += 1.0
    save_file(tensors, weights, metadata={"format": "pt"})
    with expect_log(r"also has cls\.predictions, which this model does not use"):
        bertblocks.load(tmp_path / "bert")
