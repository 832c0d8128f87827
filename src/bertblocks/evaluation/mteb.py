"""Adapts a predictor to the encoder interface of the MTEB library (Muennighoff et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bertblocks.tasks.predictor import Predictor


class MTEBEncoder:
    """Wraps a predictor for `mteb.evaluate(MTEBEncoder(predictor), tasks)`.

    The checkpoint's prompts are selected by task and prompt type, as MTEB does for sentence-transformers.
    """

    def __init__(self, predictor: Predictor, name: str = "bertblocks/predictor", revision: str = "none") -> None:
        self.predictor = predictor
        self.name = name
        self.revision = revision

    @property
    def mteb_model_meta(self) -> Any:
        from mteb.models import ModelMeta

        model = self.predictor.model
        return ModelMeta.create_empty(
            {
                "name": self.name,
                "revision": self.revision,
                "n_parameters": model.num_parameters(),
                "max_tokens": self.predictor.max_length,
                "embed_dim": self.predictor.embedding_size,
                "similarity_fn_name": "cosine",
            }
        )

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
        texts = (text for batch in inputs for text in batch["text"])
        return self.predictor.encode(texts, prompt=name, progress=bool(options.get("show_progress_bar")))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Cosine similarities between all vectors of the first and all vectors of the second."""
        return _unit(embeddings1) @ _unit(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """The cosine similarity of each vector in the first with the vector at the same index in the second."""
        return (_unit(embeddings1) * _unit(embeddings2)).sum(axis=-1)


def _unit(vectors: Any) -> np.ndarray:
    matrix = np.atleast_2d(np.asarray(vectors))
    return matrix / np.linalg.norm(matrix, axis=-1, keepdims=True).clip(min=1e-12)
