"""Regression of the teacher's embeddings (LEAF; Vujanic and Rueckstiess, 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from bertblocks.core.registry import nearest
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.nn.embedding_head import Dense, EmbeddingHead
from bertblocks.tasks.features import make_batch
from bertblocks.training.distillation.losses import embedding_loss
from bertblocks.training.distillation.method import Item, TextMethod
from bertblocks.training.distillation.models import Student, Teacher
from bertblocks.training.distillation.settings import EmbeddingDistillSettings
from bertblocks.training.distillation.teacher_cache import TeacherCache


class EmbeddingMethod(TextMethod):
    """The student makes the teacher's embeddings, so that both can be used with the same index.

    A linear layer follows the student's own modules if its embeddings have another size. No labels are needed, and the
    tokenizers may differ. Teacher's embeddings are cached.
    """

    task = "base"
    settings: EmbeddingDistillSettings

    def __init__(self, settings: Any, teacher: Teacher, student: Student, device: torch.device) -> None:
        super().__init__(settings, teacher, student, device)
        own, theirs = student.embedding, teacher.embedding
        known = {"query", "document", *theirs.prompts}
        for name in settings.prompt_names:
            if name not in known:
                raise ValueError(
                    f"prompt_names has {name!r}; the teacher's prompts are {', '.join(sorted(known))}"
                    f"{nearest(name, known)}."
                )
        self.variants = len(settings.prompt_names) or 1
        pooling = settings.pooling or (own.pooling if student.is_embedder else theirs.pooling)
        layers = list(own.layers)
        width = student.model.config.hidden_size
        size = EmbeddingHead(pooling, width, layers).size
        wanted = EmbeddingHead(theirs.pooling, teacher.model.config.hidden_size, theirs.layers).size
        if size != wanted:
            layers.append(Dense(size, wanted, bias=True, activation="Identity"))
            self.notes.append(f"a linear layer brings the student's {size} dimensions to the teacher's {wanted}")
        model: Any = student.model
        model.embedding_head = EmbeddingHead(pooling, width, [layer.requires_grad_(True) for layer in layers])
        if model.pooler is not None:
            model.pooler.requires_grad_(False)  # embeddings do not use it
        embedding = replace(theirs, pooling=pooling, layers=tuple(layers))
        self.student = replace(student, embedding=embedding, is_embedder=True)

    def prepare(self, examples: Sequence[str], cache: Path, console: Console) -> None:
        theirs = self.teacher.embedding
        names: list[str | None] = [*self.settings.prompt_names] or [None]
        texts = [theirs.find_prompt(None, name) + text for text in examples for name in names]
        self.features = self.tokenize(texts)
        store = TeacherCache(cache / self.cache_key("embeddings"))

        def compute(missing: list[str]) -> Any:
            console.print(f"Running the teacher on {len(missing):,} texts; {store.folder} keeps its embeddings.")
            vectors = self.teacher_predictor.stream("encode", missing, prompt="", progress=not console.quiet)
            return (vector.astype(np.float16) for vector in vectors)

        self.targets = store.get(texts, compute)
        self.notes.append(f"{store.found:,} embeddings of the teacher were cached, {store.computed:,} were computed")

    def batch(self, items: Sequence[Item]) -> FlatBatch:
        indices = np.array([index for index, _ in items])
        targets = torch.from_numpy(self.targets[indices].astype(np.float32))
        return make_batch([self.features[index] for index in indices], targets, len(items))

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        assert batch.labels is not None
        return {"loss": embedding_loss(model(**batch.inputs).pooler_output, batch.labels)}

    def measures(self, means: dict[str, float]) -> dict[str, float]:
        return {"cosine": 1 - means["loss"] / 2}  # the distance of vectors of length 1
