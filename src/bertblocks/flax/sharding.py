"""Data parallelism: every device of a mesh holds all weights and a share of the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


def data_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with one axis, "data", over the given devices or all."""
    return Mesh(np.array(jax.devices() if devices is None else devices), ("data",))


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """Copies the arrays of a model or an optimizer to each device of the mesh, in place, and returns it."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    nnx.update(tree, jax.device_put(nnx.state(tree), everywhere))
    return tree


def shard_rows(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Distributes the rows of a batch over the devices of the mesh, the same number to each."""
    by_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    devices = mesh.shape[mesh.axis_names[0]]
    for name, values in batch.items():
        if np.shape(values)[0] % devices:
            raise ValueError(f"{name} has {np.shape(values)[0]} rows; {devices} devices need a multiple of {devices}.")
    return {name: jax.device_put(np.asarray(values), by_rows) for name, values in batch.items()}
