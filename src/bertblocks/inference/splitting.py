"""Fits texts of any length to a model: reject them, truncate them, or split them into overlapping windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.text.encoding import EncodedSequence, TextTokenizer, TokenizedText
from bertblocks.text.windows import Window, cut_pair, cut_windows

TooLong = Literal["error", "truncate", "window"]
TOO_LONG: tuple[TooLong, ...] = ("error", "truncate", "window")


#: A truncated text is tokenized as a whole up to twice this many characters for each token that the model reads.
CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True)
class Segment:
    """One sequence for the model, and the window of the text's tokens that it contains."""

    sequence: EncodedSequence
    window: Window
    #: Tokens of the sequence whose scores are needed; None means all of them.
    token_indices: list[int] | None = None


class SequenceSplitter:
    """Splits token ids into sequences of at most `max_length` tokens.

    Windows share `overlap` tokens, by default a quarter of the tokens that fit.
    """

    def __init__(self, tokenizer: TextTokenizer, max_length: int, too_long: TooLong, overlap: int | None) -> None:
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long is {too_long!r}; it must be one of {', '.join(TOO_LONG)}.")
        if max_length <= tokenizer.num_special():
            raise ValueError(
                f"max_length is {max_length}; it must leave room for text next to the {tokenizer.num_special()} "
                "special tokens."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.too_long = too_long
        self.overlap = overlap

    def shorten(self, text: str) -> str:
        """Cuts the end off a text that will be truncated, so that a huge text is not tokenized as a whole.

        The prefix doubles until a longer one gives the same first tokens, because a token may stand for any number of
        characters and may depend on those after it.
        """
        length = CHARACTERS_PER_TOKEN * self.max_length
        if self.too_long != "truncate" or len(text) <= 2 * length:
            return text
        tokens = self._first_tokens(text[:length])
        while len(text) > 2 * length:
            shorter, tokens = tokens, self._first_tokens(text[: 2 * length])
            if len(tokens) == self.max_length and tokens == shorter:
                return text[: 2 * length]
            length *= 2
        return text

    def _first_tokens(self, text: str) -> list[int]:
        return self.tokenizer.tokenize([text])[0].ids[: self.max_length]

    def split(self, tokens: TokenizedText, index: int) -> list[Segment]:
        """Returns the segments of text number `index`."""
        room = self.max_length - self.tokenizer.num_special()
        windows = self._cut(len(tokens.ids), room, f"Text {index} has {len(tokens.ids)} tokens")
        return [
            Segment(self.tokenizer.add_special_tokens(tokens.ids[window.start : window.stop]), window)
            for window in windows
        ]

    def split_pair(
        self, first: TokenizedText, second: TokenizedText, index: int, cut_first: bool = True
    ) -> list[Segment]:
        """Returns the segments of pair number `index`: each contains the first text and a window of the second.

        With `cut_first`, truncation shortens the longer text first, and with windows the first text is cut so that the
        second gets at least half of a sequence. Without it, only the second text is cut.
        """
        space = self.max_length - self.tokenizer.num_special(pair=True)
        left, right = first.ids, second.ids
        if self.too_long == "truncate" and cut_first:
            left, right = cut_pair(left, right, space)
        elif self.too_long == "window" and cut_first:
            left = left[: space - min(len(right), space // 2)]
        room = space - len(left)
        message = f"Pair {index} has {len(left)} and {len(right)} tokens"
        if room < min(len(right), 2):
            raise ValueError(
                f"{message}; this model reads {space} of a pair, and the first text leaves no room for the second."
            )
        return [
            Segment(self.tokenizer.add_special_tokens(left, right[window.start : window.stop]), window)
            for window in self._cut(len(right), max(room, 1), message)
        ]

    def _cut(self, length: int, room: int, message: str) -> list[Window]:
        if length <= room or self.too_long == "truncate":
            kept = min(length, room)
            return [Window(0, kept, 0, kept)]
        if self.too_long == "error":
            raise ValueError(
                f"{message}; this model reads {room} plus special tokens. Set too_long to 'truncate' or 'window'."
            )
        return cut_windows(length, room, room // 4 if self.overlap is None else self.overlap)


def max_sequence_length(
    model: BertBlocksPreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> int:
    """Returns the longest sequence a model reads, special tokens included.

    The model's positions, its tokenizer and `limit`, the length that a checkpoint recommends, each set a bound.
    """
    positions = model.config.max_position_embeddings - model.config.position_offset
    return min(positions, tokenizer.model_max_length, limit or positions)
