"""The C kernels: attention against double precision, encoder layers against the modules they replace."""

import functools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksModel, SequenceLayout
from bertblocks.core.c_library import CompileError, compile_source
from bertblocks.nn import quantized
from bertblocks.nn.activation import KERNEL_ACTIVATIONS, activate, get_activation
from bertblocks.nn.ops import kernels
from bertblocks.nn.ops.compiled_attention import CompiledAttention
from bertblocks.nn.ops.dropout import dropout
from bertblocks.nn.ops.kernel_arguments import AttentionCall
from bertblocks.nn.ops.kernels import SOURCE, Kernel, KernelError, load_kernel, runnable_targets
from bertblocks.nn.ops.targets import AVX512_VNNI, OPTIONS
from bertblocks.nn.quantized import QuantizedBlock
from tests.helpers import pad_ids, ragged_ids, tiny_config

TARGETS = runnable_targets()
#: Around the sizes of a tile of queries (6, 12), a panel (16, 32), a block of keys (256) and a slab of queries (960).
LENGTHS = [[1], [5, 6, 7], [11, 12, 13], [15, 16, 17], [31, 0, 32, 33], [255, 2, 257], [959, 961]]


#: Computes AMX' tiles in plain C.
EMULATED_AMX = Path(__file__).with_name("emulated_amx.h")
if "AVX512-VNNI" in TARGETS and "AMX" not in TARGETS:
    TARGETS["emulated AMX"] = AVX512_VNNI


@functools.cache
def load(target: str) -> Kernel:
    if target != "emulated AMX":
        return load_kernel(target, TARGETS[target])
    with tempfile.TemporaryDirectory() as folder:
        options = [*OPTIONS, *AVX512_VNNI.values(), "-include", str(EMULATED_AMX)]
        path = Path(folder, "emulated.so")
        path.write_bytes(compile_source(SOURCE, options, Path(folder))[0])
        return Kernel(path, target)


