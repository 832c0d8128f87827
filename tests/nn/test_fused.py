"""The Triton kernels for norms, gated units and rotary positions, in Triton's interpreter, tested against torch."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bertblocks import BertBlocksForMaskedLM
from bertblocks.nn import mlp, norm, rope
from bertblocks.nn.activation import get_activation
from bertblocks.nn.norm import LayerNorm, RMSNorm, add_norm
from bertblocks.nn.ops import gpu
from bertblocks.nn.ops.gpu import Gpu, own_kernels
from tests.helpers import tiny_config
from tests.nn.triton_process import needs_triton, run_with_triton

#: The interpreter cuts numbers off where it makes them bf16, and a GPU rounds.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HALF = ("bfloat16", "float16")

#: Cases as (tokens, size, norm, its weight, whether it has a bias, dtypes of residual stream, branch and weight).
NORMS: list[tuple[Any, ...]] = [
    (33, 20, "layer", "scale", True, "float32", "float32", "float32"),
    (3, 7, "layer", "scale", False, "float32", "bfloat16", "float32"),
    (2, 16, "layer", "one_plus", False, "bfloat16", "bfloat16", "bfloat16"),
    (1, 9, "rms", "scale", False, "float16", "float16", "float16"),
    (5, 33, "rms", "none", False, "float32", None, "float32"),
]
SLOW_NORMS = [
    (tokens, size, kind, weight, bias, *dtypes)
    for tokens, size in ((1, 5), (2, 4), (31, 7), (32, 64), (33, 65), (65, 127), (64, 128), (3, 1025))
    for kind, weight, bias in (
        *itertools.product(("layer", "rms"), ("scale", "one_plus", "none"), (False,)),
        ("layer", "scale", True),
        ("rms", "scale", True),
    )
    for dtypes in (
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float32", None, "float32"),
        *((dtype, dtype, dtype) for dtype in HALF),
    )
]
#: Cases as (tokens, size, activation, dtype).
GLUS: list[tuple[Any, ...]] = [
    (3, 9, "gelu", "float32"),
    (1, 1025, "silu", "bfloat16"),
    (2, 16, "gelu_new", "float16"),
]
SLOW_GLUS = [
    (tokens, size, activation, dtype)
    for tokens, size in ((1, 1), (2, 2), (3, 1023), (5, 1024), (2, 1025), (33, 40), (0, 8))
    for activation in ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")
    for dtype in ("float32", *HALF)
]
#: Cases as (tokens, heads, head size, rotated units, whether pairs are neighbours, dtype).
ROTATIONS: list[tuple[Any, ...]] = [
    (5, 3, 8, 8, False, "float32"),
    (33, 1, 10, 6, False, "bfloat16"),
    (2, 2, 8, 4, True, "float16"),
]
SLOW_ROTATIONS = [
    (tokens, heads, size, rotated, interleaved, dtype)
    for tokens in (1, 2, 31, 32, 33, 0)
    for heads, size, rotated in ((1, 2, 2), (3, 64, 64), (4, 80, 40), (2, 10, 6))
    for interleaved in (False, True)
    for dtype in ("float32", *HALF)
]
#: Models whose layers join residual streams and norms in different ways.
MODELS: list[dict[str, Any]] = [{"norm_pos": "pre", "norm_fn": "layer", "hidden_act": "gelu"}]
SLOW_MODELS: list[dict[str, Any]] = [
    {"norm_pos": "post", "norm_fn": "layer", "norm_bias": True, "hidden_act": "silu"},
    {"norm_pos": "post", "norm_fn": "deep", "hidden_act": "gelu_new", "rope_interleaved": True},
    {"norm_pos": "pre", "norm_fn": "rms", "norm_scaling": True, "partial_rotary_factor": 0.5},
    {"norm_pos": "pre_and_post", "norm_fn": "rms", "norm_weight": "one_plus"},
    {"norm_pos": "sandwich", "norm_fn": "rms", "norm_bias": True, "residual_scale": 0.5},
    {"norm_pos": "pre", "norm_fn": "layer", "parallel_block": True, "hidden_act": "relu"},
]


def compare(mine: list[Tensor], reference: list[Tensor], dtype: torch.dtype) -> None:
    for found, expected in zip(mine, reference, strict=True):
        tolerance = TOLERANCES[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
        torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=0)


def run_norms(cases: list[Any]) -> None:
    from bertblocks.nn.ops import fused

    for tokens, size, kind, weight, bias, *names in cases:
        torch.manual_seed(0)
        x_dtype, branch_dtype, weight_dtype = (None if name is None else getattr(torch, name) for name in names)
        module: Any = (LayerNorm if kind == "layer" else RMSNorm)(size, 1e-5, bias, weight=weight)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        module.to(weight_dtype)
        x = torch.randn(tokens, size).to(x_dtype).requires_grad_()
        branch = None if branch_dtype is None else torch.randn(tokens, size).to(branch_dtype).requires_grad_()
        inputs = [x, *([] if branch is None else [branch]), *module.parameters()]
        weights = torch.randn(2, tokens, size)
        joined, out = module.add(fused, x, branch)
        assert branch is not None or joined is x
        expected = x if branch is None else x + branch
        assert (joined.dtype, out.dtype) == (expected.dtype, module(expected).dtype)
        gradients = torch.autograd.grad((weights[0] * out + weights[1] * joined).sum(), inputs)
        assert [gradient.dtype for gradient in gradients] == [given.dtype for given in inputs]
        lowest = max((x_dtype, branch_dtype or x_dtype), key=TOLERANCES.__getitem__)
        if lowest is torch.bfloat16:
            compare([joined], [expected], lowest)
        else:
            assert torch.equal(joined, expected)
        # the norm of the same sum in fp32, whose gradient is that of both summands
        module.float()
        precise = joined.detach().float().requires_grad_()
        reference = module(precise)
        loss = (weights[0] * reference + weights[1] * precise).sum()
        of_sum, *of_parameters = torch.autograd.grad(loss, [precise, *module.parameters()])
        summands = [of_sum] if branch is None else [of_sum, of_sum]
        compare([out, *gradients], [reference, *summands, *of_parameters], lowest)


def run_glus(cases: list[Any]) -> None:
    from bertblocks.nn.ops.fused import gated_unit

    for tokens, size, activation, name in cases:
        torch.manual_seed(0)
        dtype = getattr(torch, name)
        up = (2 * torch.randn(tokens, 2 * size)).to(dtype).requires_grad_()
        weights = torch.randn(tokens, size)
        out = gated_unit(up, activation)
        assert (out.dtype, out.shape) == (dtype, weights.shape)
        (gradient,) = torch.autograd.grad((weights * out).sum(), up)
        precise = up.detach().float().requires_grad_()
        expected = get_activation(activation)(precise[:, :size]) * precise[:, size:]
        compare([out, gradient], [expected, *torch.autograd.grad((weights * expected).sum(), precise)], dtype)


def run_rotations(cases: list[Any]) -> None:
    """Against products of complex numbers, for queries that are a part of a wider tensor."""
    from bertblocks.nn.ops.fused import rotate

    for tokens, heads, size, rotated, interleaved, name in cases:
        torch.manual_seed(0)
        dtype, pairs = getattr(torch, name), rotated // 2
        wide = torch.randn(tokens, 3 * heads * size).to(dtype).requires_grad_()
        x = wide.split(heads * size, dim=-1)[1].unflatten(-1, (heads, size))
        angles = torch.randn(tokens, 1, pairs)
        cos = angles.cos().repeat_interleave(2, -1) if interleaved else angles.cos().repeat(1, 1, 2)
        weights = torch.randn(tokens, heads, size)
        out = rotate(x, cos, angles.sin(), interleaved)
        (gradient,) = torch.autograd.grad((weights * out).sum(), wide)
        precise = x.detach().float().requires_grad_()
        turned, rest = precise.split([rotated, size - rotated], dim=-1)
        layout = (pairs, 2) if interleaved else (2, pairs)
        units = turned.unflatten(-1, layout).unbind(-1 if interleaved else -2)
        product = torch.complex(*units) * torch.polar(torch.ones_like(angles), angles)
        parts = torch.stack((product.real, product.imag), -1 if interleaved else -2)
        expected = torch.cat((parts.flatten(-2), rest), dim=-1)
        (reference,) = torch.autograd.grad((weights * expected).sum(), precise)
        of_x = gradient.split(heads * size, dim=-1)[1].unflatten(-1, (heads, size))
        assert out.dtype == dtype
        compare([out, of_x], [expected, reference], dtype)


def run_models(cases: list[Any]) -> None:
    """A training step of whole models, with every kernel that `own_kernels` would choose on a GPU."""
    from bertblocks.nn.ops import fused

    used: list[str] = []

    def record(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            used.append(name)
            return getattr(fused, name)(*arguments, **options)

        return call

    recorded = SimpleNamespace(GLU_ACTIVATIONS=fused.GLU_ACTIVATIONS)
    for name in ("add_norm", "gated_unit", "rotate"):
        setattr(recorded, name, record(name))
    for file in (norm, mlp, rope):
        file.own_kernels = lambda kernel_backend, x: recorded if kernel_backend == "auto" else None  # type: ignore[attr-defined]
    for options in cases:
        results = []
        for backend in ("torch", "auto"):
            used.clear()
            torch.manual_seed(0)
            config = tiny_config(mlp_type="glu", block_pos_enc_kind="rope", kernel_backend=backend, **options)
            config.attention_backend = "sdpa"  # the C kernel would rotate by itself
            model = BertBlocksForMaskedLM(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 0.1, 0.3)
            ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
            loss = model.train()(ids, attention_mask=ids != 0, labels=ids).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        compare(results[1], results[0], torch.float32)
        layers = config.num_hidden_layers
        assert used.count("rotate") == 2 * layers
        assert used.count("gated_unit") == (0 if options.get("hidden_act") == "relu" else layers)
        fewest = 0 if options.get("parallel_block") else layers
        assert used.count("add_norm") >= fewest * (2 if options["norm_pos"] == "post" else 1)


RUNS = {"norms": (NORMS, SLOW_NORMS), "glus": (GLUS, SLOW_GLUS), "rotations": (ROTATIONS, SLOW_ROTATIONS)}


def run_all(name: str, cases: list[Any]) -> None:
    {"norms": run_norms, "glus": run_glus, "rotations": run_rotations, "models": run_models}[name](cases)


def run_fast() -> None:
    for name, (cases, _) in RUNS.items():
        run_all(name, cases)
    run_models(MODELS)


@needs_triton
def test_kernels_and_a_model_equal_torch_with_gradients() -> None:
    run_with_triton(__name__, "run_fast")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", RUNS)
def test_kernels_equal_torch_at_every_edge(name: str) -> None:
    run_with_triton(__name__, "run_all", name, RUNS[name][1])


@pytest.mark.slow
@needs_triton
def test_models_equal_torch_with_every_kind_of_residual() -> None:
    run_with_triton(__name__, "run_models", SLOW_MODELS)


@pytest.mark.parametrize(
    ("x", "kernel_backend", "device", "runs"),
    [
        ({}, "auto", Gpu((8, 0)), True),
        ({}, "liger", Gpu((9, 0)), True),
        ({}, "torch", Gpu((8, 0)), False),
        ({"is_cuda": False}, "auto", None, False),
        ({"dtype": torch.float64}, "auto", Gpu((8, 0)), False),
        ({}, "auto", Gpu((7, 0)), False),
        ({}, "auto", Gpu((9, 0), is_rocm=True), True),
        ({}, "auto", Gpu((8, 0), has_triton=False), False),
    ],
)
def test_kernels_are_chosen_by_capability(
    x: Any, kernel_backend: str, device: Any, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "bertblocks.nn.ops.fused", fused)
    monkeypatch.setattr(gpu, "describe_gpu", lambda _: device)
    given: Any = SimpleNamespace(**{"is_cuda": True, "dtype": torch.bfloat16, "device": torch.device("cuda"), **x})
    assert (own_kernels(kernel_backend, given) is fused) == runs
    monkeypatch.setattr("bertblocks.nn.layout.is_capturing", lambda: True)
    assert own_kernels(kernel_backend, given) is None


def test_a_norm_with_a_hook_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "own_kernels", lambda *_: SimpleNamespace(add_norm=lambda *_, **__: ("sum", "norm")))
    x, module, seen = torch.randn(2, 4), LayerNorm(4, 1e-5, True, "auto"), []
    assert add_norm(x, x, module) == ("sum", "norm")
    module.register_forward_hook(lambda *arguments: seen.append(arguments))
    joined, normed = add_norm(x, x, module)
    torch.testing.assert_close(normed, torch.nn.functional.layer_norm(2 * x, (4,)))
    assert torch.equal(joined, 2 * x)
    assert len(seen) == 1
