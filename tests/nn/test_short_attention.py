"""The Triton kernel for short sequences, run by Triton's interpreter on a CPU, tested against naive attention."""

from typing import Any

import pytest
import torch

from bertblocks.nn.backends import AttentionContext, AttentionPattern, EagerBackend, short
from bertblocks.nn.backends.short import TritonBackend
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.ops.gpu import Gpu
from bertblocks.nn.position import T5Position
from tests.helpers import EDGE_LENGTHS
from tests.nn.triton_process import needs_triton, run_with_triton

A100 = Gpu((8, 0), "A100")
#: Cases as (lengths, heads, key heads, head size, half window, is causal).
FAST: list[tuple[Any, ...]] = [
    ([3, 0, 17, 1], 4, 2, 8, None, False),
    ([20, 16], 2, 2, 24, 4, False),
    ([9], 2, 1, 16, 4, True),
]
SLOW: list[tuple[Any, ...]] = [
    (lengths, heads, kv_heads, size, window, is_causal)
    for lengths in (EDGE_LENGTHS, [1], [16], [17], [31, 32, 33], [64, 127], [128], [128, 1, 0, 65])
    for heads, kv_heads, size in ((2, 2, 64), (4, 1, 32), (3, 3, 80))
    for window in (None, 0, 4, 64)
    for is_causal in (False, True)
]


def run_cases(cases: list[Any]) -> None:
    """Compare outputs and gradients; called in a process in which Triton interprets kernels."""
    from bertblocks.nn.ops.short_attention import short_attention

    for lengths, heads, kv_heads, size, window, is_causal in cases:
        torch.manual_seed(0)
        tokens = sum(lengths)
        q = torch.randn(tokens, heads, size, requires_grad=True)
        k, v = (torch.randn(tokens, kv_heads, size, requires_grad=True) for _ in range(2))
        layout = SequenceLayout.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), (tokens,))
        weight = torch.randn(tokens, heads, size)
        reach = -1 if window is None else window
        context = AttentionContext(layout, AttentionPattern(window, is_causal=is_causal), 0.3)
        results = []
        for out in (
            short_attention(q, k, v, layout.cu_seqlens, layout.max_length, 0.3, reach, is_causal),
            EagerBackend().attend(q, k, v, context),
        ):
            results.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
        for mine, reference in zip(*results, strict=True):
            torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-4)


@needs_triton
def test_outputs_and_gradients_equal_eager_attention() -> None:
    run_with_triton(__name__, "run_cases", FAST)


@pytest.mark.slow
@needs_triton
def test_outputs_and_gradients_equal_eager_attention_at_every_edge() -> None:
    run_with_triton(__name__, "run_cases", SLOW)


def test_reasons_name_what_the_kernel_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(9, 2, 16)
    layout = SequenceLayout.from_shape(1, 9, q.device)
    with pytest.raises(ValueError, match="attention_backend is 'triton' but the model is on cpu"):
        TritonBackend().attend(q, q, q, AttentionContext(layout, AttentionPattern(), 0.3))

    def why_not(
        layout: SequenceLayout, gpu: Gpu = A100, size: int = 16, dtype: Any = torch.bfloat16, **pattern: Any
    ) -> str:
        monkeypatch.setattr(short, "describe_gpu", lambda _: gpu)
        q = torch.empty(9, 2, size, dtype=dtype)
        return short.why_not_short(q, AttentionContext(layout, AttentionPattern(**pattern), 0.3)) or ""

    assert why_not(layout) == ""
    assert why_not(layout, Gpu((8, 0), has_triton=False)) == "Triton is not installed"
    assert "computes in float32" in why_not(layout, dtype=torch.float32)
    assert "a sequence of 129 tokens" in why_not(SequenceLayout.from_shape(1, 129, q.device))
    long = SequenceLayout.from_shape(1, 65, q.device)
    assert why_not(long) == ""
    assert "the kernel takes 64 on RTX" in why_not(long, Gpu((8, 9), "RTX", shared_memory=99 * 1024))
    assert "no dropout, biases" in why_not(layout, position=T5Position(2))
    assert "the head size is 72" in why_not(layout, size=72)
