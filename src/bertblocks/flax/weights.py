"""Parameters under the names that torch models and their files use."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax import Array
from torch import Tensor

from bertblocks.config import BertBlocksConfig
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel

#: The supported types of parameters.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_weights(model: nnx.Module) -> dict[str, Array]:
    """Returns every weight by its name in torch, which is its path in the model."""
    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(nnx.state(model))}


def set_weights(model: nnx.Module, weights: Mapping[str, Array | Tensor | np.ndarray], dtype: str | None) -> None:
    """Sets all weights; raises an error if one is missing, left over, or has another shape."""
    flat = nnx.to_flat_state(nnx.state(model))
    names = {".".join(map(str, path)): path for path, _ in flat}
    if missing := sorted(set(names) - set(weights)):
        raise ValueError(f"The weights lack {missing[0]!r} ({len(missing)} missing in all).")
    if unknown := sorted(set(weights) - set(names)):
        raise ValueError(f"The weights have {unknown[0]!r}, which does not belong to this model.")
    values = {}
    for name, (path, variable) in zip(names, flat, strict=True):
        value = to_jax(weights[name], dtype)
        if value.shape != variable.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; it must be {list(variable.shape)}.")
        values[path] = variable.replace(value)
    nnx.update(model, nnx.from_flat_state(values))


def to_jax(weight: Array | Tensor | np.ndarray, dtype: str | None) -> Array:
    """Copies a weight to a JAX array, converted to `dtype` if given."""
    if isinstance(weight, Tensor):
        dtype = dtype or str(weight.dtype).removeprefix("torch.")
        weight = weight.detach().cpu().float().numpy()  # numpy has no bfloat16
    name = jnp.dtype(dtype or weight.dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}.")
    return jnp.array(weight, dtype=name)


def to_torch(weight: Array) -> Tensor:
    """Copies a weight to a tensor of the same type."""
    return torch.from_numpy(np.array(jax.device_get(weight.astype(jnp.float32)))).to(DTYPES[weight.dtype.name])


def new_torch_model(task: str, config: BertBlocksConfig, seed: int) -> BertBlocksPreTrainedModel:
    """Returns a newly initialized torch model, so that initialization is defined once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TASK_MODELS[task](config)


def torch_weights(model: BertBlocksPreTrainedModel) -> dict[str, Tensor]:
    """Returns the weights of a torch model without the tied copies."""
    return {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
