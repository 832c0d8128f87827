"""The choice of GPU kernels over tables of capabilities, what reaches them, and their numbers where a CPU runs them."""

import importlib
import itertools
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bertblocks.nn.backends import (
    AttentionContext,
    AttentionPattern,
    CpuBackend,
    EagerBackend,
    FlashBackend,
    SdpaBackend,
    get_backend,
)
from bertblocks.nn.backends import flex as flex_module
from bertblocks.nn.backends.flex import bucket, flex
from bertblocks.nn.backends.kernels import KERNELS, AttentionCall, choose_kernel
from bertblocks.nn.backends.sdpa import pad_layout
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.ops import gpu as gpu_module
from bertblocks.nn.ops.gpu import Gpu, has_varlen_attention, use_flash_implementation
from bertblocks.nn.position import ALiBi, BlockPosition, T5Position
from bertblocks.nn.relative import RelativeVectors
from tests.helpers import EDGE_LENGTHS, WINDOW, naive_attention

HEADS, KV_HEADS, SIZE = 4, 2, 16
A100, H100, B200 = Gpu((8, 0), "A100"), Gpu((9, 0), "H100"), Gpu((10, 0), "B200")
V100, T4 = Gpu((7, 0), "V100"), Gpu((7, 5), "T4")
WITH_FLASH = Gpu((8, 0), flash_attn=(2, 8, 3))


class Relative(BlockPosition):
    is_relative = True


def make_call(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, **options: Any) -> AttentionCall:
    own = {key: options.pop(key) for key in ("has_dropout", "has_key_mask") if key in options}
    return AttentionCall(AttentionPattern(**options), dtype, head_dim, **own)


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("gpu", "call", "kernel"),
    [
        (A100, {}, "varlen"),
        (A100, {"dtype": torch.float16, "half_window": 64}, "varlen"),
        (A100, {"is_causal": True}, "varlen"),
        (H100, {"head_dim": 256}, "varlen"),
        (Gpu((9, 0), implementation="FA3"), {}, "varlen"),
        (Gpu((10, 0), implementation="FA4"), {}, "varlen"),
        (Gpu((12, 0)), {}, "varlen"),  # a consumer's Blackwell
        (A100, {"has_dropout": True}, None),
        (WITH_FLASH, {"has_dropout": True}, "flash_attn"),
        (WITH_FLASH, {"position": ALiBi(4)}, "flash_attn"),
        (WITH_FLASH, {}, "varlen"),
        (Gpu((8, 0), has_varlen=False, flash_attn=(2, 8, 3)), {}, "flash_attn"),
        (A100, {"position": ALiBi(4)}, "flex"),
        (WITH_FLASH, {"position": ALiBi(4, is_learned=True)}, "flex"),
        (WITH_FLASH, {"position": T5Position(4)}, "flex"),
        (WITH_FLASH, {"position": Relative()}, "flex"),
        (A100, {"position": T5Position(4), "dtype": torch.float32}, "flex"),
        (A100, {"has_sinks": True}, "flex"),
        (A100, {"half_window": 4, "num_global_tokens": 2}, "flex"),
        (WITH_FLASH, {"position": T5Position(4), "has_dropout": True}, None),
        (Gpu((8, 0), has_triton=False), {"position": T5Position(4)}, None),
        (A100, {"dtype": torch.float32}, None),
        (A100, {"has_key_mask": True}, None),
        (A100, {"head_dim": 20}, None),
        (V100, {}, None),
        (T4, {"position": T5Position(4)}, None),
        (Gpu((9, 4), "MI300X", is_rocm=True), {}, None),
        (None, {}, None),
    ],
)
def test_the_first_kernel_that_can_runs_a_layer(gpu: Gpu | None, call: dict[str, Any], kernel: str | None) -> None:
    assert choose_kernel(make_call(**call), gpu) == kernel


