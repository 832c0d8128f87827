"""The JAX model next to the torch model, with the same weights and ragged texts, which it packs into rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.encoding import DEPTHS, OURS, get_encoders, hidden_states
from benchmarks.inputs import make_batch, ragged_lengths
from benchmarks.workload import Contender, Goal, Settings, Unavailable, Workload

JAX = "BertBlocks JAX fp32"


def jax_ragged(settings: Settings) -> Workload:
    models = get_encoders("bert-base", DEPTHS["bert-base"], settings)
    lengths = ragged_lengths()
    batch = make_batch(lengths, 30000)
    real = batch["attention_mask"].bool()

    def prepare() -> Callable[[], Tensor]:
        try:
            from bertblocks.flax import from_torch, pack_rows
        except ImportError as error:
            raise Unavailable(str(error)) from error
        model = from_torch(models.ours)
        texts = [ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True)]

        def encode() -> Tensor:
            rows, places = pack_rows(texts, max(lengths))
            found = np.asarray(model(rows["input_ids"], segment_ids=rows["segment_ids"]).last_hidden_state)
            order = np.concatenate([found[row][rows["segment_ids"][row] == place + 1] for row, place in places])
            hidden = torch.zeros(*real.shape, order.shape[-1])
            hidden[real] = torch.from_numpy(order)
            return hidden

        return encode

    return Workload(
        f"JAX: bert-base, one batch of {len(lengths)} ragged texts of up to {max(lengths)} tokens, "
        f"{models.layers} layers",
        [Contender(OURS, lambda: lambda: hidden_states(models.ours, batch)), Contender(JAX, prepare)],
        compared=lambda hidden: hidden[real],
        flops=lambda: models.flops(lengths),
        goals=[Goal(JAX, OURS, 0.8)],
        facts={"model": "bert-base", "layers": models.layers, "tokens": sum(lengths)},
    )
