"""A tiny study: two layers of 32 on made-up texts, trained for seconds."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

WORDS = ["river", "house", "stone", "music", "horse", "water", "light", "paper"]


def write_texts(path: Path, count: int = 200) -> None:
    chance = random.Random(0)
    sentences = [f"the {chance.choice(WORDS)} is near the {chance.choice(WORDS)} ." for _ in range(3 * count)]
    path.write_text("\n".join(" ".join(chance.sample(sentences, chance.randint(1, 3))) for _ in range(count)))


def tiny_values(folder: Path) -> dict[str, Any]:
    texts = folder / "texts.txt"
    if not texts.is_file():
        write_texts(texts)
    return {
        "name": "tiny",
        "recipe": "demo",
        "changes": {
            "corpus": {
                "sources": [{"name": "texts", "files": [str(texts)], "one_per": "line"}],
                "held_out": 0.2,
                "workers": 1,
            },
            "tokenizer.vocab_size": 120,
            "model.config.hidden_size": 32,
            "model.config.num_hidden_layers": 2,
            "model.config.num_attention_heads": 2,
            "model.config.intermediate_size": 48,
            "model.config.max_position_embeddings": 32,
            "phases": [{"duration": "10 steps", "length": 32, "batch_tokens": 128}],
            "run": {
                "device": "cpu",
                "precision": "fp32",
                "log_every": 1,
                "evaluation": {"every": 5, "tokens": 500, "pseudo_perplexity_tokens": 0},
                "checkpoints": {"every": 2},
            },
        },
        "variants": {"rope": {}, "none": {"model.config.block_pos_enc_kind": "none"}},
        "seeds": 2,
        "measures": [{"kind": "held_out", "tokens": 1000}],
    }


@pytest.fixture
def write_study(tmp_path: Path) -> Callable[..., Path]:
    """Writes a study file, with other values for some of its keys; None removes a key."""

    def write(name: str = "study.yaml", **changes: Any) -> Path:
        values = {**copy.deepcopy(tiny_values(tmp_path)), **changes}
        given = {key: value for key, value in values.items() if value is not None}
        path = tmp_path / "files" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(given, sort_keys=False))
        return path

    return write
