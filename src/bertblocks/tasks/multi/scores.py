"""Scores of late interaction, and fewer vectors per text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bertblocks.checkpoints.sentence_transformers.multi_vector import TokenPooling
from bertblocks.nn.ops.maxsim import maxsim


def score_multi(
    queries: np.ndarray | Sequence[np.ndarray], documents: Sequence[np.ndarray], *, mean: bool = False
) -> np.ndarray:
    """Scores one query, `[tokens, dimensions]`, against documents, or each of several: `[queries, documents]`.

    A score is the sum over query tokens of the highest dot product with a document's token (MaxSim), or with `mean`
    their mean.

    Example:
        >>> query = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
        >>> scores = score_multi(query, [np.array([[0.6, 0.8]], dtype=np.float32), query])
        >>> [round(float(score), 4) for score in scores]
        [1.4, 2.0]
    """
    is_one = isinstance(queries, np.ndarray) and queries.ndim == 2
    sides: tuple[list[Any], list[Any]] = ([queries] if is_one else list(queries), list(documents))
    for name, vectors in zip(("query", "document"), sides, strict=True):
        for number, own in enumerate(vectors):
            if not isinstance(own, np.ndarray) or own.ndim != 2:
                shape = list(own.shape) if isinstance(own, np.ndarray) else type(own).__name__
                raise ValueError(f"The vectors of {name} {number} are {shape}; they must be [tokens, dimensions].")
    lengths = [[len(own) for own in vectors] for vectors in sides]
    if all(sides):
        first, second = (torch.from_numpy(np.concatenate(vectors)) for vectors in sides)
        scores = maxsim(first, lengths[0], second, lengths[1]).numpy()
    else:
        scores = np.zeros((len(sides[0]), len(sides[1])), np.float32)
    if mean:
        scores = scores / np.maximum(np.array(lengths[0], scores.dtype), 1)[:, None]
    return scores[0] if is_one else scores


def pool_tokens(vectors: np.ndarray, pooling: TokenPooling) -> np.ndarray:
    """Clusters the vectors of a text by Ward's method on cosine distances, and averages each cluster.

    `[tokens, dimensions]` in, about 1/factor of the tokens out, after the protected ones. Vectors have length 1.
    """
    first, rest = vectors[: pooling.protected], vectors[pooling.protected :]
    clusters = max(int(len(rest) // pooling.factor), 1)
    if clusters < len(rest):
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        distances = np.clip(1 - rest @ rest.T, 0, 2)
        labels = fcluster(linkage(squareform(distances, checks=False), "ward"), clusters, "maxclust")
        _, owners, counts = np.unique(labels, return_inverse=True, return_counts=True)
        means = np.zeros((len(counts), rest.shape[1]), rest.dtype)
        np.add.at(means, owners, rest)
        vectors = np.concatenate((first, means / counts[:, None].astype(rest.dtype)))
    if pooling.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors
