"""Which layers share their weights."""

from __future__ import annotations

from typing import Any

from bertblocks.core.registry import Registry

SHARINGS: Registry[Any] = Registry("layer_sharing")
register_sharing = SHARINGS.register


@register_sharing("consecutive")
class ConsecutiveSharing:
    """Consecutive layers share their weights: AABB (ALBERT)."""

    @staticmethod
    def group(index: int, num_layers: int, num_groups: int) -> int:
        """Return the index of the weights of layer `index`."""
        return int(index / (num_layers / num_groups))
