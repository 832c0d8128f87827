"""A tiny encoder and easy files for the tests of fine-tuning."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bertblocks import BertBlocksConfig, BertBlocksModel

COLOURS = ["red", "green", "blue"]
NOUNS = ["house", "tree", "river", "stone", "cloud", "road"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fresh encoder with a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("base")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "is", "which", "colour", "?", ".", *COLOURS, *NOUNS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertBlocksConfig.from_preset(
        "mini", vocab_size=32, hidden_size=32, num_attention_heads=2, intermediate_size=48, num_hidden_layers=2
    )
    BertBlocksModel(config).save_pretrained(folder)
    return folder


def sentence(rng: random.Random) -> tuple[str, str]:
    colour = rng.choice(COLOURS)
    return f"the {rng.choice(NOUNS)} is {colour} .", colour


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same easy problem for every task: which colour a sentence names."""
    folder = tmp_path_factory.mktemp("files")
    rng = random.Random(0)
    rows = [sentence(rng) for _ in range(240)]
    (folder / "classify.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    (folder / "regress.csv").write_text(
        "text,score\n" + "".join(f"{text},{COLOURS.index(label) / 2:.1f}\n" for text, label in rows)
    )
    tags = [[(word, f"B-{word.upper()}" if word in COLOURS else "O") for word in text.split()] for text, _ in rows]
    (folder / "tag.conll").write_text(
        "\n\n".join("\n".join(f"{word} {tag}" for word, tag in words) for words in tags) + "\n"
    )
    questions = []
    for number, (text, colour) in enumerate(rows):
        answers = {"text": [colour], "answer_start": [text.index(colour)]}
        questions.append({"id": str(number), "question": "which colour ?", "context": text, "answers": answers})
    (folder / "answer.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    pairs = []
    for _ in range(240):
        first, second = sentence(rng), sentence(rng)
        pairs.append(f"{first[0]},{second[0]},{float(first[1] == second[1])}\n")
    (folder / "embed.csv").write_text("text,text_pair,score\n" + "".join(pairs))
    return folder
