"""Tests of MPNet: T5's buckets, one table for all layers, padding id 1, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MPNetConfig, MPNetForMaskedLM, MPNetModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from bertblocks import (
    BertBlocksForMaskedLM,
    BertBlocksModel,
    ConfigError,
    from_huggingface,
    to_huggingface,
)
from bertblocks.analysis.parameters import count_parameters
from bertblocks.checkpoints.families import read_config
from bertblocks.nn.position import T5Position, relative_buckets
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import pad_ids, ragged_ids, tiny_config

DISTANCES = torch.arange(-300, 301)
T5 = {"block_pos_enc_kind": "t5", "embd_pos_enc_kind": "none"}


def make_mpnet(model_class: Any = MPNetModel, **options: Any) -> Any:
    torch.manual_seed(0)
    return model_class(FAMILY_CASES["mpnet"].make_config(**options)).eval()


# ---------------------------------------------------------------------- buckets


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (64, 128), (8, 20), (4, 5), (10, 300)])
def test_relative_buckets_equal_transformers(buckets: Any, furthest: Any) -> None:
    actual = relative_buckets(DISTANCES, buckets, furthest)
    theirs = T5Attention._relative_position_bucket(DISTANCES, True, buckets, furthest)
    assert torch.equal(actual, theirs)
    if furthest == 128:
        assert torch.equal(actual, MPNetEncoder.relative_position_bucket(DISTANCES, buckets))


def test_the_bias_of_any_distance_is_the_table_row_of_its_bucket() -> None:
    position = T5Position(num_heads=3, num_buckets=32, max_distance=50)
    torch.nn.init.normal_(position.table)
    distance = DISTANCES.view(1, -1)
    expected = position.table[relative_buckets(distance, 32, 50)].permute(2, 0, 1)
    assert torch.equal(position.bias(distance), expected)


# ---------------------------------------------------------------------- one table


@pytest.mark.parametrize("shared", [True, False])
def test_the_bias_table_exists_once_or_in_every_layer(shared: Any, tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config(**T5, relative_attention_shared=shared))
    tables = [name for name in model.state_dict() if name.endswith("position.table")]
    layers = [f"model.encoder.layers.{index}.attention.position.table" for index in range(3)]
    assert tables == (["model.encoder.position.table"] if shared else layers)
    for name in tables:
        assert model.state_dict()[name].std() > 0.1, "tables start at random"
    assert len({id(layer.attention.position) for layer in model.model.encoder.layers}) == (1 if shared else 3)
    model.save_pretrained(tmp_path)
    again = BertBlocksForMaskedLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    ids, mask = pad_ids(ragged_ids([30, 4]))
    with torch.no_grad():
        expected, actual = (either.eval()(ids, attention_mask=mask).logits for either in (model, again))
    assert torch.equal(actual, expected)
    assert count_parameters(model)["attention"] == sum(
        tensor.numel() for name, tensor in model.named_parameters() if "attention." in name or name in tables
    )


def test_layers_share_the_bias_table_after_a_change_of_precision() -> None:
    model = BertBlocksModel(tiny_config(**T5)).double()
    assert all(layer.attention.position.table.dtype == torch.float64 for layer in model.encoder.layers)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"relative_attention_shared": False}, {"local_attention": True}])
def test_gradient_checkpointing_does_not_change_gradients(options: Any, reentrant: Any) -> None:
    model = BertBlocksModel(tiny_config(**T5, pooler=False, **options)).double().train()
    ids, mask = pad_ids(ragged_ids([40, 9]))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        embeddings = model.embedding.token(ids).detach().requires_grad_()
        model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if name.endswith("table")})
    assert gradients[0]
    for name, plain in gradients[0].items():
        assert plain.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], plain, atol=1e-9, rtol=1e-9)


def test_a_shared_bias_is_computed_again_in_the_next_forward_pass() -> None:
    model = BertBlocksModel(tiny_config(**T5, pooler=False)).eval()
    ids = ragged_ids([20])[0][None]
    with torch.no_grad():
        before = model(ids).last_hidden_state
        model.encoder.position.table.mul_(2)
        after = model(ids).last_hidden_state
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(model(ids).last_hidden_state, after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"token_dropout": True, "mask_token_id": 3}])
def test_mpnet_compiles_without_a_graph_break(options: Any) -> None:
    torch._dynamo.reset()
    model = BertBlocksModel(tiny_config(**T5, **options)).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, mask = pad_ids(ragged_ids([40, 23, 1]))
    with torch.no_grad():
        expected, actual = (either(ids, attention_mask=mask).last_hidden_state for either in (model, compiled))
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], atol=1e-5, rtol=1e-5)


def test_a_single_layer_can_have_relative_buckets() -> None:
    config = tiny_config(embd_pos_enc_kind="none", layer_overrides={1: {"block_pos_enc_kind": "t5"}})
    model = BertBlocksModel(config)
    assert [layer.attention.pattern.has_bias for layer in model.encoder.layers] == [False, True, False]
    assert model.encoder.position is model.encoder.layers[1].attention.position


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relative_attention_num_buckets": 7}, "relative_attention_num_buckets is 7; it must be even and at least 4"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets is 2; it must be even and at least 4"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance is 8; it must be more than 8"),
        (
            {"layer_overrides": {1: {"num_attention_heads": 2}}},
            "relative_attention_shared is True; it must be false if a 't5' layer does not have num_attention_heads = 4",
        ),
    ],
)
def test_impossible_bucket_settings_raise(options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**T5, **options)


def test_position_ids_that_no_layer_uses_raise() -> None:
    model = BertBlocksModel(tiny_config(**T5))
    with pytest.raises(ValueError, match="no position encoding that uses them"):
        model(torch.tensor([[5, 6]]), position_ids=torch.tensor([[3, 4]]))


# ---------------------------------------------------------------------- checkpoints


def test_padding_with_the_published_id_on_either_side() -> None:
    theirs = make_mpnet()
    ours = from_huggingface(theirs)
    rows = [ids.clamp(min=2) for ids in ragged_ids([300, 65, 1], vocab_size=90)]
    for side in ("right", "left"):
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1, padding_side=side)
        mask = ids != 1
        with torch.no_grad():
            expected, actual = (either(ids, attention_mask=mask.long()).last_hidden_state for either in (theirs, ours))
        torch.testing.assert_close(actual[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_an_untied_decoder_keeps_its_matrix_and_its_bias() -> None:
    theirs = make_mpnet(MPNetForMaskedLM, tie_word_embeddings=False)
    with torch.no_grad():
        theirs.lm_head.decoder.bias.normal_()
        # an untied decoder leaves this one unused
        theirs.lm_head.bias.copy_(theirs.lm_head.decoder.bias)
    ours = from_huggingface(theirs)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    for name, tensor in to_huggingface(ours).state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_a_published_mpnet_config_is_read(tmp_path: Path) -> None:
    """Uses the keys of all-mpnet-base-v2, in a folder without a pooler."""
    values = {"model_type": "mpnet", "vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-05}
    theirs = MPNetModel(MPNetConfig(**{**values, "hidden_size": 24, "num_hidden_layers": 1}), add_pooling_layer=False)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "gradient_checkpointing": False}))
    ours = from_huggingface(tmp_path)
    assert ours.pooler is None
    assert (ours.config.block_pos_enc_kind, ours.config.position_offset, ours.config.type_vocab_size) == ("t5", 2, 0)
    assert set(to_huggingface(ours).state_dict()) == set(theirs.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_token_id": 0}, "pad_token_id is 0 in this mpnet config; BertBlocks supports 1 only"),
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64 in this mpnet config"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key' in this mpnet config"),
    ],
)
def test_unsupported_config_values_raise_an_error_that_names_them(options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(FAMILY_CASES["mpnet"].make_config(**options))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("relative_attention_max_distance", 64),
        ("relative_attention_num_buckets", 16),
        ("relative_attention_shared", False),
        ("classifier_head_dropout", 0.3),
        ("position_offset", 0),
        ("pad_token_id", 0),
    ],
)
def test_values_that_mpnet_cannot_represent_raise_an_error(key: Any, value: Any) -> None:
    config = read_config(FAMILY_CASES["mpnet"].make_config())
    setattr(config, key, value)
    with pytest.raises(ConfigError, match=f"{key} is {value!r}; an? mpnet checkpoint has"):
        to_huggingface(BertBlocksModel(config), "mpnet")
