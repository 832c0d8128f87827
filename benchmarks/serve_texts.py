"""Real texts of four lengths for the load tests, the same every time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.inputs import real_texts

#: Most tokens of a query and of a sentence, and bounds of a long document; special tokens count.
QUERY, SENTENCE, DOCUMENT = 16, 64, (400, 500)
#: Shares of queries, sentences and paragraphs in mixed requests.
SHARES = (0.5, 0.3, 0.2)


@dataclass(frozen=True)
class Texts:
    """Texts by length, and `mixed` ones in the shares of `SHARES`."""

    source: str
    queries: list[str]
    sentences: list[str]
    paragraphs: list[str]
    documents: list[str]
    mixed: list[str]
    #: Mean tokens of a mixed text.
    mean_tokens: float


def load_texts(folder: Path | None, model: Path, count: int = 2000) -> Texts:
    """Sorts the texts of the data sets by their number of tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    source, texts = real_texts(folder, 6000)
    by_length: tuple[list[str], list[str], list[str]] = ([], [], [])
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        length = len(encoding.ids)
        if length > DOCUMENT[1]:
            text = text[: encoding.offsets[DOCUMENT[1] - 2][1]]
        by_length[0 if length <= QUERY else 1 if length <= SENTENCE else 2].append(text)
    rng = random.Random(0)
    kinds = rng.choices(by_length, SHARES, k=count)
    mixed = [rng.choice(kind) for kind in kinds]
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(mixed))
    return Texts(source, *by_length, make_documents(by_length[2], tokenizer), mixed, tokens / len(mixed))


def make_documents(paragraphs: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Joins paragraphs until each document has as many tokens as `DOCUMENT` says, and cuts it there."""
    documents, text = [], ""
    for paragraph in paragraphs:
        text = f"{text} {paragraph}".strip()
        encoding = tokenizer.encode(text)
        if len(encoding.ids) >= DOCUMENT[0]:
            last = min(len(encoding.ids), DOCUMENT[1]) - 2
            documents.append(text[: encoding.offsets[last][1]])
            text = ""
    return documents
