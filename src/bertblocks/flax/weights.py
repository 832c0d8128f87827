"""Parameters under the names that the torch side and its files have for them."""

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

#: Types that parameters may have, with torch's.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_weights(model: nnx.Module) -> dict[str, Array]:
    """Every weight under its name in torch, which is its path in the model."""
    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(nnx.state(model))}


def set_weights(model: nnx.Module, weights: Mapping[str, Array | Tensor | np.ndarray], dtype: str | None) -> None:
    """Puts every weight in its place, or raises: none may be missing, left over, or of another shape."""
    flat = nnx.to_flat_state(nnx.state(model))
    names = {".".join(map(str, path)): path for path, _ in flat}
    if missing := sorted(set(names) - set(weights)):
        raise ValueError(f"The weights lack {missing[0]!r} ({len(missing)} missing in all).")
    if unknown := sorted(set(weights) - set(names)):
        raise ValueError(f"The weights have {unknown[0]!r}, which this model has no place for.")
    values = {}
    for name, (path, variable) in zip(names, flat, strict=True):
        value = to_jax(weights[name], dtype)
        if value.shape != variable.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; it must be {list(variable.shape)}.")
        values[path] = variable.replace(value)
    nnx.update(model, nnx.from_flat_state(values))


def to_jax(weight: Array | Tensor | np.ndarray, dtype: str | None) -> Array:
    """A copy as a JAX array, of its own type unless told otherwise."""
    if isinstance(weight, Tensor):
        dtype = dtype or str(weight.dtype).removeprefix("torch.")
        weight = weight.detach().cpu().float().numpy()  # numpy has no bfloat16
    name = jnp.dtype(dtype or weight.dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}.")
    return jnp.array(weight, dtype=name)


def to_torch(weight: Array) -> Tensor:
    """A copy as a tensor of the same type."""
    return torch.from_numpy(np.array(jax.device_get(weight.astype(jnp.float32)))).to(DTYPES[weight.dtype.name])


def new_torch_model(task: str, config: BertBlocksConfig, seed: int) -> BertBlocksPreTrainedModel:
    """The torch model with fresh weights: how they start is defined once, for both sides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TASK_MODELS[task](config)


def torch_weights(model: BertBlocksPreTrainedModel) -> dict[str, Tensor]:
    """A torch model's weights, each once."""
    return {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
