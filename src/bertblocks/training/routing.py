"""Metrics of the routers of mixtures of experts."""

from __future__ import annotations

import torch
from torch import nn

from bertblocks.models import BertBlocksModel


def routing_metrics(model: nn.Module) -> dict[str, float]:
    """Returns the mean of each metric over the layers with experts in the last forward pass; empty without any.

    `router_load_E` is the share of the assignments that expert E got, and `router_dropped` the share that none did.
    """
    layers = [layer for module in model.modules() if isinstance(module, BertBlocksModel) for layer in module.routing]
    if not layers:
        return {}
    names = ("balance_loss", "z_loss", "entropy")
    means = [torch.stack([getattr(layer, name) for layer in layers]).mean() for name in names]
    loads = [
        torch.stack([layer.load[expert] for layer in layers if expert < len(layer.load)]).mean()
        for expert in range(max(len(layer.load) for layer in layers))
    ]
    dropped = 1 - torch.stack([layer.load.sum() for layer in layers]).mean()
    keys = [*names, "dropped", *(f"load_{expert}" for expert in range(len(loads)))]
    return {
        f"router_{key}": value for key, value in zip(keys, torch.stack([*means, dropped, *loads]).tolist(), strict=True)
    }
