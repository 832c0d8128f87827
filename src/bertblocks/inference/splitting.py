"""Texts of any length made to fit a model: refused, cut, or seen through windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bertblocks.text.encoding import EncodedSequence, TextTokenizer, TokenizedText
from bertblocks.text.windows import Window, cut_pair, cut_windows

TooLong = Literal["error", "truncate", "window"]
TOO_LONG: tuple[TooLong, ...] = ("error", "truncate", "window")


@dataclass(frozen=True)
class Segment:
    """One sequence for the model, and the tokens of its text that it shows."""

    framed: EncodedSequence
    window: Window
    #: TokenizedText of the sequence whose scores are asked for, where not all are.
    rows: list[int] | None = None


class SequenceSplitter:
    """Cuts token ids into sequences of at most `max_length` tokens.

    Windows share `overlap` tokens, by default a quarter of what fits.
    """

    def __init__(self, tokenizer: TextTokenizer, max_length: int, too_long: TooLong, overlap: int | None) -> None:
        if max_length <= tokenizer.num_special():
            raise ValueError(f"max_length is {max_length}; special tokens alone are {tokenizer.num_special()}.")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.too_long = too_long
        self.overlap = overlap

    def fit(self, tokens: TokenizedText, index: int) -> list[Segment]:
        """The pieces of text number `index`."""
        room = self.max_length - self.tokenizer.num_special()
        windows = self._cut(len(tokens.ids), room, f"Text {index} has {len(tokens.ids)} tokens")
        return [Segment(self.tokenizer.frame(tokens.ids[one.start : one.stop]), one) for one in windows]

    def fit_pair(
        self, first: TokenizedText, second: TokenizedText, index: int, cut_first: bool = True
    ) -> list[Segment]:
        """The pieces of a pair: windows move over the second text, and each shows the first one.

        With `cut_first` the longer text is truncated first, and beside windows the first text keeps so much that half
        of a sequence is the second's. Otherwise the second alone is cut.
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
                f"{message}; this model reads {space} of a pair, which leaves no room beside the first text."
            )
        return [
            Segment(self.tokenizer.frame(left, right[window.start : window.stop]), window)
            for window in self._cut(len(right), max(room, 1), message)
        ]

    def _cut(self, length: int, room: int, message: str) -> list[Window]:
        if length <= room or self.too_long == "truncate":
            kept = min(length, room)
            return [Window(0, kept, 0, kept)]
        if self.too_long == "error":
            raise ValueError(
                f"{message}; this model reads {room} beside its special ones. Set too_long to 'truncate' or 'window'."
            )
        return cut_windows(length, room, room // 4 if self.overlap is None else self.overlap)
