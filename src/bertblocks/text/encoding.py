"""Texts as token ids and places, apart from the special tokens that frame them, so that windows can be cut between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from bertblocks.text.alignment import Span, trim


@dataclass(frozen=True)
class TokenizedText:
    """A text's own tokens: ids and, where they were asked for, the characters of each without space around."""

    ids: list[int]
    offsets: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedSequence:
    """A sequence as a model reads it: special tokens, one text or two, and the type of every token."""

    ids: list[int]
    types: list[int]
    #: Where the last text begins in it.
    start: int


@dataclass(frozen=True)
class _Frame:
    """Special tokens in front of, between and behind texts, each with its type; and the type of every text."""

    parts: list[tuple[list[int], list[int]]]
    text_types: list[int]

    @property
    def size(self) -> int:
        return sum(len(ids) for ids, _ in self.parts)


class TextTokenizer:
    """Tokenises many texts at once, on the threads of the tokenizers library, and frames what a model is to see.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2}, unk_token="[UNK]"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"))
        >>> tokenizer.tokenize(["to be", ""], offsets=True)
        [TokenizedText(ids=[1, 2], offsets=[(0, 2), (3, 5)]), TokenizedText(ids=[], offsets=[])]
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._backend: Tokenizer | None = None
        if tokenizer.is_fast:
            # a copy, because texts are neither padded nor cut here and the caller's tokenizer stays as it is
            self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._backend.no_padding()
            self._backend.no_truncation()
        self._single = self._read_frame(pair=False)
        self._pair = self._read_frame(pair=True)

    def tokenize(self, texts: Sequence[str], offsets: bool = False) -> list[TokenizedText]:
        """The texts' own tokens, without special ones."""
        if self._backend is None:
            if offsets:
                name = type(self.tokenizer).__name__
                raise ValueError(f"{name} does not say where its tokens lie in a text; a fast tokenizer does.")
            return [TokenizedText(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        if not offsets:
            batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [TokenizedText(encoding.ids) for encoding in batch]
        batch = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            TokenizedText(encoding.ids, [trim(text, span) for span in encoding.offsets])
            for text, encoding in zip(texts, batch, strict=True)
        ]

    def num_special(self, pair: bool = False) -> int:
        """How many tokens framing adds."""
        return (self._pair if pair else self._single).size

    def frame(self, first: list[int], second: list[int] | None = None) -> EncodedSequence:
        """Special tokens around the ids of one text or two, as the tokenizer itself would put them."""
        frame = self._single if second is None else self._pair
        texts = [first] if second is None else [first, second]
        ids, types = list(frame.parts[0][0]), list(frame.parts[0][1])
        start = 0
        for text, text_type, (after, after_types) in zip(texts, frame.text_types, frame.parts[1:], strict=True):
            start = len(ids)
            ids += [*text, *after]
            types += [*[text_type] * len(text), *after_types]
        return EncodedSequence(ids, types, start)

    def _read_frame(self, pair: bool) -> _Frame:
        """From what the tokenizer does to a word it knows: tokens of no text are the frame's."""
        probe = self._probe()
        if self._backend is not None:
            encoding = self._backend.encode(probe, probe if pair else None)
            owners, ids, types = encoding.sequence_ids, encoding.ids, encoding.type_ids
        else:
            text = self.tokenize([probe])[0].ids
            both = (text, text if pair else None)
            ids = self.tokenizer.build_inputs_with_special_tokens(*both)
            types = self.tokenizer.create_token_type_ids_from_sequences(*both)
            owners = _find_texts(ids, text, pair)
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        parts: list[tuple[list[int], list[int]]] = [([], [])]
        text_types: list[int] = []
        for owner, token, token_type in zip(owners, ids, types, strict=True):
            token_type = token_type if has_types else 0
            if owner is None:
                parts[-1][0].append(token)
                parts[-1][1].append(token_type)
            elif owner == len(text_types):
                text_types.append(token_type)
                parts.append(([], []))
        return _Frame(parts, text_types)

    def _probe(self) -> str:
        """A text that has tokens; a letter has, unless the alphabet is one of proteins or the like."""
        words = itertools.chain("aA", sorted(set(self.tokenizer.get_vocab()) - set(self.tokenizer.all_special_tokens)))
        probe = next((word for word in words if self.tokenize([word])[0].ids), None)
        if probe is None:
            raise ValueError(f"{type(self.tokenizer).__name__} makes no tokens of any text.")
        return probe


def _find_texts(ids: list[int], text: list[int], pair: bool) -> list[int | None]:
    """The text of every token, for a tokenizer that does not say it."""
    owners: list[int | None] = [None] * len(ids)
    place = 0
    for number in range(2 if pair else 1):
        while ids[place : place + len(text)] != text:
            place += 1
        owners[place : place + len(text)] = [number] * len(text)
        place += len(text)
    return owners
