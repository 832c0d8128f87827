"""The models of an index: their identity, and predictors that are opened when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

from bertblocks.checkpoints.files import checkpoint_digest, find_checkpoint
from bertblocks.checkpoints.sentence_transformers import find_kind
from bertblocks.inference.splitting import TooLong
from bertblocks.search.manifest import IndexSettings, ModelIdentity, SearchIndexError
from bertblocks.tasks.predictor import Predictor

Role = Literal["model", "sparse"]
#: By role: the kinds of folders that fit, and what they are called. None is a checkpoint without further files.
_KINDS: dict[Role, tuple[tuple[str | None, ...], str]] = {
    "model": ((None, "embedder"), "an embedder"),
    "sparse": ((None, "sparse-encoder"), "a sparse encoder"),
}


def identify(source: str | Path, role: Role | None = None) -> ModelIdentity:
    """The absolute path or hub id of a model, and one SHA-256 over all of its files.

    A folder of another kind than `role` needs is an error.
    """
    folder = find_checkpoint(source)
    kind = find_kind(folder)
    if role is not None and kind not in _KINDS[role][0]:
        raise SearchIndexError(f"{source} is of the kind {kind!r}; an index needs {_KINDS[role][1]} as its {role}.")
    return ModelIdentity(str(folder.resolve()) if Path(source).is_dir() else str(source), checkpoint_digest(folder))


class IndexModels:
    """The embedder and the sparse encoder of an index. A model that differs from the recorded one is an error."""

    def __init__(
        self,
        folder: Path,
        settings: IndexSettings,
        model: ModelIdentity | None,
        sparse: ModelIdentity | None,
        options: dict[str, Any],
    ) -> None:
        self.folder, self.settings, self.options = folder, settings, options
        self._known: dict[Role, ModelIdentity | None] = {"model": model, "sparse": sparse}
        self._checked: set[Role] = set()
        self._opened: dict[Role, Predictor] = {}

    def has(self, role: Role) -> bool:
        return self._known[role] is not None

    def use(self, role: Role, source: str | Path | None) -> None:
        """Uses the model at another place if one is given; it must be the recorded one."""
        if source is not None:
            found = identify(source, role)
            check_identity(self.folder, role, self._known[role], found)
            self._known[role] = found
            self._checked.add(role)

    def encode(self, texts: Iterable[str], role: str) -> Iterator[Any]:
        """Vectors of texts; `role` is "query" or "document". The error of a text takes the place of its vector."""
        prompt = self.settings.query_prompt if role == "query" else self.settings.document_prompt
        return self._open("model").stream(
            "encode",
            texts,
            return_exceptions=True,
            prompt=prompt,
            prompt_name=role if prompt is None else None,
            dimensions=self.settings.dimensions,
        )

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

    def _open(self, role: Role) -> Predictor:
        if role not in self._opened:
            known = self._known[role]
            if known is None:
                kind, option = ("dense", "--model") if role == "model" else ("sparse", "--sparse")
                raise SearchIndexError(f"{self.folder} has no {kind} vectors; make an index with {option} for them.")
            if role not in self._checked:
                try:
                    self.use(role, known.source)
                except FileNotFoundError as error:
                    raise SearchIndexError(
                        f"The {role} of {self.folder}, {known.source}, is not there any more; name its new place."
                    ) from error
            too_long = cast(TooLong, self.settings.too_long)
            self._opened[role] = Predictor(known.source, too_long=too_long, **self.options)
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