@pytest.fixture(params=TARGETS or ["none"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Every kernel whose instructions this CPU has, which models use meanwhile."""
    if not TARGETS:
        pytest.skip("no kernel runs on this CPU")
    try:
        found = load(request.param)
    except (CompileError, OSError) as error:
        pytest.skip(str(error))
    monkeypatch.setattr(kernels, "find_kernel", lambda: found)
    return found


@pytest.mark.parametrize("outputs", [1, 15, 17, 33, 64])
@pytest.mark.parametrize("inputs", [1, 3, 63, 64, 130])
@pytest.mark.parametrize("rows", [1, 6, 7, 13, 31, 33, 200])
def test_products_are_exact(kernel: Kernel, rows: int, inputs: int, outputs: int) -> None:
    """Weights and activations of whole numbers, which bytes hold exactly, so that only sums in fp32 could round."""
    weight = torch.randint(-127, 128, (outputs, inputs))
    x = torch.randint(-100, 156, (rows, inputs + 2))
    x[:, 0], x[:, 1] = -100, 155  # the whole range of a byte in each row, so steps are 1
    weight = torch.cat((torch.zeros(outputs, 2, dtype=torch.long), weight), dim=1)
    packed = kernel.pack(weight.to(torch.int8), torch.full((outputs,), 0.5), torch.arange(outputs).float())
    expected = (x @ weight.t()).double() / 2 + torch.arange(outputs)
    torch.testing.assert_close(kernel.linear(x.float(), packed).double(), expected, atol=0, rtol=2e-7)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], half_window: int | None
) -> torch.Tensor:
    """The definition, sequence by sequence, in double precision."""
    groups, outputs = q.shape[1] // k.shape[1], []
    for query, key, value in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) * q.shape[2] ** -0.5
        if half_window is not None:
            index = torch.arange(len(query))
            scores = scores.masked_fill((index[:, None] - index).abs() > half_window, -math.inf)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), value))
    return torch.cat(outputs)


def make_qkv(tokens: int, heads: int, kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    """Views of one projection, as in a model."""
    parts = torch.randn(tokens, (heads + 2 * kv_heads) * size).split([heads * size, *[kv_heads * size] * 2], dim=1)
    return tuple(x.unflatten(1, (-1, size)) for x in parts)


@pytest.mark.parametrize("half_window", [None, 0, 5, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 2, 64), (4, 2, 32), (2, 1, 7), (1, 1, 256)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention(
    kernel: Kernel, lengths: list[int], heads: int, kv_heads: int, size: int, half_window: int | None
) -> None:
    q, k, v = make_qkv(sum(lengths), heads, kv_heads, size)
    exact = exact_attention(q, k, v, lengths, half_window)
    call = AttentionCall(lengths, heads, kv_heads, size, size**-0.5, half_window, in_bf16=False)
    torch.testing.assert_close(kernel.attention(q, k, v, call).double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 32, 7])
@pytest.mark.parametrize("half_window", [None, 20])
def test_attention_in_bf16(kernel: Kernel, half_window: int | None, size: int, dtype: torch.dtype) -> None:
    lengths = [1, 300, 33]
    q, k, v = (x.to(dtype) for x in make_qkv(sum(lengths), 4, 2, size))
    exact = exact_attention(q, k, v, lengths, half_window)
    call = AttentionCall(lengths, 4, 2, size, size**-0.5, half_window, in_bf16=True)
    out = kernel.attention(q, k, v, call)
    assert out.dtype == dtype
    assert (out.double() - exact).square().mean().sqrt() < 2**-8 * exact.square().mean().sqrt()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


def test_attention_rotates(kernel: Kernel) -> None:
    lengths, rotary = [5, 40], 24
    q, k, v = make_qkv(sum(lengths), 2, 1, 32)
    angles = torch.rand(sum(lengths), 1, rotary // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    call = AttentionCall(lengths, 2, 1, 32, 32**-0.5, None, False, (torch.cat((cos, cos), dim=-1), sin))
    exact = exact_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, lengths, None)
    torch.testing.assert_close(kernel.attention(q, k, v, call).double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("in_bf16", [False, True])
def test_attention_keeps_nan_in_its_sequence(kernel: Kernel, in_bf16: bool, bad: float) -> None:
    lengths = [20, 7, 300]
    for part in range(3):
        q, k, v = make_qkv(sum(lengths), 2, 2, 16)
        call = AttentionCall(lengths, 2, 2, 16, 0.25, None, in_bf16)
        before = kernel.attention(q, k, v, call)
        (q, k, v)[part][22] = bad
        after = kernel.attention(q, k, v, call)
        assert not after[22].isfinite().all()
        assert torch.equal(torch.cat((after[:20], after[27:])), torch.cat((before[:20], before[27:])))


def test_large_scores_do_not_overflow(kernel: Kernel) -> None:
    q, k, v = make_qkv(300, 1, 1, 16)
    call = AttentionCall([300], 1, 1, 16, 1.0, None, in_bf16=False)
    out = kernel.attention(q * 1e4, k * 1e4, v, call)
    best = torch.einsum("ihd,jhd->ij", q, k).argmax(dim=1)
    torch.testing.assert_close(out, v[best])


LOCAL = {"local_attention": True, "local_attention_window_size": 8, "global_attention_every_n_layers": 2}
MODELS: list[dict[str, Any]] = [
    {},
    {"norm_pos": "pre", "mlp_type": "glu", "hidden_act": "silu"},
    {"norm_pos": "pre_and_post", "norm_fn": "rms", "block_pos_enc_kind": "rope", "embd_pos_enc_kind": "none"},
    {"num_kv_heads": 1, "attention_qkv_bias": False, "norm_bias": False, "hidden_act": "relu"},
    {"norm_pos": "pre", "block_pos_enc_kind": "rope", **LOCAL},
]


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_layer_equals_its_modules(kernel: Kernel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the kernel differs from the modules only where a rounded byte does."""
    monkeypatch.setattr(quantized, "has_fast_bf16_products", lambda: False)
    model = BertBlocksModel(tiny_config(**options)).quantize("int8")
    layers = model.encoder.layers
    assert all(type(layer) is QuantizedBlock for layer in layers)
    ids, mask = pad_ids(ragged_ids([1, 30, 13, 60]))
    with torch.inference_mode():
        fused = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        monkeypatch.setattr(QuantizedBlock, "_is_fusible", lambda *_: False)
        modules = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert not torch.equal(fused, modules)
    assert F.cosine_similarity(fused, modules).min() > 0.9995


def test_layer_does_not_depend_on_other_texts_or_threads(kernel: Kernel) -> None:
    model = BertBlocksModel(tiny_config(num_hidden_layers=2)).quantize("int8")
    texts = ragged_ids([50, 3, 64, 20, 61])
    ids, mask = pad_ids(texts)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with torch.inference_mode():
                together = model(ids, attention_mask=mask).last_hidden_state
                for row, text in enumerate(texts):
                    assert torch.equal(together[row, : len(text)], model(text[None]).last_hidden_state[0])
    finally:
        torch.set_num_threads(threads)


def test_layer_of_selected_tokens(kernel: Kernel) -> None:
    encoder = BertBlocksModel(tiny_config(num_hidden_layers=1)).quantize("int8").encoder
    layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, 5, 45]), (45,))
    x, chosen = torch.randn(45, 32), torch.tensor([44, 0, 7])
    with torch.inference_mode():
        every = encoder(x, layout).last_hidden_state
        assert torch.equal(encoder(x, layout, token_indices=chosen).last_hidden_state, every[chosen])
        with pytest.raises(IndexError, match="outside the 45 tokens"):
            encoder(x, layout, token_indices=torch.tensor([45]))


