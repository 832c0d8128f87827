"""Texts of a role as sequences of tokens: markers, lengths, query expansion, and which tokens get vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings
from bertblocks.inference.splitting import Segment, SequenceSplitter, TooLong
from bertblocks.nn.layout import to_device
from bertblocks.text.encoding import EncodedSequence, TextTokenizer, TokenizedText

ROLES = ("query", "document")


@dataclass(frozen=True)
class TokenSegment(Segment):
    """A sequence of which the first `seen` tokens are attended to, and `token_indices` get vectors."""

    seen: int = 0


class RoleTokenizer:
    """Turns texts of one role into sequences, as the checkpoint's settings say.

    A long document is truncated, or cut into windows that all begin with the marker. A long query is never cut into
    windows: it is truncated instead.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        settings: MultiVectorSettings,
        role: str,
        max_length: int,
        too_long: TooLong = "truncate",
        overlap: int | None = None,
    ) -> None:
        self.role = role
        self.prompt = settings.find_prompt(None, role if role in settings.prompts else None)
        self.marker = _find_marker(tokenizer, self.prompt)
        self.expansion = settings.expansion if role == "query" else None
        length = settings.length_of(role, max_length)
        if length - len(self.marker) <= tokenizer.num_special():
            raise ValueError(
                f"{role}_length is {length}; it must leave room for text next to the {tokenizer.num_special()} "
                f"special tokens and the prompt {self.prompt!r}."
            )
        if role == "query" and too_long == "window":
            too_long = "truncate"
        self.splitter = SequenceSplitter(tokenizer, length - len(self.marker), too_long, overlap)
        own = tokenizer.tokenizer
        self.filling = own.mask_token_id if own.mask_token_id is not None else own.eos_token_id
        if self.expansion is not None and self.expansion.token is not None:
            self.filling = own.convert_tokens_to_ids(self.expansion.token)
        if self.expansion is not None and self.filling in (None, own.unk_token_id):
            token = self.expansion.token or "a mask token"
            raise ValueError(f"Query expansion needs {token}, which the tokenizer does not have.")
        words = settings.skiplist if role in settings.skiplist_roles else ()
        ids = [own.convert_tokens_to_ids(word) for word in words if word != own.unk_token]
        self.skipped = {token for token in ids if token not in (None, own.unk_token_id)}
        if own.unk_token in words:
            self.skipped.add(own.unk_token_id)

    def segments(self, texts: Sequence[str], first: int = 0) -> list[list[TokenSegment]]:
        """Returns the sequences of texts number `first`, `first + 1`, ..."""
        shortened = [self.prompt + self.splitter.shorten(text) for text in texts]
        tokenized = self.splitter.tokenizer.tokenize(shortened)
        return [self._split(tokens.ids, index) for index, tokens in enumerate(tokenized, start=first)]

    def tokens(self, text: str) -> list[str]:
        """Returns the tokens of a text that get vectors."""
        parts = self.segments([text])[0]
        ids = [part.sequence.ids[place] for part in parts for place in part.token_indices or ()]
        return list(self.splitter.tokenizer.tokenizer.convert_ids_to_tokens(ids))

    def _split(self, ids: list[int], index: int) -> list[TokenSegment]:
        marker = self.marker if ids[: len(self.marker)] == self.marker else []
        parts = self.splitter.split(TokenizedText(ids[len(marker) :]), index)
        return [self._finish(part, marker) for part in parts]

    def _finish(self, part: Segment, marker: list[int]) -> TokenSegment:
        """Inserts the marker, expands a query, and chooses the tokens that get vectors."""
        plain = part.sequence
        ids = [*plain.ids[: plain.start], *marker, *plain.ids[plain.start :]]
        types = [*plain.types[: plain.start], *[0] * len(marker), *plain.types[plain.start :]]
        kept = [position for position, token in enumerate(ids) if token not in self.skipped]
        seen = len(ids)
        if self.expansion is not None and seen < self.expansion.length:
            missing = self.expansion.length - seen
            kept += range(seen, self.expansion.length)
            ids, types = [*ids, *[self.filling] * missing], [*types, *[0] * missing]
            seen = len(ids) if self.expansion.attend else seen
        return TokenSegment(EncodedSequence(ids, types, plain.start), part.window, kept, seen)


def _find_marker(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt in front of a text. None if the two are joined: then it is a part of the text."""
    whole, cut, joined = (own.ids for own in tokenizer.tokenize([prompt, prompt.rstrip(), f"{prompt}a"]))
    return next((ids for ids in (whole, cut) if joined[: len(ids)] == ids), [])


def token_vectors(run: Callable[..., Tensor], inputs: dict[str, Tensor], seen: Sequence[int]) -> list[Tensor]:
    """Returns the vectors of each sequence of a flat batch, by `run`, which returns those of all tokens it is given.

    Sequences whose last tokens are not attended to go through the model as a rectangle with a mask, apart from others.
    """
    lengths = inputs["cu_seqlens"].diff().tolist()
    tailed = [number for number, length in enumerate(lengths) if seen[number] < length]
    if not tailed:
        return list(run(**inputs).split(lengths))
    names = [name for name in ("input_ids", "token_type_ids") if name in inputs]
    parts = {name: inputs[name].split(lengths) for name in names}
    vectors: dict[int, Tensor] = {}
    for width, group in itertools.groupby(sorted(tailed, key=lengths.__getitem__), key=lengths.__getitem__):
        numbers = list(group)
        columns = torch.arange(width, device=inputs["input_ids"].device)
        visible = to_device(torch.tensor([seen[number] for number in numbers]), columns.device)
        rows = {name: torch.stack([parts[name][number] for number in numbers]) for name in names}
        out = run(**rows, attention_mask=columns < visible[:, None], has_unseen_tokens=True)
        vectors.update(zip(numbers, out.split(width), strict=True))
    others = [number for number in range(len(lengths)) if number not in vectors]
    if others:
        flat = {name: torch.cat([parts[name][number] for number in others]) for name in names}
        sizes = [lengths[number] for number in others]
        bounds = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)  # read on the host
        vectors.update(zip(others, run(**flat, cu_seqlens=bounds).split(sizes), strict=True))
    return [vectors[number] for number in range(len(lengths))]
