"""The Triton kernel for short sequences, run by Triton's interpreter on a CPU, tested against naive attention."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from bertblocks.nn.backends import AttentionContext, AttentionPattern, EagerBackend
from bertblocks.nn.backends.short import TritonBackend, why_not_short
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.position import T5Position
from tests.helpers import EDGE_LENGTHS

pytest.importorskip("triton", reason="Triton is not installed: pip install 'bertblocks[triton]'")

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


def interpret(cases: list[Any]) -> None:
    """Triton decides when it is imported whether to interpret, so the cases need a process of their own."""
    code = "import json, sys; from tests.nn.test_short_attention import run_cases; run_cases(json.loads(sys.argv[1]))"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_outputs_and_gradients_equal_eager_attention() -> None:
    interpret(FAST)


@pytest.mark.slow
def test_outputs_and_gradients_equal_eager_attention_at_every_edge() -> None:
    interpret(SLOW)


def test_reasons_name_what_the_kernel_cannot_run() -> None:
    q = torch.randn(9, 2, 16)
    layout = SequenceLayout.from_shape(1, 9, q.device)
    with pytest.raises(ValueError, match="attention_backend is 'triton' but the model is on cpu"):
        TritonBackend().attend(q, q, q, AttentionContext(layout, AttentionPattern(), 0.3))

    class OnCuda:
        is_cuda, shape = True, (9, 2, 16)

    def why_not(layout: SequenceLayout, q: Any = OnCuda, **pattern: Any) -> str:
        return why_not_short(q, AttentionContext(layout, AttentionPattern(**pattern), 0.3)) or ""

    assert why_not(layout) == ""
    assert "a sequence of 129 tokens" in why_not(SequenceLayout.from_shape(1, 129, q.device))
    assert "no dropout, biases" in why_not(layout, position=T5Position(2))
    OnCuda.shape = (9, 2, 160)
    assert "the head size is 160" in why_not(layout)
