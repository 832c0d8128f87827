"""Operations that are faster on CPUs: results, gradients, and when they fall back to torch."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksForMaskedLM, BertBlocksForPreTraining, BertBlocksModel
from bertblocks.nn import mlp as mlp_module
from bertblocks.nn.activation import get_activation
from bertblocks.nn.linear import Linear, is_untouched
from bertblocks.nn.mlp import GLU, MLP
from bertblocks.nn.ops import attention, cross_entropy, rotary
from bertblocks.nn.ops import linear as linear_module
from bertblocks.nn.ops.attention import AttentionChunk, Chunk, SequenceBatch, attend_chunks
from bertblocks.nn.ops.dropout import dropout
from bertblocks.nn.ops.linear import POST_OPERATIONS, OneDnnLinear, linear, runs_on_onednn
from bertblocks.nn.rope import RotaryPosition
from tests.helpers import pad_ids, ragged_ids, tiny_config

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses oneDNN on every CPU that has it, whatever the vendor."""
    monkeypatch.setattr(linear_module, "is_onednn_faster", lambda: True)


# ---------------------------------------------------------------------- linear


@needs_onednn
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (65,), (2, 3)], ids=str)
def test_linear_equals_torch_with_gradients_of_two_orders(onednn: Any, shape: Any, with_bias: Any) -> None:
    inputs = [torch.randn(*shape, 12), torch.randn(20, 12), torch.randn(20) if with_bias else None]
    inputs = [x if x is None else x.requires_grad_() for x in inputs]
    assert runs_on_onednn(*inputs[:2])
    given = [x for x in inputs if x is not None]
    results = []
    for function in (linear, F.linear):
        out = function(*inputs)
        # a cube, so that the second gradient is not constant
        first = torch.autograd.grad(out.pow(3).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), given)
        results.append([out, *first, *second])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)


@needs_onednn
def test_linear_computes_only_the_gradients_that_are_needed(onednn: Any) -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.nn.Parameter(torch.randn(5, 4), requires_grad=False)
    out = linear(x, weight, None)
    assert isinstance(out.grad_fn, OneDnnLinear._backward_cls)
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 4))
    assert weight.grad is None


@pytest.mark.parametrize("case", ["double", "vector", "autocast", "vmap"])
def test_linear_falls_back_to_torch_for_unsupported_input(onednn: Any, case: Any) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    if case == "double":
        assert not runs_on_onednn(x.double(), weight.double())
    elif case == "vector":
        torch.testing.assert_close(linear(x[0], weight, None), weight @ x[0])
    elif case == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x, weight, None).dtype == torch.bfloat16
    else:
        each = torch.vmap(lambda row: linear(row[None], weight, None)[0])(x)
        torch.testing.assert_close(each, x @ weight.T)


@needs_onednn
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (33,), (450,), (3, 100)], ids=str)
@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "weights"])
def test_bf16_products_are_filled_up_to_few_counts_of_rows(
    cast: bool, shape: Any, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "has_bf16_units", lambda device: True)
    counts = []
    product = F.linear

    def count(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(x))
        return product(x, *rest)

    monkeypatch.setattr(linear_module.F, "linear", count)
    dtype = torch.float32 if cast else torch.bfloat16
    x, weight = torch.randn(*shape, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if with_bias else None
    above, inputs = torch.randn(*shape, 40), [tensor for tensor in (x, weight, bias) if tensor is not None]

    def run(function: Any) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            out = function(leaves[0], leaves[1], leaves[2] if with_bias else None)
        # gradients of gradients too
        first = torch.autograd.grad(out, leaves, above.to(out.dtype), create_graph=True)
        second = torch.autograd.grad(sum(each.float().square().sum() for each in first), leaves[1])
        return [out, *first, *second]

    found, expected = run(linear), run(product)
    rows = math.prod(shape)
    assert counts == [linear_module.filled(rows)]
    assert rows <= counts[0] <= rows * 17 / 16
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        largest = other.detach().abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one, other, atol=0.02 * largest, rtol=0)


def test_there_are_at_most_16_counts_of_rows_between_powers_of_two() -> None:
    counts = [linear_module.filled(rows) for rows in range(1, 5000)]
    assert all(rows <= count <= rows * 17 / 16 for rows, count in enumerate(counts, 1))
    for power in range(12):
        assert len({count for count in counts if 2**power <= count < 2 ** (power + 1)}) <= 16


