"""Linear layers that know their role in the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bertblocks.nn.ops.linear import linear


class Linear(nn.Linear):
    """A linear layer whose role decides its initialization and the dimension along which nGPT normalizes it.

    Roles are "embedding" (starts the residual stream), "qkv", "gate", "up", "out" (adds to the residual stream),
    "router", "head" and "classifier". `parts` lists the output sizes of the matrices stacked in it, such as queries,
    keys and values.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, role: str, parts: Sequence[int] | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.role = role
        self.parts = list(parts or [out_features])
        #: The index of the encoder layer that it belongs to.
        self.layer: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class GroupedLinear(Linear):
    """A block-diagonal linear layer: each group of outputs reads its own group of inputs. The weight has the columns of
    one group, `[out, in / groups]`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, role: str, groups: int) -> None:
        super().__init__(in_features // groups, out_features, bias, role, parts=[out_features // groups] * groups)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, (len(self.parts), -1))  # [groups, out / groups, in / groups]
        y = torch.einsum("...gi,goi->...go", x.unflatten(-1, (len(self.parts), -1)), weight).flatten(-2)
        return y if self.bias is None else y + self.bias


def is_untouched(module: nn.Module, kind: type[nn.Module] = Linear) -> bool:
    """True for a layer without hooks, wrappers or subclassing, whose weights can be used without calling it."""
    touched = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not touched
