"""Adapts models to the interfaces of the MTEB library (Muennighoff et al., 2023), one class per interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.evaluation.retrievers import Retriever, first_documents, open_model
from bertblocks.tasks.predictor import Predictor


def mteb_model(model: str | Path, **options: Any) -> _Adapter:
    """Opens a checkpoint for `mteb.evaluate(mteb_model("folder"), tasks)`, with the class that its kind needs.

    `options` are those of `Predictor`.
    """
    predictor, kind = open_model(model, **options)
    name = f"bertblocks/{Path(model).name}"
    if kind == "cross-encoder":
        return MTEBCrossEncoder(predictor, name)
    if kind == "sparse-encoder" or kind == "multi-vector":
        return MTEBRetriever(predictor, kind, name)
    return MTEBEncoder(predictor, name)


class _Adapter:
    """A predictor, and what MTEB records about it."""

    model_type = "dense"
    similarity_name: str | None = "cosine"

    def __init__(self, predictor: Predictor, name: str = "bertblocks/predictor", revision: str = "none") -> None:
        self.predictor = predictor
        self.name = name
        self.revision = revision

    @property
    def mteb_model_meta(self) -> Any:
        from mteb.models import ModelMeta

        return ModelMeta.create_empty(
            {
                "name": self.name,
                "revision": self.revision,
                "n_parameters": self.predictor.model.num_parameters(),
                "max_tokens": self.predictor.max_length,
                "embed_dim": self.predictor.embedding_size if self.model_type == "dense" else None,
                "similarity_fn_name": self.similarity_name,
                "model_type": [self.model_type],
            }
        )


class MTEBEncoder(_Adapter):
    """Wraps the predictor of an embedder for `mteb.evaluate(MTEBEncoder(predictor), tasks)`.

    The checkpoint's prompts are selected by task and prompt type, as MTEB does for sentence-transformers.
    """

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **options: Any,
    ) -> np.ndarray:
        """Embeds batches of texts, which are under the key "text". The predictor forms its own batches."""
        from mteb.models.abs_encoder import get_prompt_name

        prompts = self.predictor.prompts
        name = get_prompt_name(prompts, task_metadata, prompt_type) if prompts else None
        return self.predictor.encode(_texts(inputs), prompt=name, progress=_is_shown(options))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Cosine similarities between all vectors of the first and all vectors of the second."""
        return _unit(embeddings1) @ _unit(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """The cosine similarity of each vector in the first with the vector at the same index in the second."""
        return (_unit(embeddings1) * _unit(embeddings2)).sum(axis=-1)


class MTEBCrossEncoder(_Adapter):
    """Wraps the predictor of a reranker. MTEB gives it the candidates of reranking tasks."""

    model_type, similarity_name = "cross-encoder", None

    def predict(
        self,
        inputs1: Iterable[Mapping[str, Any]],
        inputs2: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **options: Any,
    ) -> np.ndarray:
        """Scores the query and the document at the same place in two streams of batches."""
        pairs = [(query, [text]) for query, text in zip(_texts(inputs1), _texts(inputs2), strict=True)]
        ranked = self.predictor.stream("rerank", pairs, progress=_is_shown(options))
        return np.array([ranking[0].score for ranking in ranked], dtype=np.float32)


class MTEBRetriever(_Adapter):
    """Wraps the predictor of a sparse or multi-vector encoder for MTEB's tasks of retrieval and reranking."""

    def __init__(
        self, predictor: Predictor, kind: str, name: str = "bertblocks/predictor", revision: str = "none"
    ) -> None:
        super().__init__(predictor, name, revision)
        self.kind = kind
        self.model_type = {"sparse-encoder": "sparse", "multi-vector": "late-interaction"}[kind]
        self.similarity_name = {"sparse-encoder": "dot", "multi-vector": "MaxSim"}[kind]
        self.documents: dict[str, str] = {}

    def index(
        self,
        corpus: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        encode_kwargs: Mapping[str, Any],
        num_proc: int | None = None,
        **options: Any,
    ) -> None:
        """Keeps the titles and texts of the corpus, which `search` encodes in blocks."""
        self.documents = {row["id"]: f"{row.get('title') or ''} {row['text']}".strip() for row in corpus}

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        num_proc: int | None = None,
        **options: Any,
    ) -> dict[str, dict[str, float]]:
        """Returns the scores of the best documents of each query, or of its candidates in `top_ranked`."""
        texts = {row["id"]: " ".join(filter(None, (row["text"], row.get("instruction")))) for row in queries}
        retriever = Retriever(self.predictor, self.kind, _is_shown(encode_kwargs))
        if top_ranked is None:
            return retriever.search(texts, self.documents, top_k)
        return first_documents(retriever.score(texts, self.documents, top_ranked), top_k)


def _texts(batches: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return (text for batch in batches for text in batch["text"])


def _is_shown(options: Mapping[str, Any]) -> bool:
    return bool(options.get("show_progress_bar"))


def _unit(vectors: Any) -> np.ndarray:
    matrix = np.atleast_2d(np.asarray(vectors))
    return matrix / np.linalg.norm(matrix, axis=-1, keepdims=True).clip(min=1e-12)