@pytest.mark.parametrize(
    ("kernel", "gpu", "call", "part"),
    [
        ("varlen", V100, {}, "compute capability 8.0 or newer, and V100 has 7.0"),
        ("varlen", A100, {"head_dim": 20}, "multiples of 8, and the layer's is 20"),
        ("varlen", A100, {"head_dim": 512}, "up to 256"),
        ("varlen", A100, {"dtype": torch.float32}, "the model computes in float32"),
        ("varlen", Gpu((8, 0), has_varlen=False), {}, "torch 2.13 or newer"),
        ("varlen", Gpu((8, 0), "A100", implementation="FA3"), {}, "switched to FA3, which does not run on A100"),
        ("varlen", Gpu((10, 0), implementation="FA4"), {"head_dim": 256}, "head sizes up to 128"),
        ("varlen", A100, {"has_dropout": True}, "no dropout"),
        ("varlen", A100, {"has_key_mask": True}, "cannot hide padding"),
        ("varlen", A100, {"position": ALiBi(4)}, "the layer has ALiBi"),
        ("flash_attn", Gpu((9, 0), has_flash_attn_4=True), {}, "flash-attn-4 is another package"),
        ("flash_attn", Gpu((8, 0), flash_attn=(2, 3)), {}, "needs flash-attn 2.4.1 or newer, and 2.3 is installed"),
        ("flash_attn", WITH_FLASH, {"position": T5Position(4)}, "the layer has T5Position"),
        ("flash_attn", WITH_FLASH, {"has_sinks": True}, "attention_sinks"),
        ("flex", V100, {"position": T5Position(4)}, "Triton needs compute capability 8.0"),
        ("flex", A100, {"position": T5Position(4), "head_dim": 8}, "head sizes from 16 to 256"),
        ("flex", A100, {"position": T5Position(4), "has_dropout": True}, "no dropout"),
    ],
)
def test_reasons_name_what_is_missing(kernel: Any, gpu: Any, call: Any, part: Any) -> None:
    assert part in KERNELS[kernel][1](make_call(**call), gpu)


def test_this_torch_has_the_arguments_that_varlen_gets() -> None:
    assert has_varlen_attention()


@pytest.mark.parametrize(
    ("name", "gpu", "part"),
    [
        ("FA3", None, "needs CUDA"),
        ("FA3", A100, "compute capability 9.x; A100 has 8.0"),
        ("FA4", A100, "compute capability 9.x or 10.x"),
        ("FA3", H100, "the module flash_attn_interface is missing; install flash-attn-3"),
        ("FA4", B200, "install flash-attn-4"),
    ],
)
def test_switching_to_what_cannot_run_raises(name: Any, gpu: Any, part: Any) -> None:
    with pytest.raises(ValueError, match=part):
        use_flash_implementation(name, gpu)


def test_the_switch_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(gpu_module.importlib.util, "find_spec", lambda name: name)
    use_flash_implementation("FA3", H100)
    assert calls == ["FA3"]


def test_flash_attn_4_alone_is_not_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "flash-attn-4":
            raise importlib.metadata.PackageNotFoundError
        return "4.0.0b9"

    monkeypatch.setattr(gpu_module.importlib.metadata, "version", version)
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    answers = {"get_device_capability": (10, 0), "get_device_name": "B200", "get_device_properties": properties}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    for cached in (gpu_module.installed_version, gpu_module._describe_gpu):
        cached.cache_clear()
    try:
        found = gpu_module.describe_gpu(torch.device("cuda"))
        assert found is not None
        assert found.has_flash_attn_4
        assert found.flash_attn is None
        assert found.shared_memory == 227 * 1024
    finally:
        for cached in (gpu_module.installed_version, gpu_module._describe_gpu):
            cached.cache_clear()


@pytest.mark.parametrize(("device", "backend"), [("cpu", CpuBackend), ("mps", SdpaBackend), ("xpu", SdpaBackend)])
def test_devices_without_cuda_have_their_backend(device: str, backend: type) -> None:
    assert type(get_backend("auto", torch.device(device))) is backend


# ---------------------------------------------------------------------- what reaches the kernels


def make_layout(lengths: list[int]) -> SequenceLayout:
    return SequenceLayout.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), (sum(lengths),))