def test_layer_follows_new_weights_and_hooks(kernel: Kernel) -> None:
    model = BertBlocksModel(tiny_config(num_hidden_layers=1)).quantize("int8")
    ids = torch.randint(1, 60, (1, 9))
    with torch.inference_mode():
        before = model(ids).last_hidden_state
        norm = model.encoder.layers[0].mlp_residual.post_norm
        norm.weight = torch.nn.Parameter(norm.weight * 2, requires_grad=False)
        norm.bias = torch.nn.Parameter(norm.bias * 2, requires_grad=False)
        torch.testing.assert_close(model(ids).last_hidden_state, before * 2)
        calls: list[Any] = []
        model.encoder.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
        model(ids)
    assert calls


def test_models_in_fp32_use_the_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BertBlocksModel(tiny_config(block_pos_enc_kind="rope")).eval()
    ids, mask = pad_ids(ragged_ids([7, 50]))
    with torch.inference_mode():
        result = model(ids, attention_mask=mask).last_hidden_state
        monkeypatch.setattr(kernels, "find_kernel", lambda: KernelError("not in this test"))
        expected = model(ids, attention_mask=mask).last_hidden_state
    assert not torch.equal(result, expected)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


#: Around the sizes of a tile of queries and of a panel, up to the longest sequence of training.
TRAINED_LENGTHS = [[1], [11, 12, 13, 0, 1], [31, 32, 33], [65, 256]]


def gradients(attend: Any, qkv: Sequence[torch.Tensor], above: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of q, k and v for that of the output."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    out = attend(*inputs)
    return [out, *torch.autograd.grad(out, inputs, above.to(out.dtype))]


@pytest.mark.parametrize("half_window", [None, 0, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 2, 64), (4, 2, 32), (3, 1, 7), (1, 1, 256)])
@pytest.mark.parametrize("lengths", TRAINED_LENGTHS, ids=str)
def test_gradients(
    kernel: Kernel, lengths: list[int], heads: int, kv_heads: int, size: int, half_window: int | None
) -> None:
    q, k, v = make_qkv(sum(lengths), heads, kv_heads, size)
    above = torch.randn(q.shape).transpose(0, 1).contiguous().transpose(0, 1)  # strides that the kernel does not read
    call = AttentionCall(lengths, heads, kv_heads, size, size**-0.5, half_window, in_bf16=False)
    found = gradients(lambda *x: CompiledAttention.apply(kernel, call, 0.0, 0, *x), (q, k, v), above)
    in_double = [x.double() for x in (q, k, v)]
    exact = gradients(lambda q, k, v: exact_attention(q, k, v, lengths, half_window), in_double, above)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("half_window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 1, 7)])
@pytest.mark.parametrize("lengths", TRAINED_LENGTHS, ids=str)
def test_gradients_in_bf16(
    kernel: Kernel, lengths: list[int], heads: int, kv_heads: int, size: int, half_window: int | None
) -> None:
    q, k, v = (x.bfloat16() for x in make_qkv(sum(lengths), heads, kv_heads, size))
    above = torch.randn(q.shape).bfloat16()
    call = AttentionCall(lengths, heads, kv_heads, size, size**-0.5, half_window, in_bf16=True)
    found = gradients(lambda *x: CompiledAttention.apply(kernel, call, 0.0, 0, *x), (q, k, v), above)
    in_double = [x.double() for x in (q, k, v)]
    exact = gradients(lambda q, k, v: exact_attention(q, k, v, lengths, half_window), in_double, above)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).square().mean().sqrt() <= 2**-7 * other.square().mean().sqrt() + 1e-9


