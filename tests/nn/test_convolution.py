"""The dynamic convolution of ConvBERT, which tests/checkpoints/test_families.py also compares with transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError, SequenceLayout
from bertblocks.analysis import analyze
from bertblocks.nn.convolution import SpanConvolution
from tests.helpers import tiny_config


def naive(block: SpanConvolution, x: Any, queries: Any, size: int) -> torch.Tensor:
    """One token, head and neighbour at a time, for one sequence."""
    heads, reach = block.num_heads, size // 2
    values, out = block.value(x), torch.zeros_like(queries)
    head_dim = queries.shape[1] // heads
    for i in range(len(x)):
        near = [j for j in range(i - reach, i + reach + 1) if 0 <= j < len(x)]
        span = sum(block.depthwise.weight[:, 0, j - i + reach] * x[j] for j in near)
        logits = block.kernel(block.pointwise(span) * queries[i])
        for h in range(heads):
            units = slice(h * head_dim, (h + 1) * head_dim)
            scores = [math.exp(score) for score in logits[h * size : (h + 1) * size].tolist()]
            # places outside of the sequence have a weight, but their value is 0
            out[i, units] = sum(scores[j - i + reach] / sum(scores) * values[j, units] for j in near)
    return out


@pytest.mark.parametrize("size", [1, 3, 9])
def test_each_head_averages_the_values_around_a_token(size: int) -> None:
    block = SpanConvolution(hidden_size=6, num_heads=2, head_dim=4, kernel_size=size).double().requires_grad_(False)
    x, queries = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 7, 8, 8, 12]), (12,))
    parts = [slice(0, 7), slice(7, 8), slice(8, 12)]
    expected = torch.cat([naive(block, x[part], queries[part], size) for part in parts])
    torch.testing.assert_close(block(x, queries, layout), expected)


def test_heads_are_half_as_wide_so_that_both_fill_the_layer() -> None:
    config = BertBlocksConfig(span_convolution=True, num_attention_heads=6)
    assert (config.head_dim, config.attention_scale) == (64, 64**-0.5)
    assert config.span_conv_size == 9
    layer: Any = BertBlocksModel(tiny_config(span_convolution=True)).encoder.layers[0]
    assert layer.attention.qkv.weight.shape == (3 * 16, 32)
    assert layer.attention.out.weight.shape == (32, 32)


def test_the_convolution_counts_in_the_cost() -> None:
    options = {"num_attention_heads": 2, "head_dim": 8}
    plain, spans = (
        analyze(tiny_config(span_convolution=on, **options, **({"span_conv_size": 5} if on else {})), "base", [10])
        for on in (False, True)
    )
    products = 32 * 16 + 16 * 10 + 32 * 16 + 32 * 5  # pointwise, kernel, value, depthwise
    added = 3 * (products + 16 + 10 + 16 + 16 * 32)  # biases, and the second half of the output projection
    assert spans.parameters["attention"] - plain.parameters["attention"] == added
    part = "attention projections"
    flops = 3 * 10 * 2 * (products + 16 * 5 + 16 * 32)
    assert spans.costs[0].flops[part] - plain.costs[0].flops[part] == flops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span_conv_size": 4}, "span_conv_size is 4; it must be odd"),
        (
            {"causal": True},
            "causal is True; span_convolution requires False, because the convolution sees later tokens",
        ),
        ({"ngpt": True}, "ngpt is True; span_convolution requires False"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3; it must divide hidden_size = 32, twice with"),
    ],
)
def test_settings_that_contradict_each_other_raise(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(span_convolution=True, **options)


def test_the_size_belongs_to_the_convolution() -> None:
    with pytest.raises(ConfigError, match="span_conv_size is 3; it belongs to span_convolution true"):
        tiny_config(span_conv_size=3)