def test_other_products_are_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "has_bf16_units", lambda device: True)
    rows = torch.randn(33, 8)
    assert linear_module.is_filled(rows.bfloat16())
    assert not linear_module.is_filled(rows)
    assert not linear_module.is_filled(rows.half())
    assert not linear_module.is_filled(rows[0].bfloat16())
    assert not linear_module.is_filled(rows.bfloat16().to("meta"))
    with torch.autocast("cpu", dtype=torch.float16):
        assert not linear_module.is_filled(rows)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("mlp_class", [MLP, GLU])
@pytest.mark.parametrize("activation", [*POST_OPERATIONS, "tanh"])
def test_fused_feed_forward_equals_the_unfused_one(
    onednn: Any, activation: Any, mlp_class: Any, with_bias: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp_module, "FUSED_GLU_TOKENS", 9)
    options = {"in_bias": with_bias, "out_bias": True, "dropout": 0.0, "out_dropout": 0.0}
    mlp = mlp_class(12, 10, activation, **options).eval()
    x = torch.randn(9, 12)
    up, act = F.linear(x, mlp.up.weight, mlp.up.bias), get_activation(activation)
    units = act(up) if mlp_class is MLP else act(up[:, :10]) * up[:, 10:]
    expected = F.linear(units, mlp.down.weight, mlp.down.bias)
    assert not mlp.fuses(x), "autograd needs the units before the activation"
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        assert mlp.fuses(x) == (activation in POST_OPERATIONS)
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)
        seen = []
        mlp.up.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen, [up.detach()], msg="a hook sees what it always saw")


def test_parametrized_or_foreign_linear_layers_are_not_fused() -> None:
    layer = Linear(4, 4, True, role="up")
    assert is_untouched(layer)
    assert not is_untouched(torch.nn.Linear(4, 4))
    torch.nn.utils.parametrizations.weight_norm(layer)
    assert not is_untouched(layer)


# ---------------------------------------------------------------------- rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("rows", [2, 1024])
def test_rotary_op_rotates_each_pair_and_its_gradient_rotates_back(
    rows: Any, partial: Any, interleaved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "TOKENS_AT_ONCE", rows)
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    pairs = int(8 * partial) // 2
    angles = torch.randn(5, 1, pairs, dtype=torch.float64)

    firsts = [2 * pair if interleaved else pair for pair in range(pairs)]
    seconds = [first + (1 if interleaved else pairs) for first in firsts]
    cos = torch.empty(5, 1, 2 * pairs, dtype=torch.float64)
    cos[..., firsts] = cos[..., seconds] = angles.cos()

    def rotate(x: Any) -> Any:
        return rotary.RotaryFunction.apply(x, cos, angles.sin(), interleaved)

    as_complex = torch.complex(x[..., firsts], x[..., seconds]) * torch.exp(1j * angles)
    expected = x.detach().clone()
    expected[..., firsts], expected[..., seconds] = as_complex.real.detach(), as_complex.imag.detach()
    torch.testing.assert_close(rotate(x), expected)
    assert torch.autograd.gradcheck(rotate, (x,))
    assert torch.autograd.gradgradcheck(rotate, (x,))


def test_rope_in_half_precision_is_computed_in_fp32() -> None:
    model = BertBlocksModel(tiny_config(block_pos_enc_kind="rope", embd_pos_enc_kind="none"))
    position = model.encoder.layers[0].attention.position
    assert isinstance(position, RotaryPosition)
    layout = model.layout(torch.zeros(1, 30, dtype=torch.long))
    q = torch.randn(30, 2, 8).bfloat16()
    torch.testing.assert_close(position.rotate(q, q, layout)[0], position.rotate(q.float(), q, layout)[0].bfloat16())


# ---------------------------------------------------------------------- attention in chunks


def chunks_of_six_tokens(kind: str) -> list[Chunk]:
    mask = torch.randn(1, 3, 3, dtype=torch.float64)
    if kind == "shared keys":
        return [AttentionChunk(slice(0, 3), slice(0, 5)), AttentionChunk(slice(3, 6), slice(2, 5), mask)]
    if kind == "rectangle":
        return [SequenceBatch(slice(0, 6), rows=2, length=3, mask=mask)]
    # a sequence of 2 and one of 3 tokens, then one of 1
    apart = torch.block_diag(torch.ones(2, 2), mask[0].exp()).double().log()[None]
    return [AttentionChunk(slice(0, 5), slice(0, 5), apart), AttentionChunk(slice(5, 6), slice(5, 6))]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["shared keys", "rectangle", "joined"])
