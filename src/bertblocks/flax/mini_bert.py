"""Mini BERT: an encoder in Flax linen, small enough to read at a glance.

Flax derives initial parameters from a key and the names of modules, so the modules are compact and Flax numbers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from bertblocks.flax.validation import check_range, read_ids


class EncoderBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x)) with ReLU."""

    num_heads: int
    d_ff: int

    @nn.compact
    def __call__(self, x: Array) -> Array:  # [tokens, d_model]
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.num_heads)(nn.LayerNorm()(x))
        hidden = nn.relu(nn.Dense(self.d_ff)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class MiniBERT(nn.Module):
    """Token and position embeddings and encoder blocks. There is no head: it returns hidden states."""

    vocab_size: int
    d_model: int
    num_heads: int
    d_ff: int
    num_layers: int

    @nn.compact
    def __call__(self, ids: Array) -> Array:  # [tokens] -> [tokens, d_model]
        positions = self.param("pos_embed", nn.initializers.normal(0.02), (ids.shape[0], self.d_model))
        x = nn.Embed(self.vocab_size, self.d_model)(ids) + positions
        for _ in range(self.num_layers):
            x = EncoderBlock(self.num_heads, self.d_ff)(x)
        return x


def mini_bert_forward(
    seed: int, token_ids: Any, vocab_size: int, d_model: int, num_heads: int, d_ff: int, num_layers: int
) -> Array:
    """Returns the hidden states of a new Mini BERT for one text, flattened to `tokens * d_model` numbers.

    `token_ids` may be floats with integer values. The same seed gives the same weights.

    Example:
        >>> mini_bert_forward(0, [13.0, 10.0, 8.0, 4.0], 16, 8, 2, 16, 2).shape
        (32,)
    """
    vocab_size = _read_size("vocab_size", vocab_size)
    d_model, num_heads = _read_size("d_model", d_model), _read_size("num_heads", num_heads)
    d_ff, num_layers = _read_size("d_ff", d_ff), _read_size("num_layers", num_layers, least=0)
    if d_model % num_heads:
        raise ValueError(f"num_heads is {num_heads}; it must divide d_model = {d_model}.")
    ids = read_ids("token_ids", token_ids)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"token_ids has shape {list(ids.shape)}; it must be one row with at least one token.")
    ids = check_range("token_ids", ids, vocab_size, "vocab_size")
    model = MiniBERT(vocab_size, d_model, num_heads, d_ff, num_layers)
    hidden, _ = model.init_with_output(jax.random.PRNGKey(int(seed)), jnp.asarray(ids, jnp.int32))
    return hidden.reshape(-1)


def _read_size(name: str, size: Any, least: int = 1) -> int:
    if size != int(size) or size < least:
        raise ValueError(f"{name} is {size}; it must be a whole number of at least {least}.")
    return int(size)


def mini_bert_weights(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Renames the parameters of a `MiniBERT` for a model of the preset `mini-bert` in Flax or torch."""
    weights = {
        "embedding.token.weight": params["Embed_0"]["embedding"],
        "embedding.position.table.weight": params["pos_embed"],
    }
    for layer in range(sum(name.startswith("EncoderBlock_") for name in params)):
        block = params[f"EncoderBlock_{layer}"]
        attention = block["MultiHeadDotProductAttention_0"]
        parts = [attention[name] for name in ("query", "key", "value")]  # kernels [d_model, heads, head_dim]
        size = block["LayerNorm_0"]["scale"].shape[0]
        own = {
            "attention.qkv.weight": np.concatenate([np.reshape(part["kernel"], (size, -1)).T for part in parts]),
            "attention.qkv.bias": np.concatenate([np.reshape(part["bias"], -1) for part in parts]),
            "attention.out.weight": np.reshape(attention["out"]["kernel"], (-1, size)).T,
            "attention.out.bias": attention["out"]["bias"],
        }
        for name, norm in (("attention_residual", "LayerNorm_0"), ("mlp_residual", "LayerNorm_1")):
            own[f"{name}.pre_norm.weight"], own[f"{name}.pre_norm.bias"] = block[norm]["scale"], block[norm]["bias"]
        for name, dense in (("mlp.up", "Dense_0"), ("mlp.down", "Dense_1")):
            own[f"{name}.weight"], own[f"{name}.bias"] = np.transpose(block[dense]["kernel"]), block[dense]["bias"]
        weights |= {f"encoder.layers.{layer}.{name}": value for name, value in own.items()}
    return {name: np.array(value) for name, value in weights.items()}
