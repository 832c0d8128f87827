"""A server with tiny random models of every head, on loopback, and the models of transformers with the same weights."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
import uvloop
from starlette.applications import Starlette

from bertblocks import Predictor, from_huggingface
from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings, save_multi_vector
from bertblocks.serve.app import make_app
from bertblocks.serve.front import Front, Service
from bertblocks.serve.metrics import Metrics
from bertblocks.serve.models import ModelSet, ServedModel
from bertblocks.serve.runner import make_threads
from bertblocks.serve.scheduler import Scheduler
from bertblocks.serve.settings import ServeSettings
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import TAGS, labelled, make_bert

MAX_INPUTS = 8
#: By the name of the model: the class of transformers, and its options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedder": ("BertModel", {}),
    "language": ("BertForMaskedLM", {}),
    "classifier": ("BertForSequenceClassification", labelled("bad", "fine", "good")),
    "reranker": ("BertForSequenceClassification", {"num_labels": 1}),
    "tagger": ("BertForTokenClassification", labelled(*TAGS)),
    "answerer": ("BertForQuestionAnswering", {}),
}


@dataclass(frozen=True)
class Live:
    """A running server, its models, and transformers' models by the same names."""

    url: str
    models: ModelSet
    theirs: dict[str, Any]
    tokenizer: Any


def make_models(folder: Path) -> tuple[ModelSet, dict[str, Any]]:
    torch.manual_seed(0)
    tokenizer = wrap("wordpiece")
    theirs = {name: make_bert(kind, **options) for name, (kind, options) in KINDS.items()}
    models = [ServedModel(name, Predictor(from_huggingface(model), tokenizer)) for name, model in theirs.items()]
    theirs["tokens"] = make_bert("BertModel")
    own: Any = from_huggingface(theirs["tokens"])
    save_multi_vector(own, folder, tokenizer, MultiVectorSettings(document_length=24, query_length=24))
    models.append(ServedModel("tokens", Predictor(folder, dtype=torch.float32)))
    return ModelSet(models), theirs


@contextmanager
def serve(folder: Path, **settings: Any) -> Iterator[Live]:
    models, theirs = make_models(folder)
    options = ServeSettings(**{"max_inputs": MAX_INPUTS, **settings})
    scheduler = Scheduler(models, lambda queue: make_threads(models, queue, 1), queue_tokens=options.queue_tokens)
    with listen(make_app(models, scheduler, options), scheduler) as url:
        yield Live(url, models, theirs, wrap("wordpiece"))


@contextmanager
def listen(app: Starlette, scheduler: Any) -> Iterator[str]:
    """Runs an application on a free port, in a thread, behind the part that answers probes."""
    listener = socket.create_server(("127.0.0.1", 0))
    front = Front(Metrics())
    front.open(Service(app, scheduler))
    server = uvicorn.Server(uvicorn.Config(front, log_level="error", lifespan="off"))

    async def run() -> None:
        await scheduler.start()
        await server.serve([listener])
        await scheduler.drain(5)

    thread = threading.Thread(target=uvloop.run, args=(run(),), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("The server did not start.")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def theirs_mean(live: Live, texts: list[str], name: str = "embedder") -> torch.Tensor:
    """The embeddings of transformers' model: the mean over tokens, scaled to length 1."""
    rows = [theirs_hidden(live, text, name).mean(dim=0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def theirs_hidden(live: Live, text: str, name: str = "embedder") -> torch.Tensor:
    with torch.inference_mode():
        return live.theirs[name](**live.tokenizer(text, return_tensors="pt")).last_hidden_state[0]


def theirs_logits(live: Live, name: str, *texts: str) -> torch.Tensor:
    """The logits of transformers' classifier for a text or a pair."""
    model: transformers.PreTrainedModel = live.theirs[name]
    with torch.inference_mode():
        return model(**live.tokenizer(*texts, return_tensors="pt")).logits[0]
