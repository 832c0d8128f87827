"""Feed-forward networks of which every token uses a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.core.keys import Key, Problem
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.layout import is_capturing
from bertblocks.nn.linear import Linear, is_untouched
from bertblocks.nn.mlp import GLU, MLP, mlp_options, register_mlp
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.gpu import Gpu, describe_gpu
from bertblocks.nn.ops.grouped import grouped_linear, runs_grouped

if TYPE_CHECKING:
    from typing_extensions import Self

    from bertblocks.config import BertBlocksConfig

EXPERTS: dict[str, type[MLP]] = {"mlp": MLP, "glu": GLU}


class Routing(NamedTuple):
    """What the router of one layer did in one forward pass. Only `loss` has gradients."""

    #: The weighted sum of both losses.
    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    #: The share of assignments that each expert got; they sum up to 1.
    load: Tensor  # [experts]
    #: The mean entropy of a token's distribution over the experts, in nats.
    entropy: Tensor


@register_mlp("moe")
class MixtureOfExperts(nn.Module):
    """A mixture of experts (Shazeer et al., 2017): the weighted sum of the few networks that a router chooses for each
    token. Every expert computes exactly the tokens that chose it, so there is no padding, and no token is dropped.
    """

    evidence = (
        "Shipped in an encoder, Nomic Embed v2, whose paper reports better retrieval than models of its size (arXiv "
        "2502.07972); BertBlocks has not compared it."
    )
    keys: ClassVar[dict[str, Key]] = {
        "num_experts": Key(int, 8, "Number of networks of width intermediate_size.", 2, 2**12, per_layer=True),
        "experts_per_token": Key(int, 2, "Number of networks that each token uses.", 1, 2**12, per_layer=True),
        "expert_type": Key(str, "mlp", "The kind of each network.", choices=tuple(EXPERTS), per_layer=True),
        "shared_expert": Key(
            bool, False, "Whether one more network computes all tokens, with weight 1 (DeepSeekMoE).", per_layer=True
        ),
        "normalize_expert_weights": Key(
            bool,
            None,
            "Whether the weights of a token's experts sum up to 1, instead of to their part of the softmax over all. "
            "Implied: true if experts_per_token is greater than 1.",
            per_layer=True,
            implied=lambda config: config.experts_per_token > 1,
        ),
        "router_balance_weight": Key(
            float,
            0.01,
            "Weight of the load-balancing loss (Fedus et al., 2021), E * sum(share of assignments * mean probability), "
            "which models with a head add to their loss in training.",
            0,
            1e6,
            runtime=True,
        ),
        "router_z_weight": Key(
            float,
            0.001,
            "Weight of the z-loss on the logits of the router (Zoph et al., 2022), mean(logsumexp^2).",
            0,
            1e6,
            runtime=True,
        ),
    }

    def __init__(
        self,
        experts: list[MLP],
        shared: MLP | None,
        experts_per_token: int,
        normalizes: bool,
        out_dropout: float,
        balance_weight: float,
        z_weight: float,
    ) -> None:
        super().__init__()
        self.router = Linear(experts[0].up.in_features, len(experts), bias=False, role="router")
        self.experts = nn.ModuleList(experts)
        self.shared = shared
        self.experts_per_token, self.normalizes = experts_per_token, normalizes
        self.balance_weight, self.z_weight = balance_weight, z_weight
        self.out_dropout = Dropout(out_dropout)

    @classmethod
    def check(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        few, many = config.experts_per_token, config.num_experts
        yield "experts_per_token", few > many, f"it must be at most num_experts = {many}"
        why = "it must be false with experts_per_token 1: the weight would be 1, and the router would learn nothing"
        yield "normalize_expert_weights", few == 1 and config.normalize_expert_weights, why

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> Self:
        options = {**mlp_options(config), "out_dropout": 0.0}
        expert = EXPERTS[config.expert_type]
        return cls(
            [expert(**options) for _ in range(config.num_experts)],
            expert(**options) if config.shared_expert else None,
            config.experts_per_token,
            config.normalize_expert_weights,
            config.mlp_output_dropout,
            config.router_balance_weight,
            config.router_z_weight,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of every token and the logits of the router, `[tokens, experts]`."""
        logits = self.router(x)
        weights, chosen = upcast(logits).softmax(dim=-1).topk(self.experts_per_token)  # [tokens, experts_per_token]
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        mix = self._mix_all if is_capturing() else self._mix
        mixed = mix(x, weights.to(x.dtype), chosen)
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        return self.out_dropout(mixed), logits

    def _mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sort the assignments by expert, so that each expert computes consecutive tokens in one product."""
        order = chosen.flatten().argsort(stable=True)  # [assignments]
        sorted_x = x.index_select(0, order // self.experts_per_token)
        if self.is_grouped(x, describe_gpu(x.device)):
            computed = self._run_grouped(sorted_x, chosen.flatten()[order])
        else:
            # experts without tokens run too: all processes of a sharded model must gather the same weights
            parts = zip(self.experts, sorted_x.split(self._count(chosen)), strict=True)
            computed = torch.cat([expert(part) for expert, part in parts])
        unsorted = torch.empty_like(computed).index_copy(0, order, computed)
        return (unsorted.unflatten(0, chosen.shape) * weights[..., None]).sum(dim=1)

    def is_grouped(self, x: Tensor, gpu: Gpu | None) -> bool:
        """True where one product can compute all experts. It reads their weights, which FSDP shards, without calls."""
        first: Any = self.experts[0]
        if not runs_grouped(x, [*first.up.weight.shape, *first.down.weight.shape], gpu):
            return False
        experts: list[Any] = list(self.experts)
        are_plain = all(any(is_untouched(expert, kind) for kind in EXPERTS.values()) for expert in experts)
        return are_plain and all(is_untouched(layer) for expert in experts for layer in (expert.up, expert.down))

    def _run_grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """Compute each row by its expert, `experts`, which are in order; nothing is read from the device."""
        modules: list[Any] = list(self.experts)
        hidden = modules[0].hidden(grouped_linear(x, experts, [expert.up for expert in modules]))
        return grouped_linear(modules[0].dropout(hidden), experts, [expert.down for expert in modules])

    def _count(self, chosen: Tensor) -> list[int]:
        """Return the number of assignments of each expert, which is read from the device."""
        if chosen.is_meta:  # without values, assume equal shares
            share, rest = divmod(chosen.numel(), len(self.experts))
            return [share + (index < rest) for index in range(len(self.experts))]
        return chosen.flatten().bincount(minlength=len(self.experts)).tolist()

    def _mix_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute all experts for all tokens, because the shapes in a captured graph must not depend on data."""
        shares = weights.new_zeros(x.shape[0], len(self.experts)).scatter(1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)  # [tokens, experts, hidden]
        return (outputs * shares[..., None]).sum(dim=1)

    def assess(self, logits: Tensor) -> Routing:
        """Compute the losses and the statistics of a forward pass from the logits of real tokens."""
        logits = upcast(logits)
        num_tokens, num_experts = max(len(logits), 1), len(self.experts)
        probabilities = logits.softmax(dim=-1)
        chosen = probabilities.topk(self.experts_per_token).indices
        load = F.one_hot(chosen, num_experts).sum(dim=(0, 1)).to(logits.dtype) / (num_tokens * self.experts_per_token)
        balance_loss = num_experts * (load * probabilities.sum(dim=0) / num_tokens).sum()
        z_loss = logits.logsumexp(dim=-1).square().sum() / num_tokens
        loss = self.balance_weight * balance_loss + self.z_weight * z_loss
        entropy = torch.special.entr(probabilities.detach()).sum() / num_tokens
        return Routing(loss, balance_loss.detach(), z_loss.detach(), load.detach(), entropy)

    def num_idle_parameters(self) -> int:
        """Return the number of parameters that a token does not use."""
        size = sum(parameter.numel() for parameter in self.experts[0].parameters())
        return size * (len(self.experts) - self.experts_per_token)

    def flops(self, num_tokens: int) -> int:
        """Count the router and the experts of each token."""
        used = [self.router, *self.experts[: self.experts_per_token], *([] if self.shared is None else [self.shared])]
        linears = [module for part in used for module in part.modules() if isinstance(module, nn.Linear)]
        return sum(2 * num_tokens * linear.in_features * linear.out_features for linear in linears)

    def extra_repr(self) -> str:
        return f"experts_per_token={self.experts_per_token}"
