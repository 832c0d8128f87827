"""Residual sums with norms, gated units and rotary positions in Triton, each in one pass over memory.

No two programs add to the same number, so gradients are deterministic. Sums and products are rounded where torch rounds
them. The numbers are checked in Triton's interpreter; the kernels have not run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Rows whose share of the gradient of a norm's weight one program sums.
NORM_ROWS = 32
#: Units of a gated unit, and heads of tokens to rotate, in one program.
GLU_BLOCK, ROTARY_ROWS = 1024, 32
#: The activations that the gated unit knows, by the names in a config.
GLU_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# ---------------------------------------------------------------------- residual and norm


@triton.jit
def _norm_forward(  # type: ignore[no-untyped-def]
    x_start, branch_start, weight_start, bias_start, joined_start, out_start, mean_start, rstd_start, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    """One row: the sum with a branch, if there is one, and its norm, which is centred if there is room for a mean."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    offsets, inside = row * SIZE + columns, columns < SIZE
    x = tl.load(x_start + offsets, mask=inside, other=0.0).to(tl.float32)
    if branch_start is not None:
        x += tl.load(branch_start + offsets, mask=inside, other=0.0).to(tl.float32)
        x = x.to(joined_start.dtype.element_ty).to(tl.float32)
        tl.store(joined_start + offsets, x, mask=inside)
    if mean_start is not None:
        mean = tl.sum(x, axis=0) / SIZE
        tl.store(mean_start + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(rstd_start + row, rstd)
    normed = x * rstd
    if ROUNDS_FIRST:
        normed = normed.to(joined_start.dtype.element_ty).to(tl.float32)
    if weight_start is not None:
        normed *= tl.load(weight_start + columns, mask=inside, other=0.0).to(tl.float32)
    if bias_start is not None:
        normed += tl.load(bias_start + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_start + offsets, normed, mask=inside)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    of_out_start, of_joined_start, joined_start, weight_start, mean_start, rstd_start,
    dx_start, dweight_start, dbias_start, rows,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows: their gradients, and what they add to those of the weight and the bias."""
    program, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    exists = columns < SIZE
    dweight = tl.zeros((WIDTH,), dtype=tl.float32)
    dbias = tl.zeros((WIDTH,), dtype=tl.float32)
    for step in range(ROWS):
        row = program * ROWS + step
        offsets, inside = row * SIZE + columns, columns < tl.where(row < rows, SIZE, 0)
        row = tl.minimum(row, rows - 1)
        of_out = tl.load(of_out_start + offsets, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(joined_start + offsets, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_start + row)
        if mean_start is not None:
            normed = tl.where(inside, normed - tl.load(mean_start + row), 0.0)
        normed *= rstd
        dweight += of_out * normed
        dbias += of_out
        if weight_start is not None:
            of_out *= tl.load(weight_start + columns, mask=exists, other=0.0).to(tl.float32)
        dx = of_out - normed * (tl.sum(of_out * normed, axis=0) / SIZE)
        if mean_start is not None:
            dx -= tl.sum(of_out, axis=0) / SIZE
        dx *= rstd
        if of_joined_start is not None:
            dx += tl.load(of_joined_start + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_start + offsets, dx, mask=inside)
    if dweight_start is not None:
        tl.store(dweight_start + program * SIZE + columns, dweight, mask=exists)
    if dbias_start is not None:
        tl.store(dbias_start + program * SIZE + columns, dbias, mask=exists)


class AddNorm(torch.autograd.Function):
    """The sum of the residual stream and a branch, and its norm; without a branch the norm alone."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Any, branch: Any, weight: Any, bias: Any, eps: float, is_centred: bool, dtype: Any, rounds: bool
    ) -> Any:
        ctx.dtypes = [None if given is None else given.dtype for given in (x, branch, weight, bias)]
        x, rows = x.contiguous(), x.numel() // x.shape[-1]
        joined = x
        if branch is not None:
            branch = branch.contiguous()
            joined = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
        if rounds and weight is not None:
            dtype = torch.promote_types(joined.dtype, weight.dtype)
        out = torch.empty_like(x, dtype=dtype or joined.dtype)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if is_centred else None
        width = triton.next_power_of_2(x.shape[-1])
        ctx.options = {"SIZE": x.shape[-1], "WIDTH": width, "num_warps": min(max(width // 256, 1), 16)}
        with torch.cuda.device_of(x):
            _norm_forward[rows,](
                x, branch, weight, bias, joined, out, mean, rstd, eps, ROUNDS_FIRST=rounds, **ctx.options
            )
        ctx.save_for_backward(joined, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return out if branch is None else (joined, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        joined, weight, mean, rstd = ctx.saved_tensors
        of_joined, of_out = gradients if len(gradients) == 2 else (None, *gradients)
        of_joined = None if of_joined is None else of_joined.contiguous()
        of_out = torch.zeros_like(joined) if of_out is None else of_out.contiguous()
        programs = triton.cdiv(len(rstd), NORM_ROWS)
        dx = torch.empty_like(joined)
        # one row of partial sums per program, for the weight and the bias
        sums = [
            None if dtype is None else torch.empty(programs, joined.shape[-1], dtype=torch.float32, device=dx.device)
            for dtype in ctx.dtypes[2:]
        ]
        with torch.cuda.device_of(dx):
            _norm_backward[programs,](
                of_out, of_joined, joined, weight, mean, rstd, dx, *sums, len(rstd), ROWS=NORM_ROWS, **ctx.options
            )
        found: list[Any] = [dx, dx, *(None if partial is None else partial.sum(dim=0) for partial in sums)]
        results = (None if dtype is None else x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True))
        return *results, None, None, None, None


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_centred: bool,
    dtype: torch.dtype | None = None,
    rounds_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm in `dtype`, by default that of the sum.

    `is_centred` is LayerNorm, otherwise RMSNorm. With `rounds_first` the norm is rounded before the weight multiplies
    it, in the wider dtype of the two.
    """
    options = (weight, bias, eps, is_centred, dtype, rounds_first)
    return (x, AddNorm.apply(x, None, *options)) if branch is None else AddNorm.apply(x, branch, *options)


# ---------------------------------------------------------------------- gated units


@triton.jit
def _activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of x and its slope."""
    if KIND == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        inner, inner_slope = x, x * 0.0 + 1.0
        if KIND == "gelu_tanh":  # (1 + tanh z) / 2 is sigmoid(2 z)
            inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
            inner_slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        share = tl.sigmoid(inner)
        slope = share + x * share * (1.0 - share) * inner_slope
    return x * share, slope


@triton.jit
def _glu_forward(up_start, out_start, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets, inside = row * 2 * SIZE + columns, columns < SIZE
    gate = tl.load(up_start + offsets, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up_start + offsets + SIZE, mask=inside, other=0.0).to(tl.float32)
    activated, _slope = _activate(gate, KIND)
    activated = activated.to(out_start.dtype.element_ty).to(tl.float32)
    tl.store(out_start + row * SIZE + columns, activated * value, mask=inside)


@triton.jit
def _glu_backward(of_out_start, up_start, dup_start, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets, inside = row * 2 * SIZE + columns, columns < SIZE
    gate = tl.load(up_start + offsets, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up_start + offsets + SIZE, mask=inside, other=0.0).to(tl.float32)
    of_out = tl.load(of_out_start + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _activate(gate, KIND)
    tl.store(dup_start + offsets, of_out * value * slope, mask=inside)
    tl.store(dup_start + offsets + SIZE, of_out * activated, mask=inside)


class GatedUnit(torch.autograd.Function):
    """The activation of the first half of the units times the second half; keeps nothing but its input."""

    @staticmethod
    def forward(ctx: Any, up: Any, kind: str) -> Any:  # type: ignore[override]
        up, size = up.contiguous(), up.shape[-1] // 2
        ctx.options = {"SIZE": size, "BLOCK": min(GLU_BLOCK, triton.next_power_of_2(size)), "KIND": kind}
        ctx.grid = (up.numel() // (2 * size), triton.cdiv(size, ctx.options["BLOCK"]))
        ctx.save_for_backward(up)
        out = up.new_empty(*up.shape[:-1], size)
        with torch.cuda.device_of(up):
            _glu_forward[ctx.grid](up, out, **ctx.options)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        (up,) = ctx.saved_tensors
        dup = torch.empty_like(up)
        with torch.cuda.device_of(up):
            _glu_backward[ctx.grid](gradient.contiguous(), up, dup, **ctx.options)
        return dup, None


def gated_unit(up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * value of `[..., 2 * size]`, for a name in GLU_ACTIVATIONS."""
    return GatedUnit.apply(up, GLU_ACTIVATIONS[activation])


# ---------------------------------------------------------------------- rotary positions


@triton.jit
def _rotary(  # type: ignore[no-untyped-def]
    x_start, cos_start, sin_start, out_start, rows, token_stride, head_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Turn the pairs of some heads of tokens, or turn them back."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (pair < PAIRS)
    token, head = row // HEADS, row % HEADS
    first, second = pair, pair + PAIRS
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    cos = tl.load(cos_start + token * (2 * PAIRS) + first, mask=inside, other=0.0)
    sin = tl.load(sin_start + token * PAIRS + pair, mask=inside, other=0.0)
    if BACK:
        sin = -sin
    start = x_start + token * token_stride + head * head_stride
    a = tl.load(start + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(start + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_start + row * SIZE + first, a * cos - b * sin, mask=inside)
    tl.store(out_start + row * SIZE + second, b * cos + a * sin, mask=inside)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    tokens, heads, size = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    rotated, pairs = torch.empty(x.shape, dtype=x.dtype, device=x.device), sin.shape[-1]
    rotated[..., 2 * pairs :] = x[..., 2 * pairs :]
    options = {"HEADS": heads, "SIZE": size, "PAIRS": pairs, "INTERLEAVED": interleaved, "BACK": back}
    options |= {"ROWS": ROTARY_ROWS, "WIDTH": triton.next_power_of_2(pairs)}
    rows = tokens * heads
    with torch.cuda.device_of(x):
        _rotary[triton.cdiv(rows, ROTARY_ROWS),](x, cos, sin, rotated, rows, x.stride(0), x.stride(1), **options)
    return rotated


class Rotary(torch.autograd.Function):
    """Rotates the first `2 * pairs` units of every head; the backward pass rotates the other way."""

    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, ctx.interleaved, back=True), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate `[tokens, heads, d]` in fp32 by tables `[tokens, 1, 2 * pairs]` and `[tokens, 1, pairs]`."""
    return Rotary.apply(x, cos, sin, interleaved)
