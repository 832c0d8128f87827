"""Triton's compiler makes machine code of every own kernel for NVIDIA GPUs, which needs none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bertblocks.nn.backends.short import LARGEST_HEAD, LONGEST, SHARED_MEMORY
from tests.nn.triton_process import needs_triton, run_with_triton

#: Compute capabilities, and the shared memory in bytes that a program may have there (CUDA's programming guide).
GPUS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES: dict[Any, str] = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}


def compile_all(capability: int, memory: int) -> None:
    """Call the operations with kernels that are compiled instead of run; called in a process with Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bertblocks.nn.ops import fused, short_attention

    compiled: set[str] = set()

    class Compiled:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.launch

        def launch(self, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
            given = {**dict(zip(self.kernel.arg_names, arguments, strict=False)), **constants}
            fixed = {p.name: given[p.name] for p in self.kernel.params if p.is_constexpr or given[p.name] is None}
            signature = {
                name: "constexpr" if name in fixed else TYPES[getattr(value, "dtype", type(value))]
                for name, value in given.items()
            }
            source = ASTSource(self.kernel, {name: signature[name] for name in self.kernel.arg_names}, fixed)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
            assert made.asm["cubin"]
            assert made.metadata.shared <= memory, (self.kernel.__name__, made.metadata.shared)
            compiled.add(self.kernel.__name__)

    launched = {
        fused: ("_norm_forward", "_norm_backward", "_glu_forward", "_glu_backward", "_rotary"),
        short_attention: ("_forward", "_backward"),
    }
    for module, names in launched.items():
        for name in names:
            setattr(module, name, Compiled(getattr(module, name)))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 768, dtype=dtype, requires_grad=True)
        weight = torch.ones(768)
        for branch, bias, is_centred in ((x, weight, True), (x.detach().bfloat16(), None, False), (None, None, False)):
            joined, out = fused.add_norm(x, branch, weight, bias, 1e-5, is_centred, rounds_first=not is_centred)
            (joined.sum() + out.sum()).backward()
        for activation in ("silu", "gelu", "gelu_new"):
            fused.gated_unit(torch.randn(3, 2304, dtype=dtype, requires_grad=True), activation).sum().backward()
        q = torch.randn(9, 4, 64, dtype=dtype, requires_grad=True)
        for interleaved in (False, True):
            fused.rotate(q, torch.ones(9, 1, 64), torch.ones(9, 1, 32), interleaved).sum().backward()
    for length in (16, LONGEST if memory >= SHARED_MEMORY else LONGEST // 2):
        q = torch.randn(length, 4, LARGEST_HEAD, dtype=torch.bfloat16, requires_grad=True)
        bounds = torch.tensor([0, length], dtype=torch.int32)
        short_attention.short_attention(q, q[:, :2], q[:, :2], bounds, length, 0.1, -1, False).sum().backward()
    assert compiled == {name for names in launched.values() for name in names}


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("capability", GPUS)
def test_kernels_compile_for_gpus(capability: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run_with_triton(__name__, "compile_all", capability, GPUS[capability], interprets=False)
