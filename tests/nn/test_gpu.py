"""Kernels, waits and graphs on a real GPU; `make gpu-check` runs them and prints a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertblocks import BertBlocksForMaskedLM
from bertblocks.nn.backends import AttentionContext, AttentionPattern, EagerBackend, FlashBackend, SdpaBackend
from bertblocks.nn.backends.kernels import AttentionCall, choose_kernel
from bertblocks.nn.backends.short import TritonBackend
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.ops.gpu import describe_gpu
from bertblocks.nn.position import ALiBi, BlockPosition, T5Position
from bertblocks.training.compilation import compile_model, make_deterministic
from bertblocks.training.distributed import World
from bertblocks.training.prefetch import prefetch
from bertblocks.training.step_results import StepResults
from tests.helpers import EDGE_LENGTHS, tiny_config
from tests.training.helpers import make_model, make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda")
LENGTHS = [*EDGE_LENGTHS, 128, 77]
#: What each kernel should run: the backend, the position and the rest of the pattern.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "varlen": ("varlen", BlockPosition, {}),
    "varlen, local": ("varlen", BlockPosition, {"half_window": 4}),
    "varlen, causal": ("varlen", BlockPosition, {"is_causal": True}),
    "flash-attn, alibi": ("flash_attn", lambda: ALiBi(4), {}),
    "flex, t5": ("flex", lambda: T5Position(4, 8, 20), {}),
    "flex, learned alibi, local": ("flex", lambda: ALiBi(4, True), {"half_window": 4}),
    "flex, global tokens": ("flex", BlockPosition, {"half_window": 4, "num_global_tokens": 2}),
    "triton": ("triton", BlockPosition, {}),
    "triton, local and causal": ("triton", BlockPosition, {"half_window": 4, "is_causal": True}),
    "sdpa, padded": ("sdpa", BlockPosition, {}),
    "sdpa, padded and local": ("sdpa", BlockPosition, {"half_window": 4}),
}


def make_layout(lengths: list[int]) -> SequenceLayout:
    return SequenceLayout.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), (sum(lengths),), CUDA)


def make_inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, heads, 64, device=CUDA, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_eager_attention_with_gradients(case: str) -> None:
    kernel, make_position, options = CASES[case]
    layout, (q, k, v), gpu = make_layout(LENGTHS), make_inputs(sum(LENGTHS)), describe_gpu(CUDA)
    position = make_position().to(CUDA)
    context = AttentionContext(layout, AttentionPattern(position=position, **options), 0.125)
    if kernel in ("varlen", "flash_attn", "flex"):
        if choose_kernel(AttentionCall.read(q, context), gpu) != kernel:
            pytest.skip(f"this GPU and its packages run the layer without {kernel}")
        backend: Any = FlashBackend(gpu=gpu)
    else:
        backend = TritonBackend() if kernel == "triton" else SdpaBackend()
    weight = torch.randn(q.shape, device=CUDA, dtype=q.dtype)
    out = backend.attend(q, k, v, context)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    precise = [x.detach().float().requires_grad_() for x in (q, k, v)]
    reference = EagerBackend().attend(precise[0], precise[1], precise[2], context)
    expected = torch.autograd.grad((reference * weight.float()).sum(), precise)
    for mine, theirs in zip((out, *gradients), (reference, *expected), strict=True):
        torch.testing.assert_close(mine.float(), theirs, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"norm_pos": "pre", "norm_fn": "layer", "hidden_act": "gelu"},
        {"norm_pos": "post", "norm_fn": "rms", "hidden_act": "silu", "rope_interleaved": True},
    ],
    ids=["pre", "post"],
)
def test_own_kernels_equal_torch_in_a_training_step(options: Any, precision: torch.dtype) -> None:
    results = []
    for backend in ("torch", "auto"):
        torch.manual_seed(0)
        config = tiny_config(hidden_size=64, mlp_type="glu", kernel_backend=backend, **options)
        model = BertBlocksForMaskedLM(config).to(CUDA).train()
        ids = torch.randint(5, 60, (sum(LENGTHS),)).to(CUDA)
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            loss = model(ids, cu_seqlens=bounds, labels=ids, return_logits=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for mine, expected in zip(results[1], results[0], strict=True):
        tolerance = (1e-4 if precision == torch.float32 else 0.05) * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(mine, expected, atol=tolerance, rtol=0)


def needs_varlen() -> None:
    if choose_kernel(AttentionCall(AttentionPattern(), torch.bfloat16, 64), describe_gpu(CUDA)) != "varlen":
        pytest.skip("this GPU does not run torch's varlen_attn")


def test_a_result_does_not_depend_on_the_batch() -> None:
    needs_varlen()
    q, k, v = make_inputs(300)
    alone = FlashBackend().attend(
        q[:200], k[:200], v[:200], AttentionContext(make_layout([200]), AttentionPattern(), 0.1)
    )
    together = FlashBackend().attend(q, k, v, AttentionContext(make_layout([200, 100]), AttentionPattern(), 0.1))
    assert torch.equal(alone, together[:200])


@pytest.fixture
def deterministic() -> Any:
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)


def test_gradients_are_the_same_bits_in_every_run(deterministic: None) -> None:
    needs_varlen()
    q, k, v = make_inputs(4096)
    context = AttentionContext(make_layout([2048, 1000, 1048]), AttentionPattern(), 0.1)
    runs = [torch.autograd.grad(FlashBackend().attend(q, k, v, context).sum(), (q, k, v)) for _ in range(5)]
    assert all(torch.equal(mine, first) for run in runs[1:] for mine, first in zip(run, runs[0], strict=True))


def test_a_training_step_never_waits_for_the_gpu(tmp_path: Path, deterministic: None) -> None:
    model = make_model(num_attention_heads=2, hidden_size=64)
    world = World(0, 1, CUDA)
    trainer = make_trainer(tmp_path, "run.precision=bf16", model=model, world=world)
    trainer.scaler = torch.amp.GradScaler("cuda", enabled=False)
    trainer.results = StepResults(is_late=True)
    with prefetch(trainer.task, world, 0, trainer.task.initial_position()) as batches:
        for number in range(4):
            prepared = next(batches)
            torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")  # after the first steps have set up
            try:
                result = trainer._step(prepared)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert result.norm > 0
    assert len(list(trainer.results.read())) == 4


def test_compiled_layers_equal_plain_ones_and_are_compiled_once() -> None:
    needs_varlen()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = BertBlocksForMaskedLM(tiny_config(hidden_size=64, num_attention_heads=2)).to(CUDA).train()

    def losses() -> list[float]:
        found = []
        for lengths in ([9, 30], [5] * 7, [50, 1, 9], [64]):
            torch.manual_seed(1)
            ids = torch.randint(5, 60, (sum(lengths),)).to(CUDA)
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids, cu_seqlens=bounds, labels=ids, return_logits=False).loss
            loss.backward()
            found.append(loss.item())
        return found

    plain = losses()
    compile_model(model, "bf16")
    assert losses() == pytest.approx(plain, rel=0.02)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert losses() == pytest.approx(plain, rel=0.02)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count
