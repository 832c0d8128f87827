"""Tiled SPLADE pooling against a few lines that hold all logits."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.ops import sparse_pooling as op
from bertblocks.nn.ops.sparse_pooling import pool_logits, sparse_pooling

KINDS = list(itertools.product(("max", "sum"), ("relu", "log1p_relu")))
#: Around the edges of parts of 4 tokens, with empty sequences at the start, inside and at the end.
LENGTHS = [0, 1, 3, 3, 0, 4, 4, 5, 8, 9, 1, 1, 1, 1, 1, 0]


def pool_naively(logits: Tensor, lengths: list[int], pooling: str, activation: str) -> Tensor:
    activated = logits.relu().log1p()
    if activation == "log1p_relu":
        activated = activated.log1p()
    rows = [own.amax(0) if pooling == "max" else own.sum(0) for own in activated.split(lengths) if len(own)]
    filled = iter(rows)
    return torch.stack([next(filled) if length else logits.new_zeros(logits.shape[1]) for length in lengths])


@pytest.fixture(params=[(256, 2**20), (4, 44), (1, 1)], ids=["one tile", "many tiles", "single logits"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MAX_TOKENS", request.param[0])
    monkeypatch.setattr(op, "MAX_LOGITS", request.param[1])


@pytest.mark.parametrize(("pooling", "activation"), KINDS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.usefixtures("tiles")
def test_values_and_gradients_equal_those_of_all_logits(
    pooling: str, activation: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(sum(LENGTHS), 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(37, dtype=torch.float64, requires_grad=True) if has_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    expected = pool_naively(F.linear(hidden, weight, bias), LENGTHS, pooling, activation)
    above = torch.randn_like(expected)
    found = sparse_pooling(hidden, weight, bias, LENGTHS, pooling, activation)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found, inputs, above)
    wanted = torch.autograd.grad(expected, inputs, above)
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)
    if pooling == "max":  # as devices compute them
        monkeypatch.setattr(op, "_max_gradients", partial(op._tiled_max_gradients, lengths=LENGTHS, dtype=hidden.dtype))
        again = sparse_pooling(hidden, weight, bias, LENGTHS, pooling, activation)
        gradients = torch.autograd.grad(again, inputs, above)
        torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        again = sparse_pooling(hidden, weight, bias, LENGTHS, pooling, activation)
        whole = pool_logits(hidden, lambda x: F.linear(x, weight, bias), 37, LENGTHS, pooling, activation)
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_half_precision_is_summed_in_fp32(pooling: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    expected = pool_naively((hidden @ weight.T).float(), [300], pooling, "relu")
    found = sparse_pooling(hidden, weight, None, [300], pooling)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_under_autocast_have_the_dtype_of_their_tensor() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sparse_pooling(hidden, weight, None, [4, 2], dtype=torch.bfloat16)
    exact = sparse_pooling(hidden, weight, None, [4, 2])
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)
    found.sum().backward()
    assert [x.grad.dtype for x in (hidden, weight) if x.grad is not None] == [torch.float32] * 2


def test_no_sequences() -> None:
    assert sparse_pooling(torch.zeros(0, 4), torch.zeros(9, 4), None, []).shape == (0, 9)
    assert sparse_pooling(torch.zeros(0, 4), torch.ones(9, 4), None, [0, 0]).tolist() == [[0.0] * 9] * 2


def test_tiles_stay_small_however_many_tokens_there_are() -> None:
    lengths = [7, 2000, 31] * 5
    sizes = []
    for part, tile in op._tiles(lengths, 50_000):
        tokens = op._tokens(part)
        sizes.append((tokens.stop - tokens.start) * (tile.stop - tile.start))
    assert max(sizes) <= op.MAX_LOGITS
    assert sum(sizes) == sum(lengths) * 50_000
