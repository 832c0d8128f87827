"""A learned logit per head in the softmax of attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bertblocks import BertBlocksModel
from bertblocks.analysis import analyze
from bertblocks.nn.backends import BACKENDS, AttentionContext, AttentionPattern
from bertblocks.nn.backends.eager import RandomBackend
from bertblocks.nn.layout import SequenceLayout
from tests.helpers import tiny_config


def naive(q: Any, k: Any, v: Any, sinks: Any, scale: float) -> torch.Tensor:
    """One query and head at a time, with plain exponentials."""
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            weights = [math.exp(float(q[i, h] @ k[j, h]) * scale) for j in range(len(k))]
            total = math.exp(float(sinks[h])) + sum(weights)
            out[i, h] = sum(weight / total * value for weight, value in zip(weights, v[:, h], strict=True))
    return out


@pytest.mark.parametrize("backend", ["eager", "sdpa", "cpu"])
def test_the_logit_joins_the_softmax(backend: str) -> None:
    q, k, v = torch.randn(3, 7, 2, 4, dtype=torch.float64)
    sinks = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 5, 7]), (7,))
    context = AttentionContext(layout, AttentionPattern(has_sinks=True), 0.5, sinks=sinks)
    attended = BACKENDS[backend]().attend(q, k, v, context)
    expected = torch.cat([naive(q[part], k[part], v[part], sinks, 0.5) for part in (slice(0, 5), slice(5, 7))])
    torch.testing.assert_close(attended, expected)


def test_attention_to_random_tokens_has_sinks_too() -> None:
    q, k, v = torch.randn(3, 4, 2, 4, dtype=torch.float64)
    sinks = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    layout = SequenceLayout.from_shape(1, 4, torch.device("cpu"))
    context = AttentionContext(layout, AttentionPattern(has_sinks=True), 0.5, sinks=sinks)
    attended = RandomBackend([0], hidden_share=0.0).attend(q, k, v, context)
    for i in range(4):  # nothing is hidden except the token itself
        others = [j for j in range(4) if j != i]
        expected = naive(q[i : i + 1], k[others], v[others], sinks, 0.5)
        torch.testing.assert_close(attended[i : i + 1], expected)


@pytest.mark.parametrize("length", [70, 600])
def test_long_sequences_equal_the_reference(length: int) -> None:
    """Covers equal rows beyond the length that is computed together, and torch's fused kernel without gradients."""
    q, k, v = torch.randn(3, 2 * length, 2, 4, dtype=torch.float64)
    sinks = torch.tensor([-1.0, 5.0], dtype=torch.float64)
    for layout in (
        SequenceLayout.from_shape(2, length, torch.device("cpu")),
        SequenceLayout.from_cu_seqlens(torch.tensor([0, length + 3, 2 * length]), (2 * length,)),
    ):
        context = AttentionContext(layout, AttentionPattern(has_sinks=True), 0.5, sinks=sinks)
        with torch.no_grad():
            expected, *others = (BACKENDS[name]().attend(q, k, v, context) for name in ("eager", "sdpa", "cpu"))
        for other in others:
            torch.testing.assert_close(other, expected)


def test_weights_leave_out_what_the_sink_takes() -> None:
    model = BertBlocksModel(tiny_config(attention_sinks=True, num_hidden_layers=1)).eval()
    torch.nn.init.constant_(model.encoder.layers[0].attention.sinks.logits, 30.0)
    weights = model(torch.tensor([[5, 6, 7]]), output_attentions=True).attentions[0]
    assert weights.sum(-1).max() < 1e-6


def test_sinks_start_small_and_count_as_parameters() -> None:
    model: Any = BertBlocksModel(tiny_config(attention_sinks=True))
    logits = torch.cat([layer.attention.sinks.logits for layer in model.encoder.layers])
    assert logits.unique().numel() == 12
    assert logits.abs().max() <= 0.6  # two standard deviations
    plain, sinks = (analyze(tiny_config(attention_sinks=on), "base", [10]) for on in (False, True))
    assert sinks.parameters["attention"] - plain.parameters["attention"] == 3 * 4
    assert sinks.costs[0].flops == plain.costs[0].flops  # no matrix products
