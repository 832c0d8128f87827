"""What is special about ConvBERT: heads, padding and grouped layers."""

from __future__ import annotations

import pytest
import torch
from transformers import ConvBertConfig, ConvBertModel

from bertblocks import BertBlocksConfig, ConfigError, from_huggingface, to_huggingface
from bertblocks.checkpoints.families import read_config
from tests.checkpoints.family_cases import SIZES


def test_the_published_base_model_has_six_heads_of_attention() -> None:
    config = read_config(ConvBertConfig(num_attention_heads=12, head_ratio=2))
    assert (config.num_attention_heads, config.head_dim, config.span_conv_size) == (6, 64, 9)
    theirs = to_huggingface(from_huggingface(ConvBertModel(ConvBertConfig(**SIZES)))).config
    assert (theirs.num_attention_heads, theirs.head_ratio) == (4, 2)


def test_padding_changes_nothing_in_bertblocks() -> None:
    """transformers gives a text other vectors in a longer batch; those of the text alone are ours in any batch."""
    theirs = ConvBertModel(ConvBertConfig(**SIZES, pad_token_id=0)).eval()
    ours = from_huggingface(theirs)
    ids = torch.tensor([[5, 6, 7, 8, 0, 0]])
    with torch.no_grad():
        alone = theirs(ids[:, :4]).last_hidden_state
        padded = theirs(ids, attention_mask=ids.ne(0)).last_hidden_state[:, :4]
        found = ours(ids, attention_mask=ids.ne(0)).last_hidden_state[:, :4]
    assert (padded - alone).abs().max() > 1e-3
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_grouped_feed_forward_layers_open_both_ways(groups: int) -> None:
    """As ConvBERT medium-small. Biases are drawn at random, because a model is initialized without any."""
    theirs = ConvBertModel(ConvBertConfig(**SIZES, num_groups=groups, pad_token_id=0)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = from_huggingface(theirs)
    assert (ours.config.mlp_type, ours.config.mlp_groups) == ("grouped", groups)
    again = to_huggingface(ours)
    assert again.config.num_groups == groups
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids)[0], atol=1e-5, rtol=1e-5)


def test_a_plain_model_has_one_group() -> None:
    config = read_config(ConvBertConfig(**SIZES))
    assert config.mlp_type == "mlp"


def test_a_model_without_its_convolution_is_not_written_as_convbert() -> None:
    model = from_huggingface(ConvBertModel(ConvBertConfig(**SIZES)))
    options = {**model.config.to_dict(), "span_convolution": False, "span_conv_size": None, "head_dim": 8}
    config = BertBlocksConfig(**options)
    with pytest.raises(ConfigError, match="span_convolution is False; a convbert checkpoint has True"):
        to_huggingface(type(model)(config), family="convbert")