def test_gradients_of_one_tensor_are_rotated_back(kernel: Kernel) -> None:
    lengths, rotary, size = [5, 40, 1], 24, 32
    qkv = torch.randn(sum(lengths), 4 * size)
    angles = torch.rand(sum(lengths), 1, rotary // 2).double() * 6
    # a factor on the tables, as in YaRN, so that a rotation back is not its inverse
    cos, sin = 1.1 * angles.cos(), 1.1 * angles.sin()

    def by_hand(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, size)) for part in qkv.split([2 * size, size, size], dim=-1))
        return exact_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, lengths, None)

    call = AttentionCall(lengths, 2, 1, size, size**-0.5, None, False, (torch.cat((cos, cos), dim=-1), sin))
    above = torch.randn(sum(lengths), 2, size)
    found = gradients(lambda x: CompiledAttention.apply(kernel, call, 0.0, 0, x), (qkv,), above)
    exact = gradients(by_hand, (qkv.double(),), above)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=5e-6, rtol=1e-4)


def test_gradients_of_bf16_in_fp32_are_rounded_once(kernel: Kernel) -> None:
    lengths = [7, 40, 33]
    q, k, v = (x.bfloat16() for x in make_qkv(sum(lengths), 4, 2, 64))
    above = torch.randn(q.shape).bfloat16()
    call = AttentionCall(lengths, 4, 2, 64, 0.125, None, in_bf16=False)
    attend = lambda *x: CompiledAttention.apply(kernel, call, 0.2, 3, *x)  # noqa: E731
    found = gradients(attend, (q, k, v), above)
    exact = gradients(attend, [x.float() for x in (q, k, v)], above)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other.bfloat16(), atol=0, rtol=2**-7)


def read_factors(kernel: Kernel, lengths: list[int], heads: int, rate: float, seed: int) -> torch.Tensor:
    """The factors that dropout puts on the weights: with one-hot values the output is the weights themselves."""
    tokens, size = sum(lengths), max(lengths)
    one_hot = (
        torch.cat([torch.eye(size)[:length] for length in lengths])[:, None].expand(tokens, heads, size).contiguous()
    )
    equal = torch.zeros(tokens, heads, size)
    call = AttentionCall(lengths, heads, heads, size, 1.0, None, in_bf16=False)
    weights = kernel.attention_with_dropout(equal, equal, one_hot, call, rate, seed)
    return weights * torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))[:, None, None]


def test_dropout_is_reproducible_and_has_its_rate(kernel: Kernel) -> None:
    lengths, rate = [60, 64, 50], 0.25
    factors, again, other = (read_factors(kernel, lengths, 8, rate, seed) for seed in (5, 5, 6))
    assert torch.equal(factors, again)
    seen = torch.cat([torch.arange(64).expand(length, 64) < length for length in lengths])[:, None].expand(-1, 8, -1)
    values, count = factors[seen], int(seen.sum())
    kept = values > 0
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / (1 - rate)))
    error = math.sqrt(rate * (1 - rate) / count)  # the standard error of a share
    assert abs(float((~kept).float().mean()) - rate) < 4 * error
    # another seed, another head and the next token have factors of their own
    first, second = (factors > 0).float(), (other > 0).float()
    pairs = {"seeds": (first[seen], second[seen]), "heads": (first[:60, 0, :60], first[:60, 1, :60])}
    pairs["tokens"] = (first[:59, 0, :60], first[1:60, 0, :60])
    for one, two in pairs.values():
        correlation = torch.corrcoef(torch.stack((one.flatten(), two.flatten())))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(one.numel())


def test_gradients_with_dropout_are_those_of_its_factors(kernel: Kernel) -> None:
    lengths, heads, rate, seed = [20, 7, 33], 2, 0.3, 11
    q, k, v = make_qkv(60, heads, heads, 33)
    above, factors = torch.randn(q.shape), read_factors(kernel, lengths, heads, rate, seed)
    call = AttentionCall(lengths, heads, heads, 33, 0.2, None, in_bf16=False)

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for query, key, value, factor in zip(*(x.split(lengths) for x in (q, k, v, factors.double())), strict=True):
            weights = (torch.einsum("ihd,jhd->ihj", query, key) * 0.2).softmax(-1)
            outputs.append(torch.einsum("ihj,jhd->ihd", weights * factor[:, :, : len(query)], value))
        return torch.cat(outputs)

    found = gradients(lambda *x: CompiledAttention.apply(kernel, call, rate, seed, *x), (q, k, v), above)
    exact = gradients(by_hand, [x.double() for x in (q, k, v)], above)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=5e-6, rtol=1e-4)


def test_training_attends_in_the_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attention_gradients = Kernel.attention_gradients

    def count(*arguments: Any) -> None:
        calls.append(arguments)
        attention_gradients(*arguments)

    monkeypatch.setattr(Kernel, "attention_gradients", count)
    model = BertBlocksModel(tiny_config(num_hidden_layers=2, attention_backend="cpu"))
    model(torch.arange(5, 12), cu_seqlens=torch.tensor([0, 4, 7])).last_hidden_state.sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (15,), (17, 33), (300, 256)], ids=str)