def test_attention_in_chunks_has_correct_gradients(kind: Any, dropout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that share keys and chunks of joined rows, with and without dropout; a second gradient raises."""
    q, k, v = (torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    chunks = chunks_of_six_tokens(kind)

    def attend(q: Any, k: Any, v: Any) -> Any:
        torch.manual_seed(0)  # the same weights are dropped at every call
        return attend_chunks(q, k, v, chunks, 0.7, dropout)

    for drawn_at_once in (1, 2**20):
        monkeypatch.setattr(attention, "DRAWN_AT_ONCE", drawn_at_once)
        assert torch.autograd.gradcheck(attend, (q, k, v))
    (first,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("kind", ["shared keys", "rectangle", "joined"])
def test_attention_dropout_in_chunks_has_its_rate_and_keeps_the_mean(kind: Any) -> None:
    q, k, v = (torch.randn(6, 2, 3, dtype=torch.float64) for _ in range(3))
    chunks = chunks_of_six_tokens(kind)
    expected = attend_chunks(q, k, v, chunks, 0.7)
    draws = torch.stack([attend_chunks(q, k, v, chunks, 0.7, 0.3) for _ in range(4000)])
    deviation = draws.std(dim=0) / math.sqrt(len(draws))
    assert ((draws.mean(dim=0) - expected).abs() <= 5 * deviation).all()
    if kind == "joined":  # the last token sees itself alone: it is dropped or made 1 / 0.7 as large
        is_kept = (draws[:, 5] != 0).all(dim=-1)
        assert abs(is_kept.double().mean() - 0.7) < 0.03
        torch.testing.assert_close(draws[:, 5][is_kept], (v[5] / 0.7).expand(4000, 2, 3)[is_kept], rtol=1e-4, atol=0)


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
def test_dropout_has_its_rate_and_keeps_the_mean(rate: Any, dtype: Any) -> None:
    x = torch.ones(1001, 301, dtype=dtype, requires_grad=True)
    dropped = dropout(x, rate)
    is_kept = dropped != 0
    deviation = math.sqrt(rate * (1 - rate) / x.numel())
    assert abs(is_kept.double().mean().item() - (1 - rate)) < 5 * deviation + 2**-16
    expected = torch.full_like(x, 1 / (1 - rate))[is_kept]
    # the rate is a multiple of 2^-16, which near 1 changes the share that is kept by up to 1 %
    torch.testing.assert_close(dropped[is_kept], expected, rtol=1e-2, atol=0)
    # neighbours share a random word, but are dropped independently
    pairs = is_kept.flatten()[:-1].view(-1, 2).double()
    both = (1 - rate) ** 2
    assert abs(pairs.prod(dim=1).mean().item() - both) < 5 * math.sqrt(both / len(pairs)) + 2**-16
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, dropped)


def test_dropout_depends_on_the_seed_and_handles_rates_0_and_1_like_torch() -> None:
    x = torch.randn(37)
    draws = [(torch.manual_seed(seed), dropout(x, 0.5))[1] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(dropout(x, 1.0), torch.zeros(37))
    assert torch.equal(dropout(x, 0.0), x)


# ---------------------------------------------------------------------- masked-LM loss


@pytest.mark.parametrize("max_logits", [1, 50, 10**6], ids=["row by row", "two rows at a time", "at once"])
@pytest.mark.parametrize(("with_bias", "with_weights"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_chunked_loss_equals_cross_entropy(
    z_loss: Any, with_bias: Any, with_weights: Any, max_logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", max_logits)
    hidden, weight = torch.randn(7, 4, dtype=torch.float64), torch.randn(25, 4, dtype=torch.float64)
    inputs = [hidden, weight, torch.randn(25, dtype=torch.float64)][: 2 + with_bias]
    inputs = [x.requires_grad_() for x in inputs]
    bias = inputs[2] if with_bias else None
    labels, row_weights = torch.randint(0, 25, (7,)), torch.rand(7) if with_weights else None
    logits = F.linear(hidden, weight, bias)
    losses = F.cross_entropy(logits, labels, reduction="none") + z_loss * logits.exp().sum(dim=-1).log() ** 2
    expected = (losses if row_weights is None else losses * row_weights).sum()
    loss = cross_entropy.linear_cross_entropy(hidden, weight, bias, labels, row_weights, z_loss=z_loss)
    torch.testing.assert_close(loss, expected)
    # twice, and at another scale: a backward pass must not use up the gradients of the forward pass
    for scale in (1.0, 0.3):
        gradients = torch.autograd.grad(loss * scale, inputs, retain_graph=True)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected * scale, inputs, retain_graph=True))
    without_gradient = cross_entropy.linear_cross_entropy(
        hidden.detach(), weight, bias, labels, row_weights, z_loss=z_loss
    )
    assert torch.equal(without_gradient, loss)


def test_chunked_z_loss_passes_gradcheck() -> None:
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (6, 4), (6,))]
    labels = torch.tensor([1, 5, 0])
    loss = partial(cross_entropy.linear_cross_entropy, labels=labels, z_loss=0.3)
    assert torch.autograd.gradcheck(lambda hidden, weight, bias: loss(hidden, weight, bias), inputs)


@pytest.mark.parametrize("model_class", [BertBlocksForMaskedLM, BertBlocksForPreTraining])
@pytest.mark.parametrize("want_logits", [True, False], ids=["from logits", "chunked"])
def test_models_add_the_z_loss_of_labelled_tokens_only(model_class: Any, want_logits: Any) -> None:
    model = model_class(tiny_config()).eval()
    ids, labels = torch.tensor([[5, 3, 7, 8]]), torch.tensor([[-100, 9, -100, 4]])
    logits = model(ids)["logits" if model_class is BertBlocksForMaskedLM else "prediction_logits"][0, [1, 3]]
    plain, with_term = (model(ids, labels=labels, return_logits=want_logits, z_loss=z).loss for z in (0.0, 0.01))
    torch.testing.assert_close(with_term - plain, 0.01 * logits.logsumexp(dim=-1).square().mean(), rtol=1e-3, atol=0)


def test_chunked_loss_under_autocast_multiplies_in_bf16_and_accumulates_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 2,000 chunks, gradients of the weights would be wrong by a tenth or more if they were added up in bf16."""
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 1)
    # numbers that bf16 holds exactly
    hidden, weight, bias = (torch.randn(*shape).bfloat16().float() for shape in ((2000, 8), (10, 8), (10,)))
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    labels = torch.randint(0, 10, (2000,))
    expected = F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy.linear_cross_entropy(hidden, weight, bias, labels, dtype=torch.bfloat16)
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    assert loss != expected
    for ours, exact in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() < 0.01 * exact.norm()


