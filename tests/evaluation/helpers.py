"""Tiny models over whole words, and files in the layouts of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bertblocks import BertBlocksConfig

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}


def make_tokenizer(texts: Iterable[str], max_length: int = 64) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every word and mark of the texts."""
    split = pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)} - set(SPECIAL))
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def save_model(folder: Path, model_class: Any, texts: Iterable[str], max_length: int = 64, **config: Any) -> Path:
    """Saves a tiny model with random weights, and its tokenizer."""
    tokenizer = make_tokenizer(texts, max_length)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    options = {"vocab_size": len(tokenizer), "mask_token_id": 4, "initializer_range": 0.5, **SIZE, **config}
    model_class(BertBlocksConfig.from_preset("mini", **options)).save_pretrained(folder)
    return folder


def label_config(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a .jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
