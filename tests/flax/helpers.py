"""A torch model and the same model in JAX, run on the same batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from bertblocks.flax import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.inputs import Inputs, Options


def segments_of(packed_seqlens: torch.Tensor, length: int) -> np.ndarray:
    """Converts the lengths of packed rows in torch to segment ids."""
    segments = np.zeros((len(packed_seqlens), length), np.int32)
    for row, lengths in enumerate(packed_seqlens.tolist()):
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        segments[row, : len(numbers)] = numbers
    return segments


def hidden_and_gradients(
    model: FlaxBertBlocksPreTrainedModel, inputs: Inputs, weights: np.ndarray, max_segments: int | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Hidden states and the gradients of their weighted sum.

    Operation by operation: compiling each of many models as a whole takes longer.
    """

    def loss(model: Any) -> Any:
        hidden = model.forward(inputs, Options(max_segments, False, False)).last_hidden_state
        return (hidden * jnp.asarray(weights)).sum(), hidden

    (_, hidden), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    return np.asarray(hidden), named_gradients(gradients)


def named_gradients(gradients: nnx.State) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(gradients)}


def assert_same_gradients(ours: dict[str, np.ndarray], model: torch.nn.Module, tolerance: float = 1e-3) -> None:
    """Compares every gradient with torch, relative to the largest."""
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None)
    for name, gradient in theirs.items():
        expected = 0.0 if gradient is None else gradient.numpy()
        difference = np.abs(ours[name] - expected).max() / largest
        assert difference < tolerance, f"{name}: gradients differ by {difference:.1e} of the largest"


def assert_near(ours: Any, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Compares with an absolute tolerance up to 1 and relative to the largest number beyond."""
    expected = theirs.detach().float().numpy()
    assert ours.shape == expected.shape
    scale = max(1.0, float(np.abs(expected[np.abs(expected) < 1e30]).max()))
    np.testing.assert_allclose(np.asarray(ours, np.float32) / scale, expected / scale, atol=tolerance, rtol=tolerance)
