"""A predictor as MTEB's own library wants its encoders (Muennighoff et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bertblocks.tasks.predictor import Predictor


class MTEBEncoder:
    """`mteb.evaluate(MTEBEncoder(predictor), tasks)` measures a predictor's embeddings.

    The checkpoint's prompts are chosen by task and kind of text as MTEB does for sentence-transformers.
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
                "embed_dim": model.config.hidden_size,
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
        """Embeddings of batches of texts, each under the key "text". The predictor makes batches of its own."""
        from mteb.models.abs_encoder import get_prompt_name

        prompts = self.predictor.prompts
        name = get_prompt_name(prompts, task_metadata, prompt_type) if prompts else None
        texts = (text for batch in inputs for text in batch["text"])
        return self.predictor.encode(texts, prompt=name, progress=bool(options.get("show_progress_bar")))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """The cosine of every vector of the first with every one of the second."""
        return _unit(embeddings1) @ _unit(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """The cosine of each vector of the first with its partner in the second."""
        return (_unit(embeddings1) * _unit(embeddings2)).sum(axis=-1)


def _unit(vectors: Any) -> np.ndarray:
    rows = np.atleast_2d(np.asarray(vectors))
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True).clip(min=1e-12)
