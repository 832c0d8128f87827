"""Loads tokenizers. All code loads them here, and code from a checkpoint folder never runs."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bertblocks.core.messages import first_line, short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

#: A folder with any of these files has a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)
#: Ids stay below this. The tokenizers library counts from 0 to the largest id, and keeps each number that is missing.
MAX_TOKEN_ID = 2**24


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id.

    `trust_remote_code=False` matters: without it, transformers asks on standard input whether to run the code of a
    checkpoint, and a text that is piped into a command would answer.
    """
    from transformers import AutoTokenizer

    text = str(source)
    if not Path(text).is_dir() and (text.startswith((".", "/", "~")) or text.count("/") > 1):
        raise ValueError(f"{text} is not a folder with a tokenizer.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(text, trust_remote_code=False)
        _check(tokenizer)
        return tokenizer
    except BaseException as error:
        # damaged files make transformers raise errors of every kind, and the Rust library panic
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs Python code from the checkpoint, which BertBlocks never runs"
        raise ValueError(f"Cannot load a tokenizer from {text}: {reason}.") from error


def _check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises for what transformers reads from files but does not check before it is used."""
    length = tokenizer.model_max_length
    if not isinstance(length, (int, float)) or not length >= 1:
        raise ValueError(f"model_max_length is {short_repr(length)}; it must be a number of tokens")
    token, largest = max(tokenizer.get_vocab().items(), key=itemgetter(1), default=("", 0))
    if largest >= MAX_TOKEN_ID:
        raise ValueError(f"the token {short_repr(token)} has the id {largest}; ids must be below {MAX_TOKEN_ID}")
    ids = tokenizer("a", "b")["input_ids"]
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError("it does not turn texts into token ids")


def load_tokenizer_if_any(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint folder, or None if it has none."""
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer. A full disk is an `OSError`, although the tokenizers library raises a plain `Exception`."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(f"Cannot write the tokenizer to {folder}: {error}.") from error


def load_fast_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """A tokenizer with a `tokenizer.json`, which preparing tokens requires."""
    tokenizer = load_tokenizer(source)
    if not tokenizer.is_fast:
        raise ValueError(f"The tokenizer of {source} has no tokenizer.json; save it as a fast tokenizer first.")
    return cast(Any, tokenizer)
