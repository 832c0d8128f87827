"""Feed-forward networks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.activation import activate, get_activation
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.linear import GroupedLinear, Linear, is_untouched
from bertblocks.nn.ops.gpu import own_kernels
from bertblocks.nn.ops.liger import liger
from bertblocks.nn.ops.linear import POST_OPERATIONS, activated_linear, multiplied_linear, runs_on_onednn

if TYPE_CHECKING:
    from typing_extensions import Self

    from bertblocks.config import BertBlocksConfig

MLPS: Registry[type[nn.Module]] = Registry("mlp_type")
register_mlp = MLPS.register
#: A fused gated unit takes two products instead of one, which pays off from this many tokens on.
FUSED_GLU_TOKENS = 1024


@register_mlp("mlp")
class MLP(nn.Module):
    """down(hidden(up(x))), with dropout before and after the down projection.

    A subclass overrides `hidden` and, if its up projection is wider, `num_up`.
    """

    #: The up projection is this many times `intermediate_size` wide.
    num_up = 1

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        in_bias: bool,
        out_bias: bool,
        dropout: float,
        out_dropout: float,
        kernel_backend: str = "torch",
    ) -> None:
        super().__init__()
        parts = [intermediate_size] * self.num_up
        self.up = Linear(hidden_size, sum(parts), in_bias, role="up", parts=parts)
        self.down = Linear(intermediate_size, hidden_size, out_bias, role="out")
        self.activation = get_activation(activation)
        self.activation_name = activation
        self.dropout = Dropout(dropout)
        self.out_dropout = Dropout(out_dropout)
        self.is_silu = activation in ("silu", "swish")
        self.kernel_backend = kernel_backend

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> Self:
        return cls(**mlp_options(config))

    def hidden(self, up: Tensor) -> Tensor:
        """Turn the up projection `[tokens, num_up * intermediate_size]` into `[tokens, intermediate_size]`."""
        return activate(up, self.activation, gated=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fused_hidden(x) if self.fuses(x) else self.hidden(self.up(x))
        return self.out_dropout(self.down(self.dropout(hidden)))

    def fuses(self, x: Tensor) -> bool:
        """True if `fused_hidden` can replace the up projection and `hidden`.

        Not in training: reentrant checkpointing runs without gradients first, and must find the same numbers again.
        """
        if (
            torch.is_grad_enabled()
            or self.training
            or self.activation_name not in POST_OPERATIONS
            or not is_untouched(self.up)
        ):
            return False
        is_overridden = type(self).hidden not in (MLP.hidden, GLU.hidden)
        return not is_overridden and runs_on_onednn(x, self.up.weight)

    def fused_hidden(self, x: Tensor) -> Tensor:
        """Compute hidden(up(x)) in fewer passes over memory."""
        return activated_linear(x, self.up.weight, self.up.bias, self.activation_name)


@register_mlp("glu")
class GLU(MLP):
    """Gated linear unit (Shazeer, 2020): the activation is on the first half of the up projection."""

    num_up = 2

    def hidden(self, up: Tensor) -> Tensor:
        if self.is_silu and (kernels := liger(self.kernel_backend, up)) is not None:
            return kernels.swiglu(*up.chunk(2, dim=-1))
        own = own_kernels(self.kernel_backend, up)
        if own is not None and self.activation_name in own.GLU_ACTIVATIONS:
            return own.gated_unit(up, self.activation_name)
        return activate(up, self.activation, gated=True)

    def fuses(self, x: Tensor) -> bool:
        return super().fuses(x) and len(x) >= FUSED_GLU_TOKENS

    def fused_hidden(self, x: Tensor) -> Tensor:
        gate_weight, value_weight = self.up.weight.chunk(2)
        gate_bias, value_bias = (None, None) if self.up.bias is None else self.up.bias.chunk(2)
        gate = activated_linear(x, gate_weight, gate_bias, self.activation_name)
        return multiplied_linear(x, value_weight, value_bias, gate)


@register_mlp("grouped")
class GroupedMLP(MLP):
    """An mlp with block-diagonal projections, which have as many times fewer weights as groups, as in ConvBERT
    medium-small (Jiang et al., 2020).
    """

    evidence = "Its paper (arXiv 2008.02496) uses it to save parameters; BertBlocks has not compared it."
    keys: ClassVar[dict[str, Key]] = {
        "mlp_groups": Key(int, 2, "Number of groups into which inputs and outputs are cut.", 2, 2**12, per_layer=True)
    }

    def __init__(self, groups: int, **options: Any) -> None:
        super().__init__(**options)
        size, inner = options["hidden_size"], options["intermediate_size"]
        self.up = GroupedLinear(size, inner, options["in_bias"], "up", groups)
        self.down = GroupedLinear(inner, size, options["out_bias"], "out", groups)

    @classmethod
    def check(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(config, name)
            yield "mlp_groups", size % config.mlp_groups != 0, f"it must divide {name} = {size}"

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> Self:
        return cls(config.mlp_groups, **mlp_options(config))


class NGPTMLP(GLU):
    """The GLU of nGPT, whose up projection has a learned scale (Loshchilov et al., 2024).

    The activation is on the first half, as in every GLU here; NeoBERT's files store the halves in the other order.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.suv = nn.Parameter(torch.ones(2 * intermediate_size))
        self.gain = math.sqrt(hidden_size)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        init.ones_(self.suv)

    def hidden(self, up: Tensor) -> Tensor:
        return super().hidden(up * (self.gain * self.suv))


def get_mlp(config: BertBlocksConfig) -> nn.Module:
    """Build the feed-forward network that a config names, or nGPT's own."""
    mlp_class = NGPTMLP if config.ngpt else MLPS[config.mlp_type]
    if hasattr(mlp_class, "from_config"):
        return mlp_class.from_config(config)
    return mlp_class(**mlp_options(config))


def mlp_options(config: BertBlocksConfig) -> dict[str, Any]:
    """Return what every feed-forward network is built from."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "activation": config.hidden_act,
        "in_bias": config.mlp_in_bias,
        "out_bias": config.mlp_out_bias,
        "dropout": config.mlp_dropout,
        "out_dropout": config.mlp_output_dropout,
        "kernel_backend": config.kernel_backend,
    }
