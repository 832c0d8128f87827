"""Data parallelism: every device of a mesh has all weights and its share of a batch's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


def data_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of one axis, "data", over the given devices or all."""
    return Mesh(np.array(jax.devices() if devices is None else devices), ("data",))


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """A model or an optimizer with a copy of its numbers on each device of the mesh, put in place of those it had."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    nnx.update(tree, jax.device_put(nnx.state(tree), everywhere))
    return tree


def shard_rows(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """A batch whose rows lie on the devices of the mesh, the same number on each."""
    by_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    devices = mesh.shape[mesh.axis_names[0]]
    for name, values in batch.items():
        if np.shape(values)[0] % devices:
            raise ValueError(f"{name} has {np.shape(values)[0]} rows; {devices} devices need a multiple of {devices}.")
    return {name: jax.device_put(np.asarray(values), by_rows) for name, values in batch.items()}
