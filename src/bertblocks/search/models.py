"""The models of an index: their identity, and predictors that are opened when they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.core.storage import checksum, list_files
from bertblocks.search.manifest import IndexSettings, ModelIdentity, SearchIndexError
from bertblocks.tasks.predictor import Predictor

#: Files that say something about a model but do not change it.
_NOTES = (".md", ".txt.license", ".png", ".html")


def identify(source: str | Path) -> ModelIdentity:
    """The absolute path or hub id of a model, and one SHA-256 over all of its files."""
    folder = find_checkpoint(source)
    digest = hashlib.sha256()
    for path in list_files(folder):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and not name.endswith(_NOTES):
            digest.update(f"{name}\0{checksum(path)}\n".encode())
    return ModelIdentity(str(folder.resolve()) if Path(source).is_dir() else str(source), digest.hexdigest())


class IndexModels:
    """The embedder and the sparse encoder of an index. A model that differs from the recorded one is an error."""

    def __init__(
        self,
        folder: Path,
        settings: IndexSettings,
        dense: ModelIdentity | None,
        sparse: ModelIdentity | None,
        options: dict[str, Any],
    ) -> None:
        self.folder, self.settings, self.dense, self.sparse = folder, settings, dense, sparse
        self.options = options
        self._opened: dict[str, Any] = {}

    def replace_sources(self, model: str | Path | None, sparse: str | Path | None) -> None:
        """Uses models at other places; they must be the recorded ones."""
        for role, source in (("model", model), ("sparse", sparse)):
            if source is not None:
                known = self.dense if role == "model" else self.sparse
                found = identify(source)
                check_identity(self.folder, role, known, found)
                self.__dict__["dense" if role == "model" else "sparse"] = found

    def encode(self, texts: Iterable[str], role: str) -> Iterator[Any]:
        """Vectors of texts; `role` is "query" or "document". The error of a text takes the place of its vector."""
        prompt = self.settings.query_prompt if role == "query" else self.settings.document_prompt
        named = {"prompt_name": role} if prompt is None else {"prompt": prompt}
        predictor = self._open("model")
        return predictor.stream("encode", texts, return_exceptions=True, dimensions=self.settings.dimensions, **named)

    def encode_sparse(self, texts: Iterable[str], role: str) -> Iterator[Any]:
        """Sparse vectors of texts, or their errors; documents keep their `sparse_terms` heaviest terms."""
        terms = self.settings.sparse_terms if role == "document" else None
        return self._open("sparse").stream("encode_sparse", texts, return_exceptions=True, role=role, top_k=terms)

    def encode_all(self, texts: Iterable[str], role: str, is_sparse: bool = False) -> list[Any]:
        """The vectors of texts; the first error is raised."""
        found = list(self.encode_sparse(texts, role) if is_sparse else self.encode(texts, role))
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

    def _open(self, role: str) -> Any:
        if role not in self._opened:
            known = self.dense if role == "model" else self.sparse
            if known is None:
                remedy = "--model" if role == "model" else "--sparse"
                raise SearchIndexError(
                    f"{self.folder} has no {'dense' if role == 'model' else 'sparse'} vectors; "
                    f"make an index with {remedy} for them."
                )
            try:
                found = identify(known.source)
            except FileNotFoundError as error:
                raise SearchIndexError(
                    f"The {role} of {self.folder}, {known.source}, is not there any more; name its new place."
                ) from error
            check_identity(self.folder, role, known, found)
            self._opened[role] = Predictor(known.source, too_long=self.settings.too_long, **self.options)
        return self._opened[role]


def check_identity(folder: Path, role: str, known: ModelIdentity | None, found: ModelIdentity | None) -> None:
    """Raises an error if an index was made with another model."""
    if (known is None) != (found is None):
        has = "has none" if known is None else f"has {known.source}"
        raise SearchIndexError(f"{folder}: the {role} is {found.source if found else None}, but the index {has}.")
    if known is not None and found is not None and known.sha256 != found.sha256:
        raise SearchIndexError(
            f"{folder} was made with another model: the files of {found.source} are not those of {known.source} at "
            "that time; make the index again."
        )