def test_dropout_of_numbers(kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, rate = torch.randn(shape).to(dtype), 0.25
    torch.manual_seed(4)
    leaf = x.clone().requires_grad_()
    out = dropout(leaf, rate)
    (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    kept = gradient > 0
    torch.testing.assert_close(gradient, (kept / (1 - rate)).to(dtype))
    torch.testing.assert_close(out, x * gradient)
    torch.manual_seed(4)
    assert torch.equal(dropout(x, rate), out)
    if x.numel() > 10_000:
        error = math.sqrt(rate * (1 - rate) / x.numel())
        assert abs(float(kept.float().mean()) - (1 - rate)) < 4 * error
        other = dropout(torch.ones(shape), rate) > 0
        neighbours = (kept[:, :-1], kept[:, 1:]), (kept[:-1], kept[1:]), (kept, other)
        for one, two in neighbours:
            correlation = torch.corrcoef(torch.stack((one.flatten().float(), two.flatten().float())))[0, 1]
            assert abs(float(correlation)) < 4 / math.sqrt(one.numel())


#: Around the size of a vector (16) and of a block of gradients (1,024).
WIDTHS = [1, 15, 16, 17, 1023, 1024, 1025, 3000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", WIDTHS[:4])
@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_new"])
def test_activations(kernel: Kernel, name: str, width: int, gated: bool, dtype: torch.dtype) -> None:
    activation = get_activation(name)
    up = (4 * torch.randn(70, (2 if gated else 1) * width)).to(dtype)
    up[0], up[1], up[2] = 0, -30, 30  # where slopes change, and where they have come to an end
    above = torch.randn(70, width).to(dtype)

    def by_hand(up: torch.Tensor) -> torch.Tensor:
        gate, value = up.chunk(2, dim=-1) if gated else (up, 1.0)
        return activation(gate) * value

    number = KERNEL_ACTIVATIONS[type(activation)]
    found = gradients(lambda x: activate(x, activation, gated), (up,), above)
    exact = gradients(by_hand, (up.double(),), above)
    assert torch.equal(found[0], kernel.activate(up, number, gated))
    # the error function is off by 1.5e-7, which gates and values of up to 16 multiply
    atol, rtol = (4e-6, 1e-6) if dtype == torch.float32 else (2**-8, 2**-8)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_new"])
def test_activations_keep_nan(kernel: Kernel, name: str) -> None:
    up = torch.zeros(2, 20)
    up[1, 17] = math.nan
    out, gradient = gradients(lambda x: activate(x, get_activation(name), False), (up,), torch.ones(2, 20))
    assert torch.equal(out.isnan(), up.isnan())
    assert name == "relu" or torch.equal(gradient.isnan(), up.isnan())  # torch's slope of relu is 1 there


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(kernel: Kernel, dtype: torch.dtype, width: int, rows: int, z_loss: float) -> None:
    logits = (5 * torch.randn(rows, width)).to(dtype)
    labels, weights = torch.randint(width, (rows,)), torch.rand(rows)
    labels[0] = width - 1
    in_double = logits.double().requires_grad_()
    exact = F.cross_entropy(in_double, labels, reduction="none") + z_loss * in_double.logsumexp(-1).square()
    (gradient,) = torch.autograd.grad(exact.sum(), in_double)
    losses, same, sums = kernel.cross_entropy(logits.clone(), labels, weights, z_loss, wants_gradient=False)
    assert sums is None
    assert torch.equal(same, logits)
    again, found, sums = kernel.cross_entropy(logits, labels, weights, z_loss, wants_gradient=True)
    assert torch.equal(losses, again)
    torch.testing.assert_close(losses.double(), exact.detach(), atol=1e-5, rtol=2e-6)
    rounding = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), gradient, atol=2e-6, rtol=rounding)
    torch.testing.assert_close(sums.double(), weights.double() @ gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_cross_entropy_keeps_nan_in_its_row(kernel: Kernel, bad: float) -> None:
    logits = torch.randn(3, 40)
    logits[1, 5] = bad
    losses, gradient, _ = kernel.cross_entropy(logits, torch.tensor([0, 1, 2]), torch.ones(3), 0.0, True)
    assert losses.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("label", [-1, 7])
def test_labels_outside_are_named(kernel: Kernel, label: int) -> None:
    with pytest.raises(IndexError, match=rf"labels reach from .*{label}.*, logits from 0 to 6"):
        kernel.cross_entropy(torch.randn(2, 7), torch.tensor([3, label]), torch.ones(2), 0.0, True)
