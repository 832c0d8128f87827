"""Tests of RoBERTa, its siblings and Megatron-BERT that go beyond those of all families: positions, heads, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, from_huggingface, to_huggingface
from bertblocks.checkpoints.families import FAMILIES, read_config
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import expect_log, ragged_ids

ROBERTAS = ["roberta", "xlm-roberta", "camembert", "roberta-prelayernorm"]
NAMES = [*ROBERTAS, "megatron-bert"]
TASKS = list(FAMILIES["roberta"].model_classes)
#: The padding id of every published RoBERTa.
PAD = 1


def reference(name: str, task: str, **options: Any) -> Any:
    options.setdefault("num_labels", 2 if task == "question-answering" else 3)
    model = getattr(transformers, FAMILIES[name].model_classes[task])(FAMILY_CASES[name].make_config(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def batch(side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Pads with 1, which no text contains."""
    rows = [ids.clamp(min=PAD + 1) for ids in ragged_ids([300, 65, 1], vocab_size=90)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side=side)
    return ids, (ids != PAD).long()


def zero_padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = batch()
    return ids.masked_fill(mask == 0, 0), mask


def assert_equal_outputs(ours: Any, theirs: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
    with torch.no_grad():
        expected, actual = theirs(ids, attention_mask=mask), ours(ids, attention_mask=mask)
    for key in expected:
        pair = actual[key], expected[key]
        mine, other = (tensor[mask == 1] if tensor.shape[:2] == mask.shape else tensor for tensor in pair)
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def assert_equal_round_trip(ours: Any, theirs: Any, name: str) -> None:
    again = to_huggingface(ours, name)
    assert type(again) is type(theirs)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


# ---------------------------------------------------------------------- positions


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ROBERTAS)
def test_positions_count_from_the_published_padding_id(name: Any, task: Any) -> None:
    theirs = reference(name, task, pad_token_id=PAD, bos_token_id=0, max_position_embeddings=302)
    ours = from_huggingface(theirs)
    assert ours.config.position_offset == PAD + 1
    assert_equal_outputs(ours, theirs, *batch())
    assert_equal_round_trip(ours, theirs, name)


@pytest.mark.parametrize("name", ROBERTAS)
def test_left_padding_does_not_shift_positions(name: Any) -> None:
    theirs = reference(name, "token-classification", pad_token_id=PAD, bos_token_id=0)
    assert_equal_outputs(from_huggingface(theirs), theirs, *batch("left"))


def test_position_rows_before_the_first_position_are_left_out() -> None:
    """The 514 rows of the published RoBERTa fit 512 tokens."""
    ours = from_huggingface(reference("roberta", "base", pad_token_id=PAD, bos_token_id=0, max_position_embeddings=12))
    ours(torch.full((1, 10), 5))
    with pytest.raises(ValueError, match="max_position_embeddings = 12 leaves room for 10"):
        ours(torch.full((1, 11), 5))


# ---------------------------------------------------------------------- heads


@pytest.mark.parametrize("name", NAMES)
def test_an_untied_decoder_keeps_its_matrix_and_its_bias(name: Any) -> None:
    theirs = reference(name, "masked-lm", tie_word_embeddings=False)
    head = theirs.cls.predictions if name == "megatron-bert" else theirs.lm_head
    with torch.no_grad():
        # an untied decoder has its own bias and does not use this one
        head.bias.copy_(head.decoder.bias)
    ours = from_huggingface(theirs)
    assert not ours.config.tie_word_embeddings
    assert_equal_outputs(ours, theirs, *zero_padded())
    assert_equal_round_trip(ours, theirs, name)


@pytest.mark.parametrize("name", ROBERTAS)
def test_the_masked_lm_head_uses_gelu_whatever_the_layers_use(name: Any) -> None:
    config = read_config(FAMILY_CASES[name].make_config(hidden_act="relu"))
    assert (config.hidden_act, config.mlm_head_act) == ("relu", "gelu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_pooler", [True, False])
def test_a_base_model_has_a_pooler_only_if_the_checkpoint_has(name: Any, has_pooler: Any) -> None:
    model_class = getattr(transformers, FAMILIES[name].model_classes["base"])
    theirs = model_class(FAMILY_CASES[name].make_config(), add_pooling_layer=has_pooler).eval()
    ours = from_huggingface(theirs)
    assert (ours.pooler is not None) == has_pooler
    again = to_huggingface(ours, name)
    assert set(again.state_dict()) == set(theirs.state_dict())


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize(("classifier", "expected"), [(None, 0.2), (0.4, 0.4), (0.0, 0.0)])
@pytest.mark.parametrize("name", ROBERTAS)
def test_every_dropout_key_is_mapped(name: Any, classifier: Any, expected: Any) -> None:
    dropouts = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": classifier}
    ours = read_config(FAMILY_CASES[name].make_config(**dropouts))
    assert (ours.embedding_dropout, ours.attention_output_dropout, ours.mlp_output_dropout) == (0.2, 0.2, 0.2)
    assert (ours.attention_dropout, ours.mlp_dropout) == (0.3, 0.0)
    assert ours.classifier_dropout == ours.classifier_head_dropout == expected
    theirs = FAMILIES[name].write_config(ours)
    assert {key: getattr(theirs, key) for key in dropouts} == dropouts


