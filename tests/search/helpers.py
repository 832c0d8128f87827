"""Predictors that look vectors up, and small indexes made with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.search.index import SearchIndex


@dataclass(frozen=True)
class SparseVector:
    indices: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Ranked:
    index: int
    score: float
    text: str


class FakePredictor:
    """Reads vectors from texts: "1 0 -2" is a dense vector, and terms 0 and 2 with the weights 1 and 2."""

    def __init__(self, source: Any = None, **options: Any) -> None:
        self.options = options

    def stream(self, method: str, texts: Iterable[str], **options: Any) -> Iterator[Any]:
        for text in texts:
            try:
                numbers = np.array(text.split("|")[0].split(), np.float32)
            except ValueError as error:
                yield error
                continue
            if method == "encode":
                yield numbers[: options["dimensions"]]
            else:
                terms = np.flatnonzero(numbers)
                yield SparseVector(terms.astype(np.int32), np.abs(numbers[terms]))

    def rerank(self, queries: Sequence[str], documents: Sequence[Sequence[str]]) -> list[list[Ranked]]:
        """The last number of a document is its score."""
        ranked = [
            [Ranked(index, float(text.split("|")[0].split()[-1]), text) for index, text in enumerate(texts)]
            for texts in documents
        ]
        return [sorted(row, key=lambda entry: -entry.score) for row in ranked]


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def write(vector: np.ndarray) -> str:
    return " ".join(f"{number:.9g}" for number in vector)


def random_vectors(count: int, dimensions: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def contents(index: SearchIndex) -> dict[str, Any]:
    """Everything that a user can get from an index, whatever its files."""
    return {
        document.id: (document.text, document.columns, None if vector is None else vector.tolist())
        for document, vector in index.documents()
    }
