"""Pretrain a tiny ModernBERT on texts of your own, with a tokenizer trained on them, in seconds."""

import random
import tempfile
from pathlib import Path

from rich.console import Console

from bertblocks import Predictor, pretrain, read_recipe

SUBJECTS = {"the cat": "purrs", "the dog": "barks", "the bird": "sings", "the fish": "swims"}
TIMES = ["in the morning", "at noon", "in the evening", "at night"]

with tempfile.TemporaryDirectory() as folder:
    rng = random.Random(0)
    sentences = [f"{subject} {verb} {time}" for subject, verb in SUBJECTS.items() for time in TIMES]
    texts = Path(folder) / "texts.txt"
    texts.write_text("".join(". ".join(rng.choices(sentences, k=4)) + "\n" for _ in range(1000)))
    overrides = [
        f"run.folder={folder}/run",
        f"corpus.sources=[{{name: animals, files: [{texts}], one_per: line}}]",
        "model.config={hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 96}",
        "tokenizer.vocab_size=100",
        "phases=[{duration: 300 steps, length: 32, batch_tokens: 512}]",
    ]
    done = pretrain(read_recipe("demo", overrides), Console(quiet=True))
    print(f"masked accuracy on unseen texts: {done.metrics['held_out_accuracy']:.2f}")
    guess = Predictor(done.folder / "model").fill_mask(["the cat [MASK] at noon"], top_k=1)[0][0][0]
    print(f"the cat [MASK] at noon: {guess.token}")
