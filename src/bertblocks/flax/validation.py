"""Checks configs for blocks that exist only in torch, and ids for invalid values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bertblocks.config.validation import ConfigError
from bertblocks.flax.nn.activation import ACTIVATIONS
from bertblocks.flax.nn.gate import GATES
from bertblocks.flax.nn.mlp import MLPS
from bertblocks.flax.nn.norm import NORMS
from bertblocks.flax.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: Keys with one value in JAX.
ONLY_VALUES: dict[str, object] = {
    "causal": False,
    "input_conv_size": 0,
    "timestep_embedding": False,
    "residual_fn": "add",
    "input_mixing": False,
    "value_embedding": False,
    "attention_fn": "softmax",
    "qa_head": "linear",
    "task_type_vocab_size": 0,
    "embedding_projection_bias": True,
    "embedding_norm_after_projection": False,
}


def supported() -> dict[str, list[str]]:
    """Returns the values of each key that exist in JAX. A user's block does if its JAX version is registered."""
    return {
        **{registry.key: registry.choices() for registry in (NORMS, MLPS, EMBEDDING_POSITIONS, BLOCK_POSITIONS, GATES)},
        **{key: list(ACTIVATIONS) for key in ("hidden_act", "mlm_head_act", "classifier_head_act")},
        "classifier_pooling": ["cls", "mean", "max"],
        # all backends give the same result; JAX computes it in its own way
        "attention_backend": ["auto", "cpu", "flash", "triton", "sdpa", "eager"],
    }


def check_supported(config: BertBlocksConfig) -> None:
    """Raises an error that names the key if the config needs a block that exists only in torch."""
    for layer in (config, *(config.for_layer(index) for index in config.layer_overrides or {})):
        for key, names in supported().items():
            value = getattr(layer, key)
            if value not in names:
                raise ConfigError(
                    f"{key} is {value!r}, which exists only in torch; bertblocks.flax has {', '.join(names)}."
                )
        only = {**ONLY_VALUES, "attention_key_bias": layer.attention_qkv_bias}
        for key, value in only.items():
            if getattr(layer, key) != value:
                raise ConfigError(
                    f"{key} is {getattr(layer, key)!r}, which exists only in torch; bertblocks.flax has {value!r}."
                )


def read_ids(name: str, ids: Any) -> np.ndarray:
    """Reads integers, also from floats with integer values."""
    values = np.asarray(ids)
    if not np.issubdtype(values.dtype, np.number):
        raise TypeError(f"{name} holds {values.dtype} values; it must hold integers.")
    if not np.issubdtype(values.dtype, np.integer):
        with np.errstate(invalid="ignore"):
            broken = values[~(values == np.round(values)) | ~np.isfinite(values)]
        if broken.size:
            raise ValueError(f"{name} holds {broken[0]}; it must hold integers.")
    return values.astype(np.int64)


def check_range(name: str, ids: np.ndarray, limit: int, limit_key: str) -> np.ndarray:
    """Returns ids as int32 after checking that they index a table of `limit` rows."""
    wrong = ids[(ids < 0) | (ids >= limit)]
    if wrong.size:
        raise ValueError(f"{name} holds {wrong[0]}; it must be at least 0 and less than {limit_key} = {limit}.")
    return ids.astype(np.int32)
