"""Tests of DistilBERT, ELECTRA and ALBERT that go beyond those of all families."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, DistilBertConfig, ElectraConfig

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, from_huggingface, to_huggingface
from bertblocks.analysis import build, count_parameters
from bertblocks.checkpoints.families import read_config
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import expect_log, pad_ids, ragged_ids

#: As published: google/electra-small-discriminator, albert/albert-base-v2.
ELECTRA_SMALL = {"hidden_size": 256, "embedding_size": 128, "num_attention_heads": 4, "intermediate_size": 1024}
ALBERT_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DistilBertConfig(), 66_362_880),
        (ElectraConfig(**ELECTRA_SMALL), 13_483_008),
        (AlbertConfig(**ALBERT_BASE), 11_683_584),
    ],
    ids=["distilbert-base", "electra-small", "albert-base"],
)
def test_published_numbers_of_parameters(config: Any, expected: Any) -> None:
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(config)
    ours = count_parameters(build(read_config(config), "base"))["total"]
    assert ours == theirs.num_parameters() == expected


# ---------------------------------------------------------------------- dropout


def test_distilbert_dropouts_are_where_transformers_has_them() -> None:
    theirs = DistilBertConfig(dropout=0.2, attention_dropout=0.3, qa_dropout=0.4, seq_classif_dropout=0.5)
    ours = read_config(theirs)
    dropouts = {
        key: getattr(ours, key) for key in ours.to_dict() if key.endswith("_dropout") and key != "token_dropout"
    }
    assert dropouts == {
        "embedding_dropout": 0.2,
        "attention_dropout": 0.3,
        "attention_output_dropout": 0.0,
        "mlp_dropout": 0.0,
        "mlp_output_dropout": 0.2,
        "classifier_dropout": 0.5,
        "classifier_head_dropout": 0.0,
        "token_classifier_dropout": 0.2,
        "qa_dropout": 0.4,
    }


def test_electra_and_albert_dropouts_are_where_transformers_has_them() -> None:
    theirs = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    electra = read_config(ElectraConfig(**theirs, classifier_dropout=0.4))
    assert electra.embedding_dropout == electra.attention_output_dropout == electra.mlp_output_dropout == 0.2
    assert electra.classifier_dropout == electra.classifier_head_dropout == electra.token_classifier_dropout == 0.4
    albert = read_config(AlbertConfig(**theirs, classifier_dropout_prob=0.4))
    assert albert.embedding_dropout == albert.attention_output_dropout == 0.2
    assert albert.mlp_output_dropout == 0.0  # transformers' AlbertLayer has a dropout there that it never calls
    assert albert.classifier_dropout == albert.token_classifier_dropout == 0.4
    for config in (electra, albert):
        assert (config.attention_dropout, config.mlp_dropout, config.qa_dropout) == (0.3, 0.0, 0.0)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ElectraConfig(is_decoder=True), "is_decoder is True in this electra config"),
        (ElectraConfig(add_cross_attention=True), "add_cross_attention is True in this electra config"),
        (ElectraConfig(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),  # type: ignore[call-arg]
        (AlbertConfig(inner_group_num=2), "inner_group_num is 2 in this albert config; BertBlocks supports 1 only"),
        (AlbertConfig(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),  # type: ignore[call-arg]
        (AlbertConfig(num_hidden_groups=13), "num_hidden_groups is 13; it must be at most num_hidden_layers = 12"),
    ],
)
def test_unsupported_config_values_raise_an_error_that_names_them(config: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(config)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("bert", {"embedding_size": 128}, "embedding_size is 128; a bert checkpoint has 768"),
        ("bert", {"num_hidden_groups": 1}, "num_hidden_groups is 1; a bert checkpoint has 12"),
        ("bert", {"qa_dropout": 0.1}, "qa_dropout is 0.1; a bert checkpoint has 0.0"),
        ("electra", {"embedding_projection": True}, "embedding_projection is True; an? electra checkpoint has False"),
        ("albert", {}, "embedding_projection is False; an? albert checkpoint has True"),
        ("distilbert", {"type_vocab_size": 0, "norm_eps": 1e-5}, "norm_eps is 1e-05; a distilbert checkpoint has 1e-1"),
    ],
)
def test_values_that_a_family_cannot_represent_raise_an_error_that_names_them(
    family: Any, options: Any, message: Any
) -> None:
    with torch.device("meta"):
        model = BertBlocksModel(BertBlocksConfig(**options))
    with pytest.raises(ConfigError, match=message):
        to_huggingface(model, family)


# ---------------------------------------------------------------------- folders


def compare(ours: Any, theirs: Any, key: str, their_key: str) -> None:
    ids, mask = pad_ids(ragged_ids([20, 7], vocab_size=90))
    with torch.no_grad():
        actual, expected = ours(ids, mask)[key], theirs(ids, mask)[their_key]
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


def test_an_electra_discriminator_is_read_with_its_head_or_as_an_encoder(tmp_path: Path) -> None:
    theirs = transformers.ElectraForPreTraining(FAMILY_CASES["electra"].make_config()).eval()
    theirs.save_pretrained(tmp_path)
    compare(from_huggingface(tmp_path), theirs, "logits", "logits")
    ours = from_huggingface(tmp_path, task="base")
    compare(ours, theirs.electra, "last_hidden_state", "last_hidden_state")
    with expect_log("has no classifier, classifier_head: newly initialized"):
        from_huggingface(tmp_path, task="sequence-classification")


def test_albert_with_both_pretraining_heads_is_read_for_masked_lm(tmp_path: Path) -> None:
    theirs = transformers.AlbertForPreTraining(FAMILY_CASES["albert"].make_config()).eval()
    theirs.save_pretrained(tmp_path)
    compare(from_huggingface(tmp_path), theirs, "logits", "prediction_logits")
    # the pooler that was trained for sentence order starts a classifier
    with expect_log("has no classifier: newly initialized"):
        ours = from_huggingface(tmp_path, task="sequence-classification")
    assert torch.equal(ours.model.pooler.dense.weight, theirs.albert.pooler.weight)


def test_untied_albert_reads_the_bias_that_transformers_uses() -> None:
    theirs = transformers.AlbertForMaskedLM(FAMILY_CASES["albert"].make_config(tie_word_embeddings=False)).eval()
    with torch.no_grad():
        theirs.predictions.decoder.bias.normal_()
    compare(from_huggingface(theirs), theirs, "logits", "logits")


@pytest.mark.parametrize("name", ["distilbert", "electra", "albert"])
def test_old_files_with_position_ids_are_read(tmp_path: Path, name: Any) -> None:
    theirs = transformers.AutoModel.from_config(FAMILY_CASES[name].make_config()).eval()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "embeddings.position_ids": torch.arange(320)[None]}, tmp_path / "model.safetensors")
    compare(from_huggingface(tmp_path), theirs, "last_hidden_state", "last_hidden_state")


def test_a_checkpoint_with_more_groups_than_its_config_raises(tmp_path: Path) -> None:
    transformers.AlbertModel(FAMILY_CASES["albert"].make_config(num_hidden_groups=2)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_groups": 1}))
    with pytest.raises(ValueError, match=r"albert_layer_groups\.1.* has no place in an? albert model"):
        from_huggingface(tmp_path)
