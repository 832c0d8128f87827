"""Attention backends, tested against a naive implementation, and the errors they raise."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksModel
from bertblocks.nn.attention import ForwardContext
from bertblocks.nn.backends import (
    AttentionContext,
    AttentionPattern,
    CpuBackend,
    EagerBackend,
    SdpaBackend,
)
from bertblocks.nn.backends import cpu as cpu_module
from bertblocks.nn.backends import sdpa as sdpa_module
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.ops import cpu as cpu_ops
from bertblocks.nn.position import ALiBi, BlockPosition, alibi_slopes
from tests.helpers import WINDOW, naive_attention, tiny_config

HEADS, KV_HEADS, SIZE = 4, 2, 8


def flat_qkv(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, HEADS, SIZE), torch.randn(tokens, KV_HEADS, SIZE), torch.randn(tokens, KV_HEADS, SIZE)


def layouts(lengths: list[int]) -> dict[str, SequenceLayout]:
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {"ragged": SequenceLayout.from_mask(mask), "padded": SequenceLayout.from_mask(mask, unpad=False)}


PATTERNS = {
    "global": {},
    "local": {"half_window": WINDOW // 2},
    "local with global tokens": {"half_window": WINDOW // 2, "num_global_tokens": 2},
    "window of nothing but oneself": {"half_window": 0},
    "causal": {"is_causal": True},
    "causal and local": {"half_window": WINDOW // 2, "is_causal": True},
}


@pytest.mark.parametrize("with_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("kind", ["ragged", "padded"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "sdpa in blocks", "cpu", "cpu in blocks"])
def test_backends_equal_naive_attention(
    backend: Any, pattern: Any, kind: Any, with_alibi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "blocks" in backend:
        monkeypatch.setattr(SdpaBackend, "block_size", 3)  # beyond two slabs of keys from 22 tokens on
    monkeypatch.setattr(cpu_module, "LONGEST_CHUNK", 24)  # beyond it a global sequence is the fused kernel's
    lengths = [29, 1, 0, 9, 24]
    layout = layouts(lengths)[kind]
    options = PATTERNS[pattern]
    q, k, v = flat_qkv(layout.positions.shape[0])
    position = ALiBi(HEADS) if with_alibi else BlockPosition()
    backends: dict[str, Any] = {"eager": EagerBackend, "sdpa": SdpaBackend, "cpu": CpuBackend}
    chosen = backends[backend.split()[0]]()
    out = chosen.attend(q, k, v, AttentionContext(layout, AttentionPattern(position=position, **options), 0.4, 0.0))
    slopes = alibi_slopes(HEADS) if with_alibi else None
    for row, length in enumerate(lengths):
        start = row * max(lengths) if kind == "padded" else sum(lengths[:row])
        tokens = slice(start, start + length)
        expected = naive_attention(q[tokens], k[tokens], v[tokens], 0.4, slopes=slopes, **options)
        torch.testing.assert_close(out[tokens], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", [EagerBackend(), SdpaBackend(), CpuBackend()], ids=["eager", "sdpa", "cpu"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_query_that_sees_no_key_gets_zero_and_no_nan(backend: Any, pattern: Any) -> None:
    """Covers padding far from any real token in a local layer, and a row with padding only."""
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[0, :3] = True
    layout = SequenceLayout.from_mask(mask, unpad=False)
    q, k, v = (x.requires_grad_() for x in flat_qkv(60))
    with_alibi = AttentionPattern(position=ALiBi(HEADS), **PATTERNS[pattern])
    out = backend.attend(q, k, v, AttentionContext(layout, with_alibi, 0.4, 0.0))
    out.sum().backward()
    assert torch.equal(out[30:], torch.zeros_like(out[30:]))
    for x in (out, q.grad, k.grad, v.grad):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("backend", [SdpaBackend(), CpuBackend()], ids=["sdpa", "cpu"])
def test_local_layers_compute_long_sequences_in_blocks(backend: Any) -> None:
    """No `length x length` matrix is built: the largest tensor grows linearly with the length."""
    pattern = AttentionPattern(half_window=64)
    assert not backend.is_banded(65, pattern)
    assert backend.is_banded(4096, pattern)
    sizes = []
    for length in (4096, 8192):
        layout = SequenceLayout.from_shape(1, length, torch.device("cpu"))
        largest = LargestTensor()
        with largest, torch.no_grad():
            q = torch.randn(length, 1, 8)
            backend.attend(q, q, q, AttentionContext(layout, pattern, 0.4, 0.0))
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0]


#: Shapes of rectangles: one token, lengths around a block of 3 queries with 4 keys on both sides, a single row.
RECTANGLES = [(3, 1), (3, 2), (3, 10), (2, 11), (2, 12), (2, 23), (1, 12), (1, 29)]


@pytest.mark.parametrize("with_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("together", [0, 64], ids=["apart", "together"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("rows", "length"), RECTANGLES)
def test_cpu_backend_equals_eager_on_rectangles(
    rows: Any, length: Any, pattern: Any, together: Any, with_alibi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs with and without autograd, and gradients, in double precision."""
    monkeypatch.setattr(CpuBackend, "block_size", 3)
    monkeypatch.setattr(cpu_module, "LONGEST_ROW", together)
    monkeypatch.setattr(cpu_module, "LONGEST_CHUNK", 20)
    layout = SequenceLayout.from_shape(rows, length, torch.device("cpu"))
    q, k, v = qkv = [x.double().requires_grad_() for x in flat_qkv(rows * length)]
    weight = torch.randn(rows * length, HEADS, SIZE, dtype=torch.float64)
    options = AttentionPattern(position=ALiBi(HEADS) if with_alibi else BlockPosition(), **PATTERNS[pattern])
    results = []
    for backend in (EagerBackend(), CpuBackend()):
        out = backend.attend(q, k, v, AttentionContext(layout, options, 0.4, 0.0))
        results.append([out, *torch.autograd.grad((out * weight).sum(), qkv)])
    with torch.no_grad():
        results[0].append(results[0][0])
        results[1].append(CpuBackend().attend(q, k, v, AttentionContext(layout, options, 0.4, 0.0)))
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("with_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("together", [0, 4, 12, 64])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_cpu_backend_equals_eager_on_ragged_sequences(
    pattern: Any, together: Any, with_alibi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients of joined sequences, single ones, lengths around a block and its keys, and none at all."""
    monkeypatch.setattr(CpuBackend, "block_size", 3)
    monkeypatch.setattr(cpu_module, "MAX_JOINED_TOKENS", together)
    lengths = torch.tensor([1, 2, 0, 1, 3, 11, 5, 4, 0, 12, 2, 23, 1, 1])
    layout = SequenceLayout.from_cu_seqlens(F.pad(lengths.cumsum(0), (1, 0)), (int(lengths.sum()),))
    q, k, v = qkv = [x.double().requires_grad_() for x in flat_qkv(int(lengths.sum()))]
    weight = torch.randn(len(qkv[0]), HEADS, SIZE, dtype=torch.float64)
    options = AttentionPattern(position=ALiBi(HEADS) if with_alibi else BlockPosition(), **PATTERNS[pattern])
    results = []
    for backend in (EagerBackend(), CpuBackend()):
        out = backend.attend(q, k, v, AttentionContext(layout, options, 0.4, 0.0))
        results.append([out, *torch.autograd.grad((out * weight).sum(), qkv)])
    torch.testing.assert_close(results[1], results[0], atol=1e-12, rtol=1e-10)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().size() // tensor.element_size())
        return out


def test_a_large_bias_computed_in_chunks_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layouts([29, 9])["ragged"]
    q, k, v = flat_qkv(38)
    pattern = AttentionPattern(position=ALiBi(HEADS))
    whole = SdpaBackend().attend(q, k, v, AttentionContext(layout, pattern, 0.4, 0.0))
    monkeypatch.setattr(sdpa_module, "MAX_BIAS_ELEMENTS", HEADS * 29 * 5)
    torch.testing.assert_close(
        SdpaBackend().attend(q, k, v, AttentionContext(layout, pattern, 0.4, 0.0)), whole, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("backend", [EagerBackend(), SdpaBackend(), CpuBackend()], ids=["eager", "sdpa", "cpu"])
@pytest.mark.parametrize("kind", ["ragged", "padded"])
def test_dropout_drops_weights_and_keeps_their_mean(backend: Any, kind: Any) -> None:
    layout = layouts([12, 5])[kind]
    tokens = layout.positions.shape[0]
    q, k = torch.zeros(tokens, HEADS, SIZE), torch.zeros(tokens, HEADS, SIZE)
    v = torch.ones(tokens, HEADS, SIZE)
    draws = torch.stack(
        [backend.attend(q, k, v, AttentionContext(layout, AttentionPattern(), 1.0, 0.5))[0] for _ in range(400)]
    )
    assert draws.std() > 0.1
    # the mean of 1600 sums of 12 weights of 1/12, each kept half of the time and doubled: sd 1 / sqrt(12 * 1600)
    assert abs(draws[:, :, 0].mean() - 1) < 5 / (12 * 1600) ** 0.5


def test_flash_without_cuda_raises() -> None:
    model = BertBlocksModel(tiny_config(attention_backend="flash"))
    with pytest.raises(ValueError, match="attention_backend is 'flash' but the model is on cpu"):
        model(torch.tensor([[1, 2]]))


class Witness(EagerBackend):
    """Records the precision of its inputs."""

    def attend(self, q: Any, k: Any, v: Any, context: Any) -> Any:
        self.seen = (q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu"))
        return super().attend(q, k, v, context)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("has_units", [False, True])
@pytest.mark.parametrize("is_cast", [False, True], ids=["half model", "autocast"])
def test_half_precision_attention_runs_in_fp32_on_cpus_without_matrix_units(
    qk_norm: Any, has_units: Any, is_cast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_ops, "has_amx", lambda: has_units)
    model = BertBlocksModel(tiny_config(qk_norm=qk_norm)).eval()
    attention, witness = model.encoder.layers[0].attention, Witness()
    x, layout = torch.randn(6, 32), SequenceLayout.from_shape(2, 3, torch.device("cpu"))
    expected, _ = attention(x, ForwardContext(layout, EagerBackend()))
    if not is_cast:
        attention, x = attention.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        out, _ = attention(x, ForwardContext(layout, witness))
        _, weights = attention(x, ForwardContext(layout, witness, output_weights=True))
    assert witness.seen == (*[torch.bfloat16 if has_units else torch.float32] * 3, is_cast and has_units)
    assert out.dtype == torch.bfloat16
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)  # of numbers up to 3


# ---------------------------------------------------------------------- NaN and infinity


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("with_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("backend", [EagerBackend(), SdpaBackend(), CpuBackend()], ids=["eager", "sdpa", "cpu"])
def test_nan_and_infinity_stay_in_their_sequence(backend: Any, with_alibi: Any, part: Any, bad: Any) -> None:
    """Outputs and gradients of the other sequences equal those of each sequence alone."""
    lengths = [3, 2, 2, 4]
    pattern = AttentionPattern(position=ALiBi(HEADS) if with_alibi else None)
    qkv = dict(zip("qkv", flat_qkv(sum(lengths)), strict=True))
    qkv[part][3:5, 0, 0] = bad
    for tensor in qkv.values():
        tensor.requires_grad_()
    above = torch.randn(sum(lengths), HEADS, SIZE)
    out = backend.attend(*qkv.values(), AttentionContext(layouts(lengths)["ragged"], pattern, 0.4))
    gradients = torch.autograd.grad(out, list(qkv.values()), above)
    for start, length in ((0, 3), (5, 2), (7, 4)):
        tokens = slice(start, start + length)
        q, k, v = alone = [tensor.detach()[tokens].requires_grad_() for tensor in qkv.values()]
        expected = EagerBackend().attend(q, k, v, AttentionContext(layouts([length])["ragged"], pattern, 0.4))
        torch.testing.assert_close(out[tokens], expected, atol=1e-5, rtol=1e-5)
        for gradient, wanted in zip(gradients, torch.autograd.grad(expected, alone, above[tokens]), strict=True):
            torch.testing.assert_close(gradient[tokens], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", [EagerBackend(), SdpaBackend(), CpuBackend()], ids=["eager", "sdpa", "cpu"])
def test_a_nan_or_infinite_gradient_stays_in_its_sequence(backend: Any, bad: Any) -> None:
    qkv = [tensor.requires_grad_() for tensor in flat_qkv(7)]
    above = torch.randn(7, HEADS, SIZE)
    out = backend.attend(*qkv, AttentionContext(layouts([3, 2, 2])["ragged"], AttentionPattern(), 0.4))
    expected = torch.autograd.grad(out, qkv, above, retain_graph=True)
    above[3, 1, 2] = bad
    others = [0, 1, 2, 5, 6]
    for gradient, wanted in zip(torch.autograd.grad(out, qkv, above), expected, strict=True):
        torch.testing.assert_close(gradient[others], wanted[others], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"local_attention": True, "local_attention_window_size": 4}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["auto", "cpu", "sdpa", "eager"])
def test_nan_in_kept_padding_reaches_neither_outputs_nor_gradients(backend: Any, bad: Any, options: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 0, 0, 0, 0]])
    model = BertBlocksModel(tiny_config(attention_backend=backend, unpad=False, **options)).eval()
    results = []
    for value in (0.0, bad):
        embeddings = model.embedding.token.weight.detach()[ids].clone()
        embeddings[1, 3:] = value
        out = model(inputs_embeds=embeddings, attention_mask=ids != 0)
        model.zero_grad()
        out.last_hidden_state.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([out.last_hidden_state, out.pooler_output, *gradients])
    for spoiled, clean in zip(results[1], results[0], strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(spoiled, clean)


# ---------------------------------------------------------------------- checkpointing and graph capture


@pytest.mark.parametrize(
    "options", [{"block_pos_enc_kind": "t5", "embd_pos_enc_kind": "none"}, {}], ids=["t5", "plain"]
)
@pytest.mark.parametrize("backend", ["cpu", "sdpa", "eager"])
def test_reentrant_checkpointing_drops_the_same_weights_when_it_recomputes(backend: Any, options: Any) -> None:
    config = tiny_config(attention_backend=backend, attention_dropout=0.5, **options)
    model = BertBlocksModel(config).train()
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, attention_mask=mask).last_hidden_state.square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = [gradient.clone() for gradient in gradients()]
    model.gradient_checkpointing_enable({"use_reentrant": True})
    for gradient, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


LOCAL = {"local_attention": True, "local_attention_window_size": 8}
CAPTURED = [
    {},
    {"mlp_type": "glu", "hidden_act": "silu"},
    {"norm_fn": "rms", "block_pos_enc_kind": "rope"},
    {**LOCAL, "block_pos_enc_kind": "rope"},
]


@pytest.mark.parametrize("options", CAPTURED, ids=["plain", "glu", "rope", "local"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_an_exported_model_accepts_other_batch_sizes_and_lengths(backend: Any, options: Any) -> None:
    config = tiny_config(attention_backend=backend, max_position_embeddings=256, **options)
    model = BertBlocksModel(config).eval()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0], [12, 13, 0, 0]])
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=256)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    with torch.no_grad():
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
        longer = torch.randint(5, 60, (2, 200))  # beyond the length at which windows are computed by blocks
        for other in (ids, torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]]), longer):
            inputs = {"input_ids": other, "attention_mask": (other != 0).long()}
            expected = model(**inputs).last_hidden_state
            torch.testing.assert_close(program(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", CAPTURED, ids=["plain", "glu", "rope", "local"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_traced_model_accepts_other_masks(backend: Any, options: Any) -> None:
    model = BertBlocksModel(tiny_config(attention_backend=backend, **options)).eval()
    model.config.return_dict = False
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    traced = torch.jit.trace(model, (ids, torch.ones_like(ids)))  # checked once more without gradients
    with torch.no_grad():
        for mask in (torch.ones_like(ids), torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])):
            expected = model(ids, attention_mask=mask)[0]
            torch.testing.assert_close(traced(ids, mask)[0], expected, atol=1e-5, rtol=1e-5)