def test_megatron_bert_has_one_dropout_for_all_but_attention() -> None:
    make_config = FAMILY_CASES["megatron-bert"].make_config
    ours = read_config(make_config(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3))
    assert (ours.embedding_dropout, ours.attention_output_dropout, ours.mlp_output_dropout) == (0.2, 0.2, 0.2)
    assert (ours.attention_dropout, ours.mlp_dropout, ours.classifier_dropout) == (0.3, 0.0, 0.2)
    ours.classifier_dropout = 0.1
    with pytest.raises(ConfigError, match=r"classifier_dropout is 0.1; a megatron-bert checkpoint has 0.2"):
        FAMILIES["megatron-bert"].write_config(ours)


@pytest.mark.parametrize("task", TASKS[1:])
@pytest.mark.parametrize("name", NAMES)
def test_dropouts_are_where_transformers_has_them(name: Any, task: Any) -> None:
    """Each dropout scales without dropping, so an extra dropout or a wrong rate changes the output."""
    dropouts = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.0}
    if name in ROBERTAS:
        dropouts["classifier_dropout"] = 0.4
    theirs = reference(name, task, **dropouts)
    ours = from_huggingface(theirs)
    for model in (ours, theirs):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(lambda module, inputs, output: inputs[0] / (1 - module.p))
    assert_equal_outputs(ours, theirs, *zero_padded())


# ---------------------------------------------------------------------- siblings


@pytest.mark.parametrize("target", ["roberta", "xlm-roberta", "camembert"])
@pytest.mark.parametrize("source", ["roberta", "xlm-roberta", "camembert"])
def test_roberta_siblings_read_each_others_weights(source: Any, target: Any) -> None:
    theirs = reference(source, "masked-lm")
    other = to_huggingface(from_huggingface(theirs), target)
    assert other.config.model_type == target
    assert set(other.state_dict()) == set(theirs.state_dict())
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key


# ---------------------------------------------------------------------- published files


def save_tensors(folder: Any, tensors: dict[str, torch.Tensor], config: dict) -> None:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_the_published_roberta_checkpoint_is_read(tmp_path: Path, name: Any) -> None:
    """As on the hub: position_ids, an unused pooler, one decoder bias, and a key of transformers 4."""
    theirs = reference(name, "masked-lm", pad_token_id=PAD, bos_token_id=0)
    tensors = {key: tensor for key, tensor in theirs.state_dict().items() if key != "lm_head.decoder.bias"}
    tensors["roberta.embeddings.position_ids"] = torch.arange(320)[None]
    tensors["roberta.pooler.dense.weight"], tensors["roberta.pooler.dense.bias"] = torch.zeros(32, 32), torch.zeros(32)
    config = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    save_tensors(tmp_path, tensors, {**config, "position_embedding_type": "absolute"})
    assert_equal_outputs(from_huggingface(tmp_path), theirs, *batch())


def test_the_published_megatron_bert_checkpoint_is_read_without_its_next_sentence_head(tmp_path: Path) -> None:
    theirs = transformers.MegatronBertForPreTraining(FAMILY_CASES["megatron-bert"].make_config()).eval()
    tensors = {key: tensor for key, tensor in theirs.state_dict().items() if key not in theirs.all_tied_weights_keys}
    save_tensors(tmp_path, tensors, {**theirs.config.to_dict(), "architectures": ["MegatronBertForPreTraining"]})
    ids, mask = zero_padded()
    with torch.no_grad():
        expected, actual = theirs(ids, mask), from_huggingface(tmp_path)(ids, mask)
    torch.testing.assert_close(
        actual.prediction_logits[mask == 1], expected.prediction_logits[mask == 1], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(actual.seq_relationship_logits, expected.seq_relationship_logits, atol=1e-5, rtol=1e-5)


def test_a_masked_lm_checkpoint_gets_a_new_classifier(tmp_path: Path) -> None:
    reference("roberta", "masked-lm").save_pretrained(tmp_path)
    with expect_log(r"has no classifier, classifier_head: newly initialized"):
        ours = from_huggingface(tmp_path, task="sequence-classification")
    assert ours.model.pooler is None
    assert ours.classifier_head.dense.weight.std() > 0


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_unsupported_config_values_raise_an_error_that_names_them(name: Any, options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(FAMILY_CASES[name].make_config(**options))


@pytest.mark.parametrize("name", ROBERTAS)
def test_positions_without_a_padding_id_raise(name: Any) -> None:
    with pytest.raises(ConfigError, match="pad_token_id is None"):
        read_config(FAMILY_CASES[name].make_config(pad_token_id=None))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("roberta", {"position_offset": 0}, "position_offset is 0; a roberta checkpoint has 1"),
        ("roberta", {"classifier_head_dropout": 0.3}, "classifier_head_dropout is 0.3; a roberta checkpoint has 0.1"),
        ("roberta", {"mlm_head_act": "relu"}, "mlm_head_act is 'relu'; a roberta checkpoint has 'gelu'"),
        ("roberta", {"norm_pos": "pre", "final_norm": True}, "norm_pos is 'pre'; a roberta checkpoint has 'post'"),
        ("roberta-prelayernorm", {"final_norm": False}, "final_norm is False; a roberta-prelayernorm checkpoint has"),
        ("megatron-bert", {"embedding_norm": True}, "embedding_norm is True; a megatron-bert checkpoint has False"),
    ],
)
def test_values_that_a_family_cannot_represent_raise_an_error_that_names_them(
    name: Any, options: Any, message: Any
) -> None:
    config = read_config(FAMILY_CASES[name].make_config())
    with torch.device("meta"):
        model = BertBlocksModel(BertBlocksConfig(**{**config.to_dict(), **options}))
    with pytest.raises(ConfigError, match=message):
        to_huggingface(model, name)
