"""Optimizers. They update lists of tensors at once, and work on the local shards of a sharded model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.linear import Linear
from bertblocks.nn.parametrization import fan_in_ratio, width_ratio
from bertblocks.training.distributed import from_local_like, shard_like, to_full, to_local

#: The linear layers that Muon optimizes: the matrices inside the encoder layers.
MUON_ROLES = {"qkv", "up", "out"}
#: Coefficients a, b, c of the steps x -> a x + b x^3 + c x^5, which bring singular values near 1. They are the same in
#: every step (Jordan et al., 2024), or each the best for what the earlier steps leave of singular values above 1e-3
#: (Polar Express; Amsel et al., 2025).
ITERATIONS = {
    "newton_schulz": [(3.4445, -4.7750, 2.0315)] * 5,
    "polar_express": [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ],
}
#: What Adam remembers of each number.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Adam's epsilon unless a recipe sets it.
ADAM_EPS = 1e-8
#: The typical root mean square of an AdamW update (Liu et al., 2025).
ADAMW_UPDATE_SIZE = 0.2


def build_adamw(
    model: nn.Module,
    parameters: Iterable[Tensor],
    lr: float,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = ADAM_EPS,
    weight_decay: float = 0.01,
) -> Optimizer:
    groups = decay_groups(parameters, weight_decay, rate_scales(model))
    return torch.optim.AdamW(groups, lr, (betas[0], betas[1]), eps * gradient_scale(model), fused=True)


def split_matrices(model: nn.Module) -> tuple[list[tuple[Tensor, list[int]]], list[nn.Parameter]]:
    """The matrices that Muon optimizes, with the rows of their stacked parts, and all other parameters."""
    matrices = {
        id(module.weight): (module.weight, module.parts)
        for module in model.modules()
        if isinstance(module, Linear) and module.role in MUON_ROLES and module.weight.requires_grad
    }
    return list(matrices.values()), [weight for weight in trainable(model) if id(weight) not in matrices]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decay_groups(
    parameters: Iterable[Tensor], weight_decay: float, scales: Mapping[int, float] | None = None
) -> list[dict[str, Any]]:
    """Splits parameters for weight decay. Norms, biases and scales have fewer than two dimensions and do not decay.

    `scales` are factors on learning rates by the id of a weight, as `rate_scales` returns them. They do not change
    which share of a weight decays in a step (Wang and Aitchison, 2024).
    """
    split: dict[tuple[bool, float], list[Tensor]] = {}
    for parameter in parameters:
        split.setdefault((parameter.dim() < 2, (scales or {}).get(id(parameter), 1.0)), []).append(parameter)
    return [
        {
            "params": split[is_vector, scale],
            "weight_decay": 0.0 if is_vector else weight_decay / scale,
            **({} if scale == 1.0 else {"rate_scale": scale}),
        }
        for is_vector, scale in sorted(split, reverse=True, key=lambda group: (not group[0], group[1]))
    ]


def rate_scales(model: nn.Module) -> dict[int, float]:
    """Returns factors on learning rates for Adam, by the id of a weight; weights that are not listed have 1.

    With parametrization 'mup', a matrix learns the more slowly the more inputs it has than in the base model: its
    output sums up as many changes of its entries, each as large as the learning rate.
    """
    scales: dict[int, float] = {}
    encoders = [part for part in model.modules() if isinstance(part, BertBlocksPreTrainedModel)]
    for encoder in encoders:  # outer models come first, and inner ones know their width better
        for module in encoder.modules():
            if (ratio := fan_in_ratio(module, encoder.config)) != 1.0:
                scales[id(module.weight)] = 1 / ratio
    for encoder in encoders:
        if isinstance(encoder, LanguageModel):
            scales.pop(id(encoder.decoder.weight), None)
    return scales


def gradient_scale(model: nn.Module) -> float:
    """Returns how small the entries of gradients are compared with those of the base model, for Adam's epsilon."""
    config = getattr(model, "config", None)
    return 1 / width_ratio(config) if isinstance(config, BertBlocksConfig) else 1.0


class RowAdamW(torch.optim.AdamW):
    """AdamW that trains of a weight with sparse gradients only the rows that have had one: the words that texts use.

    These rows change as in AdamW in every step. The others have no moments and do not decay.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.grad.is_sparse:
                    self._step_rows(weight, group)
                    weight.grad = None
                elif "rows" in self.state[weight]:
                    self._spread_rows(weight)
        super().step()

    def _spread_rows(self, weight: Tensor) -> None:
        """Gives all rows moments: a run that began with sparse gradients goes on with dense ones."""
        state = self.state[weight]
        rows = state.pop("rows")
        for name in MOMENTS:
            state[name] = torch.zeros_like(weight).index_copy_(0, rows, state[name])

    def _step_rows(self, weight: Tensor, group: dict[str, Any]) -> None:
        gradient = cast(Tensor, weight.grad).coalesce()
        found, values = gradient.indices()[0], gradient.values()
        state = self.state[weight]
        if not state:
            state.update(step=torch.zeros((), device=weight.device), rows=found[:0])
            state.update(dict.fromkeys(MOMENTS, values[:0]))
        elif "rows" not in state:  # the run began with dense gradients
            state["rows"] = torch.arange(len(weight), device=weight.device)
        places = torch.full((len(weight),), -1, device=weight.device)
        places[state["rows"]] = torch.arange(len(state["rows"]), device=weight.device)
        new = found[places[found] < 0]
        if len(new):
            places[new] = torch.arange(len(new), device=weight.device) + len(state["rows"])
            state["rows"] = torch.cat([state["rows"], new])
            for name in MOMENTS:
                state[name] = torch.cat([state[name], values.new_zeros(len(new), *values.shape[1:])])
        rows = weight[state["rows"]]
        gradients = torch.zeros_like(rows).index_copy_(0, places[found], values)
        state["step"] += 1
        torch._fused_adamw_(
            *([rows], [gradients], *([state[name]] for name in MOMENTS), [], [state["step"]]),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        weight.index_copy_(0, state["rows"], rows)


def gradient_values(weights: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of weights, to be measured or scaled in place; of sparse ones the rows that are not zero."""
    found = []
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
            found.append(weight.grad._values())
        elif weight.grad is not None:
            found.append(weight.grad)
    return found


class StableAdamWOptimizer(Optimizer):
    """AdamW with updates clipped per tensor as in Adafactor (Wortsman et al., 2023).

    The learning rate of each tensor is lr / max(1, sqrt(mean(g^2 / max(v, eps^2)))). Weight decay does not depend on
    the size of the peak learning rate: a step at that rate removes a share `weight_decay` of each weight.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: Sequence[float] = (0.9, 0.98), eps: float = 1e-6
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.peak = lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
            self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        weights = [to_local(parameter) for parameter in parameters]
        gradients = [to_local(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]
        means, squares = ([to_local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        first, second = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        counts = [int(step) for step in steps]
        unbiased = torch._foreach_div(squares, [1 - second**count for count in counts])
        ratios = torch._foreach_div(
            torch._foreach_mul(gradients, gradients), torch._foreach_clamp_min(unbiased, group["eps"] ** 2)
        )
        rates = [group["lr"] / max(1.0, rms) for rms in _root_means(ratios, parameters)]
        if group["weight_decay"]:
            decay = group["weight_decay"] / self.peak
            torch._foreach_mul_(weights, [1 - rate * decay for rate in rates])
        divisors = torch._foreach_sqrt(unbiased)
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(means, divisors)
        scales = [-rate / (1 - first**count) for rate, count in zip(rates, counts, strict=True)]
        torch._foreach_mul_(updates, scales)
        torch._foreach_add_(weights, updates)


def _root_means(ratios: Iterable[Tensor], parameters: list[Tensor]) -> list[float]:
    """sqrt(mean) of each tensor. This process may hold only a shard of it."""
    sums = torch.stack([ratio.sum() for ratio in ratios])
    if isinstance(parameters[0], DTensor):
        dist.all_reduce(sums)
    return [math.sqrt(total / parameter.numel()) for total, parameter in zip(sums.tolist(), parameters, strict=True)]


class MuonOptimizer(Optimizer):
    """Muon: orthogonalized momentum, for matrices (Jordan et al., 2024).

    Stacked matrices, such as queries, keys and values, are orthogonalized separately. Updates have the root mean square
    of AdamW's (Liu et al., 2025).
    """

    def __init__(
        self,
        matrices: Iterable[tuple[Tensor, list[int]]],
        lr: float,
        momentum: float,
        weight_decay: float,
        orthogonalization: str = "newton_schulz",
        scales: Mapping[int, float] | None = None,
    ) -> None:
        pairs = list(matrices)
        # an orthogonal update has the spectral norm 1, and these updates that of the root of the width; Adam's have
        # that of the width itself (Yang et al., 2023)
        roots = {key: scale**0.5 for key, scale in (scales or {}).items()}
        groups = decay_groups([matrix for matrix, _ in pairs], weight_decay, roots)
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.parts = {id(matrix): parts for matrix, parts in pairs}
        self.orthogonalization = orthogonalization

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                gradient, buffer = to_local(matrix.grad), to_local(state["momentum"])
                buffer.mul_(group["momentum"]).add_(gradient)
                update = to_full(from_local_like(gradient.add(buffer, alpha=group["momentum"]), matrix))
                parts = [self._direction(part) for part in update.split(self.parts[id(matrix)])]
                weights = to_local(matrix)
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(to_local(shard_like(torch.cat(parts), matrix)), alpha=-group["lr"])

    def _direction(self, matrix: Tensor) -> Tensor:
        return orthogonalize(matrix, self.orthogonalization) * (ADAMW_UPDATE_SIZE * math.sqrt(max(matrix.shape)))


def orthogonalize(matrix: Tensor, iteration: str = "newton_schulz") -> Tensor:
    """Approximately U V^T of a matrix U S V^T, by one of the `ITERATIONS`.

    Example:
        >>> values = torch.linalg.svdvals(orthogonalize(torch.randn(8, 6)))
        >>> bool(((values > 0.3) & (values < 1.3)).all())
        True
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x / (x.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for a, b, c in ITERATIONS[iteration]:
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)