def flat_qkv(tokens: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(tokens, heads, SIZE, **options) for heads in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[return-value]


def attend_naively(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: Any, slopes: Any = None
) -> Tensor:
    """Reads bounds and windows as flash attention does."""
    assert bounds.dtype == torch.int32
    pairs = list(itertools.pairwise(bounds.tolist()))
    assert longest == max(stop - start for start, stop in pairs)
    left, right = window
    assert right in (left, 0)
    half, is_causal = None if left == -1 else left, right == 0 and left != 0
    return torch.cat([naive_attention(q[a:b], k[a:b], v[a:b], scale, half, 0, slopes, is_causal) for a, b in pairs])


PATTERNS: dict[str, dict[str, Any]] = {
    "global": {},
    "local": {"half_window": WINDOW // 2},
    "oneself": {"half_window": 0},
    "causal": {"is_causal": True},
    "causal and local": {"half_window": WINDOW // 2, "is_causal": True},
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("lengths", [EDGE_LENGTHS, [6, 6]], ids=["ragged", "uniform"])
def test_varlen_gets_layout_window_and_groups(lengths: Any, pattern: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
        *, scale: float, window_size: Any, enable_gqa: bool, num_splits: int,
    ) -> Tensor:  # fmt: skip
        assert cu_q is cu_k
        assert (max_q, num_splits, enable_gqa) == (max_k, 1, True)
        return attend_naively(q, k, v, cu_q, max_q, scale, window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("bertblocks.nn.backends.kernels.HALF", (torch.float32,))
    q, k, v = flat_qkv(sum(lengths))
    context = AttentionContext(make_layout(lengths), AttentionPattern(**PATTERNS[pattern]), 0.4)
    out = FlashBackend(gpu=A100).attend(q, k, v, context)
    expected = EagerBackend().attend(q, k, v, context)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("with_alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flash_attn_gets_dropout_slopes_and_determinism(
    pattern: Any, with_alibi: Any, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
        dropout_p: Any, softmax_scale: Any, causal: bool, window_size: Any, alibi_slopes: Any, deterministic: bool,
    ) -> Any:  # fmt: skip
        assert (dropout_p, deterministic, cu_seqlens_q is cu_seqlens_k) == (0.25, is_deterministic, True)
        assert max_seqlen_q == max_seqlen_k
        assert causal == PATTERNS[pattern].get("is_causal", False)
        slopes = None if alibi_slopes is None else alibi_slopes.tolist()
        return attend_naively(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size, slopes)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=varlen))
    monkeypatch.setattr("bertblocks.nn.backends.kernels.HALF", (torch.float32,))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    q, k, v = flat_qkv(sum(EDGE_LENGTHS))
    pattern_ = AttentionPattern(position=ALiBi(HEADS) if with_alibi else BlockPosition(), **PATTERNS[pattern])
    layout = make_layout(EDGE_LENGTHS)
    out = FlashBackend(gpu=WITH_FLASH).attend(q, k, v, AttentionContext(layout, pattern_, 0.4, 0.25))
    expected = EagerBackend().attend(q, k, v, AttentionContext(layout, pattern_, 0.4))
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_torchs_kernel_takes_the_arguments_and_gives_shapes_and_gradients_on_meta() -> None:
    layout = make_layout([5, 0, 9])
    layout.device = torch.device("meta")
    q, k, v = flat_qkv(14, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = FlashBackend(gpu=A100).attend(q, k, v, AttentionContext(layout, AttentionPattern(half_window=3), 0.4))
    assert out.shape == q.shape
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]  # type: ignore[union-attr]


def test_what_no_kernel_runs_goes_to_the_fallback_or_raises_with_all_reasons() -> None:
    q, k, v = flat_qkv(9)
    context = AttentionContext(make_layout([4, 5]), AttentionPattern(), 0.4)
    out = FlashBackend(SdpaBackend(), V100).attend(q, k, v, context)
    torch.testing.assert_close(out, EagerBackend().attend(q, k, v, context), atol=2e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"varlen_attn: it needs compute .* V100 has 7.0; flash-attn: the package"):
        FlashBackend(gpu=V100).attend(q, k, v, context)


# ---------------------------------------------------------------------- padding and FlexAttention


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own implementation of FlexAttention in plain operations, with gradients, which it only checks for."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "compiled_flex", lambda: module.flex_attention)


def with_gradients(run: Any, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    out = run()
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


#: A case of each thing that FlexAttention computes: position, pattern, sinks, vectors of distances.
FLEX_CASES: dict[str, tuple[Any, dict[str, Any], bool, bool]] = {
    "t5": (lambda: T5Position(HEADS, 8, 20), {}, False, False),
    "learned alibi, causal": (lambda: ALiBi(HEADS, True), {"is_causal": True}, False, False),
    "alibi, local, global tokens": (lambda: ALiBi(HEADS), {"half_window": 4, "num_global_tokens": 2}, False, False),
    "sinks, local": (BlockPosition, {"half_window": 4}, True, False),
    "sinks, t5, local": (lambda: T5Position(HEADS, 8, 20), {"half_window": 4}, True, False),
    "vectors of distances": (Relative, {}, False, True),
    "vectors of distances, local": (Relative, {"half_window": 4}, False, True),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["flex", "padded"])
@pytest.mark.parametrize("case", FLEX_CASES)
def test_flex_and_padded_attention_equal_eager_with_gradients(case: str, backend: str, eager_flex: None) -> None:
    make_position, options, has_sinks, has_vectors = FLEX_CASES[case]
    position, lengths = make_position(), [29, 1, 0, 9, 130, 24]
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)
    layout, tokens = make_layout(lengths), sum(lengths)
    q, k, v = flat_qkv(tokens, requires_grad=True)
    sinks = torch.randn(HEADS, requires_grad=True) if has_sinks else None
    reach = options.get("half_window") or max(lengths) - 1
    keys, queries = (torch.randn(HEADS, SIZE, 2 * reach + 1, requires_grad=True) for _ in range(2))
    vectors = RelativeVectors(keys, queries, reach) if has_vectors else None
    pattern = AttentionPattern(position=position, has_sinks=has_sinks, **options)
    context = AttentionContext(layout, pattern, 0.4, 0.0, vectors, sinks=sinks)
    inputs = [q, k, v, *position.parameters(), *([sinks] if has_sinks else []), *([keys, queries] if vectors else [])]
    weight = torch.randn(tokens, HEADS, SIZE)
    run = flex if backend == "flex" else SdpaBackend()._attend_padded
    expected = with_gradients(lambda: EagerBackend().attend(q, k, v, context), inputs, weight)  # type: ignore[arg-type]
    actual = with_gradients(lambda: run(q, k, v, context), inputs, weight)  # type: ignore[arg-type]
    for mine, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, reference, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("reach", [None, 5, 300])
@pytest.mark.parametrize("lengths", [[700], [1, 127, 128, 129, 0, 500], [64] * 9, [3]])
def test_blocks_of_flex_cover_what_is_visible_and_little_else(lengths: Any, reach: Any) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    layout, size = make_layout(lengths), bucket(sum(lengths))
    blocks = flex_module._block_ranges(layout, size, reach)
    dense = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=128).to_dense()[0, 0].bool()
    ids = torch.full((size,), -1)
    ids[: sum(lengths)] = torch.repeat_interleave(torch.tensor(lengths))
    visible = ids[:, None] == ids
    if reach is not None:
        visible &= (torch.arange(size)[:, None] - torch.arange(size)).abs() <= reach
    needed = visible.view(size // 128, 128, size // 128, 128).any(3).any(1)
    assert dense[needed].all()
    assert dense.sum() - needed.sum() <= size // 128  # only a block in which one sequence ends and another begins


def test_flex_has_few_shapes() -> None:
    sizes = {bucket(tokens) for tokens in range(1, 65_537)}
    assert len(sizes) <= 8 * 10
    assert all(tokens <= bucket(tokens) < tokens + max(128, tokens // 8 + 1) for tokens in range(1, 65_537, 37))


def test_lengths_of_one_bucket_share_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend="eager")
    monkeypatch.setattr(flex_module, "compiled_flex", lambda: compiled)
    position = T5Position(HEADS, 8, 20)
    with torch.no_grad():
        for lengths in ([90, 30, 5], [7, 80, 41], [100, 1], [128], [2] * 9):
            context = AttentionContext(make_layout(lengths), AttentionPattern(position=position), 0.4)
            q, k, v = flat_qkv(sum(lengths))
            out = flex(q, k, v, context)
            torch.testing.assert_close(out, EagerBackend().attend(q, k, v, context), atol=1e-5, rtol=1e-4)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert frames <= 2  # distances up to 64 and up to 128


def test_a_batch_of_equal_lengths_needs_no_padding() -> None:
    padded, _ = pad_layout(make_layout([6, 6]))
    assert padded.key_mask is None
    assert padded.rectangle == (2, 6)
