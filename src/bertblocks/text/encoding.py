"""Tokenizes texts without special tokens, and adds these later, so that windows can be cut in between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from bertblocks.text.alignment import Span, trim


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text without special tokens; `offsets` are the characters of each token, without whitespace."""

    ids: list[int]
    offsets: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Token:
    """A token of a text. Special tokens, and tokens of slow tokenizers, do not have a `start` and an `end`."""

    id: int
    token: str
    start: int | None
    end: int | None
    special: bool


@dataclass(frozen=True)
class EncodedSequence:
    """The input of a model: one or two texts with special tokens, and the type of every token."""

    ids: list[int]
    types: list[int]
    #: The position at which the last text begins.
    start: int


@dataclass(frozen=True)
class _Template:
    """The special tokens before, between and after texts, each with its type, and the type of every text."""

    parts: list[tuple[list[int], list[int]]]
    text_types: list[int]

    @property
    def size(self) -> int:
        return sum(len(ids) for ids, _ in self.parts)


class TextTokenizer:
    """Tokenizes many texts at once, on the threads of the tokenizers library, and adds special tokens.

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
            # a copy: padding and truncation are off here, and the caller's tokenizer must not change
            self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._backend.no_padding()
            self._backend.no_truncation()
        self._single = self._read_template(pair=False)
        self._pair = self._read_template(pair=True)

    def tokenize(self, texts: Sequence[str], offsets: bool = False) -> list[TokenizedText]:
        """The tokens of each text, without special tokens."""
        if self._backend is None:
            if offsets:
                name = type(self.tokenizer).__name__
                raise ValueError(f"{name} does not give the offsets of its tokens; use a fast tokenizer.")
            return [TokenizedText(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        if not offsets:
            batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [TokenizedText(encoding.ids) for encoding in batch]
        batch = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            TokenizedText(encoding.ids, [trim(text, span) for span in encoding.offsets])
            for text, encoding in zip(texts, batch, strict=True)
        ]

    def list_tokens(self, texts: Sequence[str], special: bool = True) -> list[list[Token]]:
        """The tokens of each text, with the special ones that the model would read around it, for people to look at."""
        if self._backend is None:
            found = []
            for text in texts:
                ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
                tokens = self.tokenizer.convert_ids_to_tokens(ids)
                mask = self.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
                rows = zip(ids, tokens, mask, strict=True)
                found.append([Token(number, token, None, None, bool(at)) for number, token, at in rows])
            return found
        return [
            [
                Token(number, token, None if at else start, None if at else end, bool(at))
                for number, token, (start, end), at in zip(
                    encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
                )
            ]
            for encoding in self._backend.encode_batch(list(texts), add_special_tokens=special)
        ]

    def num_special(self, pair: bool = False) -> int:
        """How many special tokens a sequence has."""
        return (self._pair if pair else self._single).size

    def add_special_tokens(self, first: list[int], second: list[int] | None = None) -> EncodedSequence:
        """Adds special tokens to the ids of one or two texts, as the tokenizer itself does."""
        template = self._single if second is None else self._pair
        texts = [first] if second is None else [first, second]
        ids, types = list(template.parts[0][0]), list(template.parts[0][1])
        start = 0
        for text, text_type, (after, after_types) in zip(texts, template.text_types, template.parts[1:], strict=True):
            start = len(ids)
            ids += [*text, *after]
            types += [*[text_type] * len(text), *after_types]
        return EncodedSequence(ids, types, start)

    def _read_template(self, pair: bool) -> _Template:
        """Reads the special tokens off an encoded word: they are the tokens that belong to no text."""
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
        return _Template(parts, text_types)

    def _probe(self) -> str:
        """A text that has tokens. A letter has, except in vocabularies of proteins and the like."""
        words = itertools.chain("aA", sorted(set(self.tokenizer.get_vocab()) - set(self.tokenizer.all_special_tokens)))
        probe = next((word for word in words if self.tokenize([word])[0].ids), None)
        if probe is None:
            raise ValueError(f"{type(self.tokenizer).__name__} has no tokens for any text.")
        return probe


def _find_texts(ids: list[int], text: list[int], pair: bool) -> list[int | None]:
    """The index of the text that every token belongs to, for a tokenizer that does not give it."""
    owners: list[int | None] = [None] * len(ids)
    position = 0
    for number in range(2 if pair else 1):
        while ids[position : position + len(text)] != text:
            position += 1
        owners[position : position + len(text)] = [number] * len(text)
        position += len(text)
    return owners
