"""Small configs, ragged batches, and an attention so plain that it can be checked by reading."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bertblocks import BertBlocksConfig

#: Around every edge of a window of 8: one token, half a window, a whole one, several; and a row of padding only.
WINDOW = 8
EDGE_LENGTHS = [1, 2, WINDOW // 2, WINDOW // 2 + 1, WINDOW, WINDOW + 1, 3 * WINDOW, 0, 29]


def tiny_config(**options: Any) -> BertBlocksConfig:
    """Small enough to run thousands of times, with weights large enough that mistakes show."""
    defaults = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "local_attention_window_size": WINDOW,
        **({"norm_num_groups": 4} if "'group'" in str(options) else {}),
        "initializer_range": 0.3,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_output_dropout": 0.0,
        "mlp_output_dropout": 0.0,
        "classifier_dropout": 0.0,
    }
    return BertBlocksConfig(**{**defaults, **options})


@contextlib.contextmanager
def expect_log(pattern: str | None) -> Iterator[None]:
    """Fails unless the block logs a warning of `bertblocks` that matches, or with None, if it logs any warning."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("bertblocks"), Collect(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if pattern is None:
        assert not messages
    else:
        assert any(re.search(pattern, message) for message in messages), messages


def ragged_ids(lengths: list[int], vocab_size: int = 60, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length,), generator=generator) for length in lengths]


def pad_ids(sequences: list[Tensor], side: str = "right", width: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids and their 0/1 mask; 0 is padding."""
    width = width or max(len(ids) for ids in sequences)
    ids, mask = (
        torch.zeros(len(sequences), width, dtype=torch.long),
        torch.zeros(len(sequences), width, dtype=torch.long),
    )
    for row, sequence in enumerate(sequences):
        place = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        ids[row, place], mask[row, place] = sequence, 1
    return ids, mask


def naive_attention(
    q: Tensor,  # [tokens, heads, d] of one sequence
    k: Tensor,  # [tokens, kv_heads, d]
    v: Tensor,
    scale: float,
    half_window: int | None = None,
    num_global_tokens: int = 0,
    slopes: list[float] | None = None,
    is_causal: bool = False,
) -> Tensor:
    """One query, one head and one key at a time."""
    tokens, heads, _ = q.shape
    out = torch.zeros_like(q)
    for i in range(tokens):
        for h in range(heads):
            kv = h * k.shape[1] // heads
            scores, values = [], []
            for j in range(tokens):
                is_near = (half_window is None or abs(i - j) <= half_window) and not (is_causal and j > i)
                if is_near or i < num_global_tokens or j < num_global_tokens:
                    score = float(q[i, h] @ k[j, kv]) * scale
                    scores.append(score - (slopes[h] * abs(i - j) if slopes else 0.0))
                    values.append(v[j, kv])
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            out[i, h] = sum(weight / sum(weights) * value for weight, value in zip(weights, values, strict=True))
    return out
