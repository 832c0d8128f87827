"""Metrics of the routers of mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertblocks.models import BertBlocksModel
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.training.distributed import World

NAMES = ("balance_loss", "z_loss", "entropy")


class RoutingMetrics:
    """Collects what the routers of a model do. The values stay on its device, because reading them waits for it.

    `router_load_E` is the share of the assignments that expert E got, and `router_dropped` the share that none did. All
    are means over the layers with experts.
    """

    def __init__(self, model: nn.Module) -> None:
        encoders = [module for module in model.modules() if isinstance(module, BertBlocksModel)]
        self._encoders = [
            encoder
            for encoder in encoders
            if any(isinstance(module, MixtureOfExperts) for module in encoder.encoder.modules())
        ]
        self._values: list[Tensor] = []

    def add(self, share: float) -> None:
        """Adds the last forward pass, weighted by its share of a step."""
        layers = [layer for encoder in self._encoders for layer in encoder.routing]
        if not layers:
            return
        means = [torch.stack([getattr(layer, name) for layer in layers]).mean() for name in NAMES]
        loads = [
            torch.stack([layer.load[expert] for layer in layers if expert < len(layer.load)]).mean()
            for expert in range(max(len(layer.load) for layer in layers))
        ]
        dropped = 1 - torch.stack([layer.load.sum() for layer in layers]).mean()
        self._values.append(torch.stack([*means, dropped, *loads]) * share)

    def move_to(self, window: dict[str, float], world: World) -> None:
        """Adds the values since the last call, over all processes, to sums of metrics.

        They are added one by one, so that the sums do not depend on when this is called.
        """
        if not self._values:
            return
        values = torch.stack(self._values)  # [forward passes, metrics]
        self._values.clear()
        keys = [*NAMES, "dropped", *(f"load_{expert}" for expert in range(values.shape[1] - len(NAMES) - 1))]
        summed = world.sum(values.flatten().tolist())
        for index, value in enumerate(summed):
            key = f"router_{keys[index % len(keys)]}"
            window[key] = window.get(key, 0.0) + value