def test_chunked_loss_of_no_tokens_and_without_gradients() -> None:
    weight = torch.randn(9, 4, requires_grad=True)
    empty = cross_entropy.linear_cross_entropy(torch.zeros(0, 4), weight, None, torch.zeros(0, dtype=torch.long))
    empty.backward()
    assert empty == 0
    assert not weight.grad.any()
    with torch.no_grad():
        hidden, labels = torch.randn(3, 4), torch.tensor([1, 2, 3])
        loss = cross_entropy.linear_cross_entropy(hidden, weight, None, labels)
        torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))


class LargestLogits(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest number of rows in any result with `columns` columns."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # a transposed weight matrix, which is not contiguous, does not hold logits
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == self.columns and out.is_contiguous():
            self.rows = max(self.rows, out.shape[0])
        return out


@pytest.mark.parametrize("options", [{}, {"ngpt": True, "ngpt_logit_scale": True, "decoder_bias": True}])
def test_training_never_stores_more_logits_than_the_limit(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients equal those of all logits at once."""
    monkeypatch.setattr(cross_entropy, "MAX_LOGITS", 4 * 61)
    model = BertBlocksForMaskedLM(tiny_config(vocab_size=61, **options)).double().train()
    if model.logit_scale is not None:
        torch.nn.init.normal_(model.logit_scale)
    ids, mask = pad_ids(ragged_ids([9, 5, 12]))
    labels = ids.masked_fill(mask == 0, -100)
    with LargestLogits(61) as largest:
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert largest.rows == 4
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = model(ids, attention_mask=mask, labels=labels, return_logits=True)
    out.loss.backward()
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], atol=1e-10, rtol=1e-7)
