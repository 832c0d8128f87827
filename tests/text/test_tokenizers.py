"""Tests of loading tokenizers from damaged and hostile files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tokenizers import MAX_TOKEN_ID, load_tokenizer
from tests.small_tokenizers import wrap

Content = dict[str, Any]
#: 2**32 - 1 is the largest id of the tokenizers library, and its counter overflows there.
HUGE = [MAX_TOKEN_ID, 2**31, 2**32 - 1]


def write(folder: Path, kind: str, change: Callable[[Content], object]) -> Path:
    wrap(kind).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def write_word_level(folder: Path, huge: int) -> Path:
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": huge}, "unk_token": "[UNK]"}
    return write(folder, "wordpiece", lambda content: content.update(model=model))


def write_two_files(folder: Path, huge: int) -> Path:
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3, "<mask>": 4, "b": 5, "a": huge}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    return folder


WRITERS: dict[str, Callable[[Path, int], Path]] = {
    "wordpiece": lambda folder, huge: write(folder, "wordpiece", lambda c: c["model"]["vocab"].update(a=huge)),
    "bpe": lambda folder, huge: write(folder, "bpe", lambda c: c["model"]["vocab"].update(a=huge)),
    "word level": write_word_level,
    "vocab.json": write_two_files,
}


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize("writer", WRITERS)
def test_huge_ids_are_rejected(tmp_path: Path, writer: str, huge: int) -> None:
    """The tokenizers library would walk through all smaller ids, and keep those that are missing, when it copies."""
    with pytest.raises(ValueError, match=f"the token 'a' has the id {huge}; ids must be below 16777216"):
        load_tokenizer(WRITERS[writer](tmp_path, huge))


def test_the_largest_id_is_allowed_and_can_be_copied(tmp_path: Path) -> None:
    folder = WRITERS["wordpiece"](tmp_path, MAX_TOKEN_ID - 1)
    assert TextTokenizer(load_tokenizer(folder)).tokenize(["a"])[0].ids == [MAX_TOKEN_ID - 1]


def test_huge_lengths_in_the_file_are_not_used(tmp_path: Path) -> None:
    """Texts padded to a length of the file would take all memory."""
    tokenizer = wrap("wordpiece")
    tokenizer.backend_tokenizer.enable_padding(length=777, pad_to_multiple_of=777)
    tokenizer.backend_tokenizer.enable_truncation(777, stride=2)
    tokenizer.save_pretrained(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(re.sub(r": 777\b", f": {2**40}", text))
    expected = TextTokenizer(wrap("wordpiece")).tokenize(["plain words"])
    assert TextTokenizer(load_tokenizer(tmp_path)).tokenize(["plain words"]) == expected


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_listed_tokens_are_those_of_the_tokenizer(kind: str) -> None:
    tokenizer, text = wrap(kind), "plain été words"
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokens = TextTokenizer(tokenizer).list_tokens([text, ""])
    tokenizer.backend_tokenizer.no_truncation()
    for found, own in zip(tokens, (text, ""), strict=True):
        expected = tokenizer(own, return_offsets_mapping=True, return_special_tokens_mask=True)
        assert [token.id for token in found] == expected["input_ids"]
        assert [token.token for token in found] == tokenizer.convert_ids_to_tokens(expected["input_ids"])
        assert [token.special for token in found] == [bool(mask) for mask in expected["special_tokens_mask"]]
        spans = [
            (None, None) if mask else span
            for span, mask in zip(expected["offset_mapping"], expected["special_tokens_mask"], strict=True)
        ]
        assert [(token.start, token.end) for token in found] == spans
    (bare,) = TextTokenizer(tokenizer).list_tokens([text], special=False)
    assert [token.id for token in bare] == tokenizer(text, add_special_tokens=False)["input_ids"]
