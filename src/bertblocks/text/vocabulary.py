"""What objectives need to know about a tokenizer, as arrays over its ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: How tokens begin that follow a space: in byte-level BPE (space, newline, tab) and in SentencePiece.
SPACE_MARKERS = ("Ġ", "Ċ", "ĉ", "▁")
CONTINUATION = "##"
SENTENCE_ENDS = (".", "!", "?", "。")


@dataclass(frozen=True)
class Vocabulary:
    """Ids of the special tokens, and properties of every id.

    `starts_word` is None for a tokenizer that does not mark where words begin.
    """

    size: int
    cls: int
    sep: int
    mask: int
    is_special: NDArray[np.bool_]
    starts_word: NDArray[np.bool_] | None
    ends_sentence: NDArray[np.bool_]

    @property
    def ordinary(self) -> NDArray[np.int64]:
        """The ids of tokens that are not special."""
        return np.flatnonzero(~self.is_special)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """Raises if the tokenizer lacks a token that every objective needs."""
        for name in ("cls_token", "sep_token", "mask_token"):
            if getattr(tokenizer, name) is None:
                raise ValueError(f"The tokenizer {tokenizer.name_or_path!r} has no {name}; pretraining needs one.")
        size = len(tokenizer)
        tokens: list[str] = [""] * size  # some ids have no token
        for token, index in tokenizer.get_vocab().items():
            tokens[index] = token
        is_special = np.array([not token for token in tokens])
        is_special[tokenizer.all_special_ids] = True
        return cls(
            size=size,
            cls=tokenizer.cls_token_id,
            sep=tokenizer.sep_token_id,
            mask=tokenizer.mask_token_id,
            is_special=is_special,
            starts_word=_word_starts(tokens, is_special),
            ends_sentence=np.array([token.endswith(SENTENCE_ENDS) for token in tokens]) & ~is_special,
        )


def _word_starts(tokens: list[str], is_special: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    continues = np.array([token.startswith(CONTINUATION) and token != CONTINUATION for token in tokens])
    spaced = np.array([token.startswith(SPACE_MARKERS) for token in tokens])
    # each may occur as text in the other kind: "##" begins a Markdown heading, and some markers are letters
    if spaced.sum() > continues.sum():
        return spaced | is_special
    return ~continues if continues.any() else None
