"""Reranking 100 ragged passages for one query with a cross-encoder of MiniLM's size, from strings to scores.

`python -m benchmarks.rerank` runs this workload alone; it takes the options of `python -m benchmarks`.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BertForSequenceClassification

from benchmarks.inputs import Batch, docstrings, xquad_articles
from benchmarks.peers import INPUTS, Graphs, need
from benchmarks.sentences import checkpoint_folder
from benchmarks.workload import Contender, Goal, Settings, Workload
from bertblocks.tasks.predictor import Predictor

THEIRS, THEIRS_SORTED = "sentence-transformers predict, batches of 32", "sentence-transformers predict, batches of 8"
OPENVINO_INT8 = "OpenVINO int8 (static), sorted batches of 8"
OURS, OURS_INT8 = "BertBlocks Predictor.rerank, fp32", "BertBlocks Predictor.rerank, int8"
PASSAGES, SENTENCES = 50, 50
#: Pairs in a sorted batch, and those that measure the activation ranges of static int8.
BATCH = 8
LONGEST = 512


class Logits(nn.Module):
    """A transformers classifier with ids, mask and token types as input and logits as output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits


class PairGraphs(Graphs):
    inputs = (*INPUTS, "token_type_ids")
    wrapper = Logits


class Rerankers:
    """MiniLM with a head of one label, in the form that each contender needs, made on first use.

    The head is the direction in which the pooled vectors of the documents differ most. Scores of a random head differ
    so little that int8 could not be compared.
    """

    def __init__(self, query: str, documents: list[str], settings: Settings) -> None:
        self.query, self.documents, self.settings = query, documents, settings
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder(), model_max_length=LONGEST)

    @cached_property
    def theirs(self) -> Any:
        torch.manual_seed(0)
        model = BertForSequenceClassification.from_pretrained(checkpoint_folder(), num_labels=1, dtype=torch.float32)
        pooled: list[Tensor] = []
        model.eval().classifier.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
        with torch.inference_mode():
            for start in range(0, len(self.documents), BATCH):
                model(**self.tokenize(self.documents[start : start + BATCH]))
        model.classifier._forward_pre_hooks.clear()
        direction = torch.pca_lowrank(torch.cat(pooled), q=1)[2].T
        with torch.no_grad():
            model.classifier.weight.copy_(direction)
        return model

    @cached_property
    def folder(self) -> Path:
        folder = self.settings.scratch / "reranker"
        self.theirs.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    def predict(self, batch_size: int) -> Callable[[], Tensor]:
        need("sentence_transformers")
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(self.folder), device="cpu", activation_fn=nn.Identity())
        pairs = [(self.query, document) for document in self.documents]
        return lambda: model.predict(pairs, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False)

    def rerank(self, int8: bool) -> Callable[[], Tensor]:
        dtype = None if int8 else torch.float32
        predictor = Predictor(self.folder, dtype=dtype, threads=self.settings.threads, int8=int8)

        def run() -> Tensor:
            scores = torch.empty(len(self.documents))
            for ranked in predictor.rerank(self.query, self.documents):
                scores[ranked.index] = ranked.score
            return scores.logit()  # its activation is the sigmoid

        return run

    def openvino(self) -> Callable[[], Tensor]:
        documents = self.documents
        calibration = self.tokenize(documents[:: max(len(documents) // BATCH, 1)][:BATCH])
        graphs = PairGraphs(self.theirs, "reranker", self.settings.scratch, self.settings.threads, calibration)
        compiled = graphs.openvino_int8

        def run() -> Tensor:
            scores = torch.empty(len(documents))
            order = np.argsort([-len(document) for document in documents])
            for start in range(0, len(order), BATCH):
                rows = order[start : start + BATCH]
                scores[torch.from_numpy(rows)] = compiled(self.tokenize([documents[row] for row in rows]))[:, 0]
            return scores

        return run

    def tokenize(self, documents: list[str]) -> Batch:
        pairs = [self.query] * len(documents), documents
        return dict(self.tokenizer(*pairs, padding=True, truncation="longest_first", return_tensors="pt"))


def passages(folder: Path | None) -> tuple[str, str, list[str]]:
    """The source, a question, and passages and sentences of XQuAD in mixed order, or docstrings."""
    articles = xquad_articles(folder)
    rng = random.Random(0)
    if articles is None:
        texts = rng.sample(docstrings(), PASSAGES + SENTENCES)
        return "docstrings of the standard library", "How is a file opened for reading?", texts
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    contexts = [paragraph["context"] for paragraph in rng.sample(paragraphs, PASSAGES + SENTENCES)]
    sentences = [rng.choice(re.split(r"(?<=[.!?]) ", context)) for context in contexts[PASSAGES:]]
    documents = contexts[:PASSAGES] + sentences
    rng.shuffle(documents)
    return "XQuAD", paragraphs[0]["qas"][0]["question"], documents


def rerank(settings: Settings) -> Workload:
    """Both peers sort pairs by length; smaller batches waste less on padding."""
    source, query, documents = passages(settings.data)
    models = Rerankers(query, documents, settings)
    return Workload(
        f"reranking, MiniLM with 6 layers, one query and {len(documents)} ragged passages ({source})",
        [
            Contender(THEIRS, lambda: models.predict(32)),
            Contender(THEIRS_SORTED, lambda: models.predict(8)),
            Contender(OPENVINO_INT8, models.openvino, exact=False),
            Contender(OURS, lambda: models.rerank(int8=False)),
            Contender(OURS_INT8, lambda: models.rerank(int8=True), exact=False),
        ],
        # one row, so that int8 is compared by how it orders documents
        compared=lambda scores: (scores - scores.mean())[None],
        goals=[Goal(OURS, THEIRS, 3.0), Goal(OURS_INT8, OPENVINO_INT8, 1.3)],
        facts={"model": "MiniLM-L6", "texts": len(documents), "source": source},
    )


if __name__ == "__main__":
    from benchmarks.__main__ import main

    raise SystemExit(main(["--only", "rerank", *sys.argv[1:]]))
